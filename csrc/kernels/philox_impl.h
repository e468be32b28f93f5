// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), 8 blocks at a time.
// Included once by each translation unit of the kernels; see kernels_impl.h.
//
// key = (seed bits 0..31, seed bits 32..63); counter = (id bits 0..31, id bits 32..63, block, extra).
// The streams of one table never meet: initial values count blocks from 0 with extra = 0, stochastic rounding
// from kRoundingStream with extra = step mod 2^32.

constexpr int64_t kGroupBlocks = 8;
constexpr int64_t kGroupPairs = 2 * kGroupBlocks;
constexpr uint32_t kRoundingStream = 0x80000000u;

// A block's four words w0 w1 w2 w3 are two pairs: (w0, w1) and (w2, w3). even[p] and odd[p] are the two words of
// pair p, block by block, which is the order in which the initialisers want them.
struct alignas(64) PhiloxWords {
  uint32_t even[kGroupPairs];
  uint32_t odd[kGroupPairs];
};

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

typedef uint64_t Words64 __attribute__((vector_size(kVectorBytes)));

// Low 32 bits of each lane times `factor`. Compilers do not see that `(a & 0xffffffff) * factor` is one
// instruction, hence the intrinsics.
inline Words64 multiply_low(Words64 a, uint32_t factor) {
#if defined(__AVX512F__)
  // The masked form, because GCC's unmasked one warns about its own undefined operand.
  return (Words64)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (Words64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(factor));
#elif defined(__SSE2__)
  return (Words64)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(factor));
#else
  return (a & 0xffffffffu) * uint64_t{factor};
#endif
}

// Each 32-bit word of the state sits in a 64-bit lane whose upper half may hold rubbish: the multiplication reads
// the lower half only, exclusive or does not carry, and the end masks it off.
inline void philox_group(uint64_t seed, int64_t id, uint32_t first_block, uint32_t extra, PhiloxWords* words) {
  static constexpr uint64_t kIota[kGroupBlocks] = {0, 1, 2, 3, 4, 5, 6, 7};
  constexpr size_t kLanes = kVectorBytes / 8;
  constexpr size_t kVectors = kGroupBlocks / kLanes;
  const auto id_bits = static_cast<uint64_t>(id);
  Words64 c0[kVectors];
  Words64 c1[kVectors];
  Words64 c2[kVectors];
  Words64 c3[kVectors];
  for (size_t v = 0; v < kVectors; ++v) {
    c0[v] = Words64{} + (id_bits & 0xffffffffu);
    c1[v] = Words64{} + (id_bits >> 32);
    __builtin_memcpy(&c2[v], kIota + v * kLanes, sizeof c2[v]);
    c2[v] = c2[v] + uint64_t{first_block};
    c3[v] = Words64{} + extra;
  }
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (size_t v = 0; v < kVectors; ++v) {
      const Words64 product0 = multiply_low(c0[v], 0xd2511f53u);
      const Words64 product1 = multiply_low(c2[v], 0xcd9e8d57u);
      c0[v] = (product1 >> 32) ^ c1[v] ^ uint64_t{key0};
      c1[v] = product1;
      c2[v] = (product0 >> 32) ^ c3[v] ^ uint64_t{key1};
      c3[v] = product0;
    }
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  for (size_t v = 0; v < kVectors; ++v) {
    const Words64 even = (c0[v] & 0xffffffffu) | (c2[v] << 32);
    const Words64 odd = (c1[v] & 0xffffffffu) | (c3[v] << 32);
    __builtin_memcpy(words->even + 2 * kLanes * v, &even, sizeof even);
    __builtin_memcpy(words->odd + 2 * kLanes * v, &odd, sizeof odd);
  }
}
