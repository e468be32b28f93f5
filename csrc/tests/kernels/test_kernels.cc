// Sums and reductions, and the choice of a level.
#include <cmath>
#include <limits>

#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/sample.h"

namespace bunkbed {
namespace {

using test::Sampler;

// The definition: lane i mod 16 adds in rising i, then lanes fold 8, 4, 2, 1.
template <typename T>
T sum_by_lanes(const std::vector<T>& terms) {
  T lanes[16] = {};
  for (size_t i = 0; i < terms.size(); ++i) lanes[i % 16] += terms[i];
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

}  // namespace

TEST(kernels_elementwise_rows_follow_their_definition_at_every_level) {
  Sampler sampler(1);
  for (Simd level : test::supported_levels()) {
    const Kernels& kernels = kernels_for(level);
    for (int64_t dim : test::dims()) {
      const std::vector<float> x = sampler.mixed(dim);
      const std::vector<float> acc = sampler.mixed(dim);
      const float scale = sampler.uniform(-3.0f, 3.0f);
      std::vector<float> expected = acc;
      std::vector<float> got = acc;
      for (size_t i = 0; i < x.size(); ++i) expected[i] = acc[i] + x[i];
      kernels.add_row(dim, x.data(), got.data());
      test::check_same_bits(got, expected, "add_row");

      for (size_t i = 0; i < x.size(); ++i) expected[i] = acc[i] + scale * x[i];
      got = acc;
      kernels.add_scaled_row(dim, scale, x.data(), got.data());
      test::check_same_bits(got, expected, "add_scaled_row");

      for (size_t i = 0; i < x.size(); ++i) expected[i] = x[i] * scale;
      got = x;
      kernels.scale_row(dim, scale, got.data());
      test::check_same_bits(got, expected, "scale_row");
    }
  }
}

TEST(kernels_reductions_follow_the_sixteen_lanes_at_every_level) {
  Sampler sampler(2);
  for (Simd level : test::supported_levels()) {
    const Kernels& kernels = kernels_for(level);
    for (int64_t dim : test::dims()) {
      const std::vector<float> x = sampler.mixed(dim);
      const std::vector<float> y = sampler.mixed(dim);
      std::vector<float> products;
      std::vector<double> squares;
      for (size_t i = 0; i < x.size(); ++i) {
        products.push_back(x[i] * y[i]);
        squares.push_back(static_cast<double>(x[i]) * static_cast<double>(x[i]));
      }
      CHECK_EQ(kernels.dot(dim, x.data(), y.data()), sum_by_lanes(products));
      CHECK_EQ(kernels.sum_of_squares(dim, x.data()), sum_by_lanes(squares));
    }
  }
}

TEST(kernels_all_finite_finds_one_bad_value_anywhere) {
  const float bad[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::quiet_NaN()};
  for (Simd level : test::supported_levels()) {
    const Kernels& kernels = kernels_for(level);
    CHECK(kernels.all_finite(0, nullptr));
    for (int64_t n : {1, 2, 15, 16, 17, 64, 511, 512, 513, 1100}) {
      std::vector<float> x(static_cast<size_t>(n), std::numeric_limits<float>::max());
      CHECK(kernels.all_finite(n, x.data()));
      for (size_t i = 0; i < x.size(); ++i) {
        x[i] = bad[i % 3];
        CHECK(!kernels.all_finite(n, x.data()));
        x[i] = -0x1p-149f;
      }
      CHECK(kernels.all_finite(n, x.data()));
    }
  }
}

TEST(kernels_levels_are_chosen_by_name_and_support) {
  const Simd before = current_simd();
  CHECK(simd_supported(Simd::kScalar));
  for (Simd level : test::supported_levels()) {
    set_simd(level);
    CHECK(current_simd() == level);
    CHECK(&kernels() == &kernels_for(level));
    CHECK(kernels().level == level);
  }
  set_simd(before);
  if (!simd_supported(Simd::kAvx512)) {
    CHECK_THROWS(kernels_for(Simd::kAvx512), ErrorKind::kInvalid, "this processor has no avx512");
  }
}

}  // namespace bunkbed
