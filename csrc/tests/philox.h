// Philox4x32-10 one block at a time, as published: the oracle for the vectorized generator.
#pragma once

#include <array>
#include <cstdint>

namespace bunkbed::test {

inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xd2511f53u} * counter[0];
    const uint64_t product1 = uint64_t{0xcd9e8d57u} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
  return counter;
}

// A block of the stream that FORMAT.md assigns to a row.
inline std::array<uint32_t, 4> row_block(uint64_t seed, int64_t id, uint32_t block, uint32_t extra) {
  const auto id_bits = static_cast<uint64_t>(id);
  return philox({static_cast<uint32_t>(id_bits), static_cast<uint32_t>(id_bits >> 32), block, extra},
                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

}  // namespace bunkbed::test
