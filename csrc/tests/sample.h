// Deterministic inputs, and bitwise comparison for the kernel tests.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "tests/check.h"

namespace bunkbed::test {

// from, from + 1, ..., to - 1
inline std::vector<int64_t> range(int64_t from, int64_t to) {
  std::vector<int64_t> numbers;
  for (int64_t number = from; number < to; ++number) numbers.push_back(number);
  return numbers;
}

// SplitMix64 (Steele et al., 2014): the same inputs with every standard library.
class Sampler {
 public:
  explicit Sampler(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  float uniform(float low, float high) { return low + (high - low) * (static_cast<float>(bits() >> 40) * 0x1p-24f); }

  // Any finite float32, zeros and subnormals included.
  float finite() {
    for (;;) {
      const auto word = static_cast<uint32_t>(bits());
      if ((word & 0x7f800000u) != 0x7f800000u) return std::bit_cast<float>(word);
    }
  }

  // Mostly of ordinary size, now and then zero, subnormal, tiny or large.
  float mixed() {
    switch (bits() % 16) {
      case 0:
        return 0.0f;
      case 1:
        return -0.0f;
      case 2:
        return std::bit_cast<float>(static_cast<uint32_t>(bits() >> 41));  // subnormal
      case 3:
        return uniform(-1e-20f, 1e-20f);
      case 4:
        return uniform(-1e15f, 1e15f);
      default:
        return uniform(-2.0f, 2.0f);
    }
  }

  std::vector<float> mixed(int64_t n) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = mixed();
    return values;
  }

 private:
  uint64_t state_;
};

inline std::vector<Simd> supported_levels() {
  std::vector<Simd> levels;
  for (Simd level : {Simd::kScalar, Simd::kAvx2, Simd::kAvx512}) {
    if (simd_supported(level)) levels.push_back(level);
  }
  return levels;
}

// Row widths around every vector width and its multiples.
inline std::vector<int64_t> dims() {
  std::vector<int64_t> all;
  for (int64_t dim = 1; dim <= 70; ++dim) all.push_back(dim);
  for (int64_t dim : {127, 128, 129, 257}) all.push_back(dim);
  return all;
}

inline void check_same_bits(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  CHECK_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) {
      std::ostringstream text;
      text << what << ": element " << i << " differs: " << std::hexfloat << a[i] << " and " << b[i];
      fail(__FILE__, __LINE__, text.str());
    }
  }
}

}  // namespace bunkbed::test
