#include <cstring>

#include "kernels/crc32c.h"
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/sample.h"

namespace bunkbed {
namespace {

using Function = uint32_t (*)(uint32_t, const void*, size_t);

std::vector<Function> functions() {
  std::vector<Function> all = {crc32c_software, kernels().crc32c};
  if (crc32c_has_hardware()) all.push_back(crc32c_hardware);
  return all;
}

}  // namespace

TEST(crc32c_matches_the_published_vectors) {
  unsigned char zeros[32] = {};
  unsigned char ones[32];
  unsigned char rising[32];
  unsigned char falling[32];
  std::memset(ones, 0xff, sizeof ones);
  for (unsigned char i = 0; i < 32; ++i) {
    rising[i] = i;
    falling[i] = static_cast<unsigned char>(31 - i);
  }
  for (Function crc32c : functions()) {
    CHECK_EQ(crc32c(0, "123456789", 9), 0xe3069283u);
    CHECK_EQ(crc32c(0, zeros, 32), 0x8a9136aau);  // RFC 3720, B.4
    CHECK_EQ(crc32c(0, ones, 32), 0x62a8ab43u);
    CHECK_EQ(crc32c(0, rising, 32), 0x46dd794eu);
    CHECK_EQ(crc32c(0, falling, 32), 0x113fdb5cu);
    CHECK_EQ(crc32c(0, nullptr, 0), 0u);
  }
}

TEST(crc32c_hardware_and_software_agree_at_every_length_and_offset) {
  test::Sampler sampler(5);
  std::vector<unsigned char> data(5000);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(sampler.bits());
  for (Function crc32c : functions()) {
    for (size_t n = 0; n < 1700; ++n) {
      const size_t offset = n % 13;
      CHECK_EQ(crc32c(17, data.data() + offset, n), crc32c_software(17, data.data() + offset, n));
    }
    CHECK_EQ(crc32c(0, data.data(), 5000), crc32c_software(0, data.data(), 5000));
  }
}

TEST(crc32c_continues_from_an_earlier_part) {
  test::Sampler sampler(6);
  std::vector<unsigned char> data(2000);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(sampler.bits());
  for (Function crc32c : functions()) {
    const uint32_t whole = crc32c(0, data.data(), data.size());
    for (size_t cut : {0, 1, 7, 8, 100, 768, 1999, 2000}) {
      CHECK_EQ(crc32c(crc32c(0, data.data(), cut), data.data() + cut, data.size() - cut), whole);
    }
  }
}

}  // namespace bunkbed
