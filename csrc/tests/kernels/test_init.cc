// Initial values are file format: golden values, agreement of levels, and the quality of the distributions.
#include <algorithm>
#include <cmath>

#include "kernels/impl/kernels_impl.h"
#include "tests/check.h"
#include "tests/philox.h"
#include "tests/sample.h"

namespace bunkbed {
namespace {

using test::Sampler;

constexpr double kPi = 3.14159265358979323846;

std::vector<float> init(const Kernels& kernels, const InitSpec& spec, int64_t id, int64_t dim) {
  std::vector<float> row(static_cast<size_t>(dim), -1.0f);
  kernels.init_row(spec, id, dim, row.data());
  return row;
}

std::vector<float> init(const InitSpec& spec, int64_t id, int64_t dim) {
  return init(bunkbed::kernels(), spec, id, dim);
}

InitSpec normal(double std, uint64_t seed) { return {InitKind::kNormal, std, 0.0, seed}; }
InitSpec uniform(double low, double high, uint64_t seed) { return {InitKind::kUniform, low, high, seed}; }

double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// The formulas of FORMAT.md in double.
double exact_normal(double std, uint64_t seed, int64_t id, int64_t i) {
  const auto words = test::row_block(seed, id, static_cast<uint32_t>(i / 4), 0);
  const uint32_t u = words[static_cast<size_t>(i % 4 / 2 * 2)];
  const uint32_t v = words[static_cast<size_t>(i % 4 / 2 * 2 + 1)];
  const double radius = std * std::sqrt(-2.0 * std::log(((u >> 8) + 1.0) * 0x1p-24));
  const double angle = ((static_cast<int32_t>(v << 2) >> 8) | 1) * 0x1p-23 * kPi / 4;
  const bool is_sine = ((v >> 30) & 1) != static_cast<uint32_t>(i & 1);
  return (is_sine ? std::sin(angle) : std::cos(angle)) * ((v >> 31) != 0 ? -radius : radius);
}

}  // namespace

TEST(philox_matches_the_published_vectors) {
  using Words = std::array<uint32_t, 4>;
  CHECK(test::philox({0, 0, 0, 0}, {0, 0}) == (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK(test::philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}) == (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK(test::philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(init_values_are_the_golden_ones) {
  const uint64_t seed = 0x0123456789abcdefu;
  const int64_t id = 9'999'999'999;
  const std::vector<float> normal_first = {0x1.d96d5ep-1f, -0x1.fb7668p-1f, -0x1.3c373ep-1f, -0x1.eda364p-2f,
                                           0x1.b38d6ap-2f, -0x1.114d96p+0f, -0x1.2f19bap+1f, -0x1.da1af2p-3f};
  const std::vector<float> normal_far = {-0x1.c437bep-6f, 0x1.afe606p-7f, 0x1.241e58p-5f, -0x1.e6ae9ap-10f,
                                         0x1.e360d0p-10f, 0x1.08c7b6p-5f, 0x1.1d49b8p-6f, 0x1.69f91cp-7f};
  const std::vector<float> uniform_first = {-0x1.4ace00p-7f, 0x1.37b8dep-5f, 0x1.82311cp-6f,  0x1.59a490p-7f,
                                            0x1.b53b80p-10f, 0x1.682afap-5f, -0x1.694734p-5f, 0x1.969540p-10f};
  const std::vector<float> uniform_far = {-0x1.3668c6p-6f, 0x1.256d94p-6f,  -0x1.e657fap-6f, -0x1.a729fap-6f,
                                          -0x1.792e66p-6f, -0x1.8abd6ep-6f, 0x1.1f63f0p-7f,  -0x1.4fe47ap-5f};
  for (Simd level : test::supported_levels()) {
    const Kernels& kernels = kernels_for(level);
    test::check_same_bits(init(kernels, normal(1.0, 0), 0, 8), normal_first, "normal, id 0");
    test::check_same_bits(init(kernels, normal(0.02, seed), id, 8), normal_far, "normal, far id");
    test::check_same_bits(init(kernels, uniform(-0.05, 0.05, 0), 0, 8), uniform_first, "uniform, id 0");
    test::check_same_bits(init(kernels, uniform(-0.05, 0.05, seed), id, 8), uniform_far, "uniform, far id");
    test::check_same_bits(init(kernels, InitSpec{}, 5, 8), std::vector<float>(8, 0.0f), "zeros");
  }
}

TEST(init_levels_agree_and_a_narrow_row_is_a_prefix) {
  Sampler sampler(7);
  for (int64_t dim : test::dims()) {
    const uint64_t seed = sampler.bits();
    const auto id = static_cast<int64_t>(sampler.bits() >> 1);
    for (const InitSpec& spec : {normal(0.5, seed), uniform(-3.0, 7.0, seed)}) {
      std::vector<float> wide = init(kernels_for(Simd::kScalar), spec, id, 300);
      wide.resize(static_cast<size_t>(dim));
      for (Simd level : test::supported_levels()) {
        test::check_same_bits(init(kernels_for(level), spec, id, dim), wide, "prefix");
      }
    }
  }
}

TEST(init_uniform_is_the_words_of_philox) {
  const uint64_t seed = 0xfedcba9876543210u;
  for (int64_t id : {int64_t{0}, int64_t{1}, int64_t{0xffffffff}, int64_t{0x100000000}, INT64_MAX}) {
    const std::vector<float> row = init(uniform(0.0, 0x1p24, seed), id, 150);
    for (size_t i = 0; i < row.size(); ++i) {
      const auto words = test::row_block(seed, id, static_cast<uint32_t>(i / 4), 0);
      CHECK_EQ(row[i], static_cast<float>(words[i % 4] >> 8));
    }
  }
}

TEST(init_uniform_stays_below_its_upper_end) {
  // Sums near the upper end of these would round up to it.
  const std::pair<double, double> ranges[] = {{1.0, 1.0000001192092896},
                                              {-1.0, -0.99999994039535522},
                                              {-0.05, 0.05},
                                              {100.0, 100.00001},
                                              {-1e-45, 0.0},
                                              {-1.0, 0.0},
                                              {3.0, 3.0}};
  for (const auto& [low, high] : ranges) {
    for (int64_t id = 0; id < 200; ++id) {
      for (float value : init(uniform(low, high, 1), id, 64)) {
        CHECK(value >= static_cast<float>(low));
        CHECK(value < static_cast<float>(high) || static_cast<float>(low) == static_cast<float>(high));
      }
    }
  }
}

TEST(init_normal_is_accurate_for_every_radius) {
  // Each group takes 16 of the 2^24 radii; the angle is the smallest, whose cosine is 1.
  double worst = 0.0;
  for (uint32_t first = 0; first < (1u << 24); first += kGroupPairs) {
    PhiloxWords words;
    float out[2 * kGroupPairs];
    for (uint32_t p = 0; p < kGroupPairs; ++p) {
      words.even[p] = (first + p) << 8 | (p * 37 & 0xff);
      words.odd[p] = 0;
    }
    normal_group(words, 1.0f, out);
    for (uint32_t p = 0; p < kGroupPairs; ++p) {
      const double exact = std::sqrt(-2.0 * std::log((first + p + 1.0) * 0x1p-24));
      worst = std::max(worst, std::abs(out[2 * p] - exact));
    }
  }
  CHECK(worst < 1e-6);
}

TEST(init_normal_is_accurate_around_the_circle) {
  constexpr uint32_t kStride = 0x1000080;  // odd in units of 2^7, the angle's last bit: visits the circle evenly
  double worst = 0.0;
  uint32_t word = 0;
  for (int group = 0; group < (1 << 17); ++group) {
    PhiloxWords words;
    float out[2 * kGroupPairs];
    for (uint32_t p = 0; p < kGroupPairs; ++p) {
      words.even[p] = 0;  // the longest radius
      words.odd[p] = word;
      word += kStride;
    }
    normal_group(words, 1.0f, out);
    const double radius = std::sqrt(48.0 * std::log(2.0));
    for (uint32_t p = 0; p < kGroupPairs; ++p) {
      const uint32_t v = words.odd[p];
      const double angle = ((static_cast<int32_t>(v << 2) >> 8) | 1) * 0x1p-23 * kPi / 4;
      const double signed_radius = (v >> 31) != 0 ? -radius : radius;
      const bool is_reflected = ((v >> 30) & 1) != 0;
      const double cosine = out[2 * p + (is_reflected ? 1 : 0)] - signed_radius * std::cos(angle);
      const double sine = out[2 * p + (is_reflected ? 0 : 1)] - signed_radius * std::sin(angle);
      worst = std::max({worst, std::abs(cosine), std::abs(sine)});
    }
  }
  CHECK(worst < 2e-6);
}

TEST(init_normal_follows_its_formula_in_double) {
  for (double std : {1.0, 0.02, 30.0}) {
    for (int64_t id = 0; id < 500; ++id) {
      const std::vector<float> row = init(normal(std, 11), id, 37);
      for (int64_t i = 0; i < 37; ++i) {
        CHECK(std::abs(row[static_cast<size_t>(i)] - exact_normal(std, 11, id, i)) < 2e-6 * std);
      }
    }
  }
}

TEST(init_normal_has_the_moments_and_the_shape_of_a_normal) {
  constexpr int64_t kRows = 40'000;
  constexpr int64_t kDim = 64;
  constexpr double kCount = kRows * kDim;
  constexpr int kBins = 40;  // equal steps over [-4, 4) and two tails
  double moments[4] = {};
  double products = 0.0;
  std::vector<int64_t> counts(kBins + 2);
  for (int64_t id = 0; id < kRows; ++id) {
    const std::vector<float> row = init(normal(1.0, 12), id, kDim);
    for (size_t i = 0; i < kDim; ++i) {
      const double x = row[i];
      moments[0] += x;
      moments[1] += x * x;
      moments[2] += x * x * x;
      moments[3] += x * x * x * x;
      products += x * row[i ^ 1];  // the two values of one radius are uncorrelated
      ++counts[static_cast<size_t>(std::clamp(std::floor((x + 4.0) * 5.0), -1.0, double{kBins}) + 1.0)];
    }
  }
  // Standard errors of the moments of n normals: sqrt(1, 2, 15, 96 over n). The limit is five standard errors.
  const double unit = 5.0 / std::sqrt(kCount);
  CHECK(std::abs(moments[0] / kCount) < unit);
  CHECK(std::abs(moments[1] / kCount - 1.0) < unit * std::sqrt(2.0));
  CHECK(std::abs(moments[2] / kCount) < unit * std::sqrt(15.0));
  CHECK(std::abs(moments[3] / kCount - 3.0) < unit * std::sqrt(96.0));
  CHECK(std::abs(products / kCount) < unit * std::sqrt(2.0));
  double chi_square = 0.0;
  for (int bin = 0; bin < kBins + 2; ++bin) {
    const double low = bin == 0 ? 0.0 : normal_cdf((bin - 1) / 5.0 - 4.0);
    const double high = bin == kBins + 1 ? 1.0 : normal_cdf(bin / 5.0 - 4.0);
    const double expected = (high - low) * kCount;
    const double excess = static_cast<double>(counts[static_cast<size_t>(bin)]) - expected;
    chi_square += excess * excess / expected;
  }
  CHECK(chi_square < 41.0 + 5.0 * std::sqrt(82.0));  // 41 degrees of freedom, five standard deviations
}

TEST(init_differs_between_seeds_and_ids) {
  const std::vector<float> row = init(normal(1.0, 1), 1, 64);
  CHECK(row != init(normal(1.0, 2), 1, 64));
  CHECK(row != init(normal(1.0, 1), 2, 64));
  CHECK(row != init(normal(1.0, 1 + (uint64_t{1} << 32)), 1, 64));
  CHECK(row != init(normal(1.0, 1), 1 + (int64_t{1} << 32), 64));
}

}  // namespace bunkbed
