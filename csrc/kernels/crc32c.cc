#include "kernels/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bunkbed {
namespace {

static_assert(std::endian::native == std::endian::little, "bunkbed's files and kernels are little-endian");

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b] is the CRC of byte b followed by k zero bytes, so eight look-ups advance eight bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint64_t load64(const unsigned char* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

}  // namespace

uint32_t crc32c_software(uint32_t crc, const void* data, size_t n) {
  const auto* p = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; n >= 8; n -= 8, p += 8) {
    const uint64_t word = load64(p) ^ crc;
    crc = kTables[7][word & 0xff] ^ kTables[6][(word >> 8) & 0xff] ^ kTables[5][(word >> 16) & 0xff] ^
          kTables[4][(word >> 24) & 0xff] ^ kTables[3][(word >> 32) & 0xff] ^ kTables[2][(word >> 40) & 0xff] ^
          kTables[1][(word >> 48) & 0xff] ^ kTables[0][word >> 56];
  }
  for (; n > 0; --n, ++p) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xff];
  return ~crc;
}

#if defined(__x86_64__)

namespace {

#define BUNKBED_CRC_TARGET __attribute__((target("sse4.2,pclmul")))

// The crc32 instruction takes 3 cycles but one can start every cycle, so three adjacent blocks of kBlockBytes are
// computed concurrently. Carry-less multiplication then extends the first two results by two blocks and by one:
// x^(8 n - 33) mod P, reflected, extends a CRC by n bytes of zeros.
template <size_t kBlockBytes, uint32_t kShiftOne, uint32_t kShiftTwo>
BUNKBED_CRC_TARGET inline uint64_t three_blocks(uint64_t crc, const unsigned char* p) {
  uint64_t a = crc;
  uint64_t b = 0;
  uint64_t c = 0;
  for (size_t i = 0; i < kBlockBytes; i += 8) {
    a = _mm_crc32_u64(a, load64(p + i));
    b = _mm_crc32_u64(b, load64(p + kBlockBytes + i));
    c = _mm_crc32_u64(c, load64(p + 2 * kBlockBytes + i));
  }
  const __m128i first =
      _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(a)), _mm_cvtsi64_si128(kShiftTwo), 0);
  const __m128i second =
      _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(b)), _mm_cvtsi64_si128(kShiftOne), 0);
  const auto product = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_xor_si128(first, second)));
  return _mm_crc32_u64(0, product) ^ c;
}

}  // namespace

BUNKBED_CRC_TARGET uint32_t crc32c_hardware(uint32_t crc, const void* data, size_t n) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t state = static_cast<uint32_t>(~crc);
  for (; n >= 768; n -= 768, p += 768) state = three_blocks<256, 0xb9e02b86, 0xdd7e3b0c>(state, p);
  for (; n >= 192; n -= 192, p += 192) state = three_blocks<64, 0x9e4addf8, 0x0d3b6092>(state, p);
  for (; n >= 8; n -= 8, p += 8) state = _mm_crc32_u64(state, load64(p));
  auto tail = static_cast<uint32_t>(state);
  for (; n > 0; --n, ++p) tail = _mm_crc32_u8(tail, *p);
  return ~tail;
}

bool crc32c_has_hardware() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }

#else

uint32_t crc32c_hardware(uint32_t crc, const void* data, size_t n) { return crc32c_software(crc, data, n); }

bool crc32c_has_hardware() { return false; }

#endif

}  // namespace bunkbed
