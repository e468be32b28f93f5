// 16-bit weights: exact widening, rounding to nearest, unbiased stochastic rounding.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/philox.h"
#include "tests/sample.h"

namespace bunkbed {
namespace {

using test::Sampler;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kNarrow[] = {DType::kBFloat16, DType::kFloat16};

// By the definition of the formats, in double.
double value_of(DType dtype, uint16_t half) {
  const int fraction_bits = dtype == DType::kBFloat16 ? 7 : 10;
  const int bias = dtype == DType::kBFloat16 ? 127 : 15;
  const int exponent = (half & 0x7fff) >> fraction_bits;
  const int fraction = half & ((1 << fraction_bits) - 1);
  const double sign = (half & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 2 * bias + 1) {
    return fraction == 0 ? sign * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

uint16_t largest_finite(DType dtype) { return dtype == DType::kBFloat16 ? 0x7f7f : 0x7bff; }
uint16_t infinity(DType dtype) { return dtype == DType::kBFloat16 ? 0x7f80 : 0x7c00; }

// Largest magnitude encoding whose value is at most |x|, for finite x; encodings are ordered like their values.
uint16_t neighbour_below(DType dtype, double magnitude) {
  uint16_t low = 0;
  uint16_t high = infinity(dtype);
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (value_of(dtype, middle) <= magnitude ? low : high) = middle;
  }
  return low;
}

uint16_t nearest(DType dtype, float x) {
  const double magnitude = std::abs(static_cast<double>(x));
  const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const uint16_t below = neighbour_below(dtype, magnitude);
  const double low = value_of(dtype, below);
  // The step above the largest finite value is as wide as the one below it.
  const double step = below == largest_finite(dtype) ? low - value_of(dtype, static_cast<uint16_t>(below - 1))
                                                     : value_of(dtype, static_cast<uint16_t>(below + 1)) - low;
  const double part = (magnitude - low) / step;
  const bool is_up = part > 0.5 || (part == 0.5 && below % 2 == 1);
  return static_cast<uint16_t>(sign | (below + (is_up ? 1 : 0)));
}

uint16_t stochastic(DType dtype, float x, uint32_t random16) {
  const double magnitude = std::abs(static_cast<double>(x));
  const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const uint16_t below = neighbour_below(dtype, magnitude);
  if (below == largest_finite(dtype)) return static_cast<uint16_t>(sign | below);
  const double low = value_of(dtype, below);
  const double step = value_of(dtype, static_cast<uint16_t>(below + 1)) - low;
  const double range = dtype == DType::kFloat16 && below >= 0x400 ? 0x1p13 : 0x1p16;
  const double random = std::fmod(random16, range);
  const bool is_up = std::floor((magnitude - low) / step * range) + random >= range;
  return static_cast<uint16_t>(sign | (below + (is_up ? 1 : 0)));
}

uint32_t random16_of(uint64_t seed, int64_t id, int64_t step, uint32_t field, size_t i) {
  const uint32_t block = 0x80000000u + field * 0x01000000u + static_cast<uint32_t>(i / 8);
  const auto words = test::row_block(seed, id, block, static_cast<uint32_t>(step));
  return (words[i % 8 / 2] >> (16 * (i % 2))) & 0xffffu;
}

// Values around everything that is special in either format.
std::vector<float> awkward_values() {
  std::vector<float> values;
  for (double x :
       {0.0,    0x1p-149, 0x1p-133, 0x1p-126, 0x1p-26, 0x1p-25, 0x1.8p-25, 0x1p-24,    0x1p-15,    0x1p-14,       1.0,
        2048.5, 65504.0,  65519.99, 65520.0,  65535.0, 65536.0, 1e6,       0x1.fep127, 0x1.ffp127, 0x1.fffffep127}) {
    const auto value = static_cast<float>(x);
    for (float near : {value, std::nextafter(value, 0.0f), std::nextafter(value, std::numeric_limits<float>::max())}) {
      values.push_back(near);
      values.push_back(-near);
    }
  }
  return values;
}

std::vector<float> test_values(Sampler& sampler) {
  std::vector<float> values = awkward_values();
  for (int i = 0; i < 5000; ++i) {
    values.push_back(sampler.finite());
    values.push_back(sampler.mixed());
    values.push_back(sampler.uniform(-7e4f, 7e4f));
    values.push_back(sampler.uniform(-0x1p-13f, 0x1p-13f));
    values.push_back(sampler.uniform(-0x1p-22f, 0x1p-22f));
  }
  return values;
}

std::vector<uint16_t> round_row(const Kernels& kernels, DType dtype, const std::vector<float>& x, int64_t id,
                                int64_t step, uint32_t field = 0, uint64_t seed = 99) {
  std::vector<uint16_t> out(x.size());
  kernels.narrow_stochastic(dtype, static_cast<int64_t>(x.size()), x.data(), {RoundKeys(seed), id, step, field},
                            out.data());
  return out;
}

}  // namespace

TEST(precision_widening_is_exact_for_every_encoding) {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  for (Simd level : test::supported_levels()) {
    const Kernels& kernels = kernels_for(level);
    for (DType dtype : kNarrow) {
      std::vector<float> wide(halves.size());
      kernels.widen(dtype, 65536, halves.data(), wide.data());
      std::vector<uint16_t> back(halves.size());
      kernels.narrow_nearest(dtype, 65536, wide.data(), back.data());
      const std::vector<uint16_t> rounded = round_row(kernels, dtype, wide, 3, 4);
      for (size_t i = 0; i < halves.size(); ++i) {
        const double exact = value_of(dtype, halves[i]);
        if (std::isnan(exact)) {
          CHECK(std::isnan(wide[i]));
          CHECK(std::isnan(value_of(dtype, back[i])) && std::isnan(value_of(dtype, rounded[i])));
          CHECK_EQ(back[i] & 0x8000, halves[i] & 0x8000);
        } else {
          CHECK_EQ(wide[i], exact);
          CHECK_EQ(std::signbit(wide[i]), std::signbit(exact));
          CHECK_EQ(back[i], halves[i]);
          CHECK_EQ(rounded[i], halves[i]);  // exact values, infinities too, stay as they are
        }
      }
    }
  }
}

TEST(precision_nearest_rounds_ties_to_even_at_every_level) {
  Sampler sampler(21);
  const std::vector<float> x = test_values(sampler);
  for (Simd level : test::supported_levels()) {
    for (DType dtype : kNarrow) {
      std::vector<uint16_t> got(x.size());
      kernels_for(level).narrow_nearest(dtype, static_cast<int64_t>(x.size()), x.data(), got.data());
      for (size_t i = 0; i < x.size(); ++i) CHECK_EQ(got[i], nearest(dtype, x[i]));
    }
  }
}

TEST(precision_stochastic_follows_its_formula_at_every_level) {
  Sampler sampler(22);
  const std::vector<float> x = test_values(sampler);
  for (Simd level : test::supported_levels()) {
    for (DType dtype : kNarrow) {
      const int64_t id = 0x123456789a;
      const int64_t step = 0x700000005;
      for (uint32_t field : {0u, 1u, 2u}) {
        const std::vector<uint16_t> got = round_row(kernels_for(level), dtype, x, id, step, field);
        for (size_t i = 0; i < x.size(); ++i) {
          CHECK_EQ(got[i], stochastic(dtype, x[i], random16_of(99, id, step, field, i)));
        }
      }
    }
  }
}

TEST(precision_levels_agree_at_every_width) {
  Sampler sampler(23);
  for (int64_t dim : test::dims()) {
    std::vector<float> x(static_cast<size_t>(dim));
    for (float& value : x) value = std::bit_cast<float>(static_cast<uint32_t>(sampler.bits()));  // NaNs as well
    for (DType dtype : kNarrow) {
      std::vector<uint16_t> first_nearest;
      std::vector<uint16_t> first_stochastic;
      std::vector<float> first_wide;
      for (Simd level : test::supported_levels()) {
        const Kernels& kernels = kernels_for(level);
        std::vector<uint16_t> nearest(x.size());
        kernels.narrow_nearest(dtype, dim, x.data(), nearest.data());
        const std::vector<uint16_t> stochastic = round_row(kernels, dtype, x, 1, dim);
        std::vector<float> wide(x.size());
        kernels.widen(dtype, dim, nearest.data(), wide.data());
        if (level == Simd::kScalar) {
          first_nearest = nearest;
          first_stochastic = stochastic;
          first_wide = wide;
        }
        CHECK(nearest == first_nearest);
        CHECK(stochastic == first_stochastic);
        test::check_same_bits(wide, first_wide, "widen");
      }
    }
  }
}

TEST(precision_stochastic_is_unbiased) {
  const float values[] = {1.003f, -0.3333f, 3.14159e-3f, 1234.567f, 0x1.8cdp-16f, 0x1.123p-24f, -0x1.357p-25f};
  constexpr int64_t kRows = 4000;
  constexpr size_t kDim = 64;
  for (DType dtype : kNarrow) {
    for (float x : values) {
      const std::vector<float> row(kDim, x);
      double sum = 0.0;
      double lowest = HUGE_VAL;
      double highest = -HUGE_VAL;
      for (int64_t id = 0; id < kRows; ++id) {
        for (uint16_t half : round_row(kernels(), dtype, row, id, 8)) {
          const double value = value_of(dtype, half);
          sum += value;
          lowest = std::min(lowest, value);
          highest = std::max(highest, value);
        }
      }
      const double count = kRows * static_cast<double>(kDim);
      const double part = (x - lowest) / (highest - lowest);
      const double error = (highest - lowest) * std::sqrt(part * (1.0 - part) / count);
      CHECK(lowest < x && x < highest);
      CHECK(std::abs(sum / count - x) < 5.0 * error);
    }
  }
}

TEST(precision_stochastic_never_makes_a_finite_value_infinite) {
  const float limit = std::numeric_limits<float>::max();
  for (DType dtype : kNarrow) {
    const uint16_t largest = largest_finite(dtype);
    for (int64_t id = 0; id < 100; ++id) {
      const auto out = round_row(kernels(), dtype, {limit, -limit, kInfinity, -kInfinity}, id, 1);
      CHECK_EQ(out[0], largest);
      CHECK_EQ(out[1], largest | 0x8000);
      CHECK_EQ(out[2], infinity(dtype));
      CHECK_EQ(out[3], infinity(dtype) | 0x8000);
    }
  }
  for (int64_t id = 0; id < 100; ++id) CHECK_EQ(round_row(kernels(), DType::kFloat16, {65519.0f}, id, 1)[0], 0x7bff);
}

TEST(precision_stochastic_is_a_function_of_seed_id_step_and_field) {
  Sampler sampler(24);
  std::vector<float> x(64);
  for (float& value : x) value = sampler.uniform(-1.0f, 1.0f);
  for (DType dtype : kNarrow) {
    const auto first = round_row(kernels(), dtype, x, 5, 6);
    CHECK(first == round_row(kernels(), dtype, x, 5, 6));
    CHECK(first != round_row(kernels(), dtype, x, 5, 7));
    CHECK(first != round_row(kernels(), dtype, x, 6, 6));
    CHECK(first != round_row(kernels(), dtype, x, 5, 6, 1));
    CHECK(first != round_row(kernels(), dtype, x, 5, 6, 0, 100));
  }
}

}  // namespace bunkbed
