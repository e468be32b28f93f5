#include <algorithm>
#include <cmath>
#include <limits>

#include "base/workers.h"
#include "batch/batch.h"
#include "batch/gradients.h"
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/sample.h"

using namespace bunkbed;
using namespace bunkbed::test;

TEST(gradients_are_summed_in_batch_order_at_every_level_and_on_any_number_of_threads) {
  const size_t before = num_threads();
  const Simd level = current_simd();
  Sampler sampler(3);
  for (const size_t dim : {1, 7, 16, 33, 64, 200}) {
    const size_t n = 6000;
    std::vector<int64_t> ids;
    std::vector<float> grads;
    for (size_t i = 0; i < n; ++i) ids.push_back(static_cast<int64_t>(sampler.bits() % 1500));
    // Magnitudes so different that any other order of summing shows.
    for (size_t i = 0; i < n * dim; ++i) {
      const auto bits = static_cast<int32_t>(sampler.bits());
      grads.push_back(std::ldexp(static_cast<float>(bits), static_cast<int>(sampler.bits() % 40) - 60));
    }
    Batch batch;
    batch.assign(ids.data(), n);
    std::vector<float> wanted(batch.num_unique() * dim);
    double squares = 0.0;
    for (size_t u = 0; u < batch.num_unique(); ++u) {
      for (size_t d = 0; d < dim; ++d) {
        float sum = grads[batch.order()[batch.offsets()[u]] * dim + d];
        for (uint32_t o = batch.offsets()[u] + 1; o < batch.offsets()[u + 1]; ++o) {
          sum = sum + grads[batch.order()[o] * dim + d];
        }
        wanted[u * dim + d] = sum;
        squares += double{sum} * sum;
      }
    }
    double first = 0.0;
    for (const Simd simd : {Simd::kScalar, Simd::kAvx2, Simd::kAvx512}) {
      if (!simd_supported(simd)) continue;
      set_simd(simd);
      for (const size_t threads : {1, 2, 5}) {
        set_num_threads(threads);
        std::vector<float> sums(wanted.size());
        const double got = sum_gradients(batch, grads.data(), dim, sums.data()).rounded();
        CHECK(sums == wanted);
        if (first == 0.0) first = got;
        CHECK_EQ(got, first);
        CHECK(std::fabs(got - squares) <= 1e-12 * squares);
        CHECK_EQ(sum_gradients(batch, grads.data(), dim, nullptr).rounded(), first);
        std::fill(sums.begin(), sums.end(), 0.0f);
        CHECK(sum_finite_gradients(batch, grads.data(), dim, sums.data()));
        CHECK(sums == wanted);
        CHECK(sum_finite_gradients(batch, grads.data(), dim, nullptr));
      }
    }
  }
  set_simd(level);
  set_num_threads(before);
}

TEST(gradients_one_sum_that_is_not_finite_is_found_in_any_column_at_every_level) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kLargest = std::numeric_limits<float>::max();
  const Simd level = current_simd();
  const std::vector<int64_t> ids = {5, 3, 5, 9};  // places 0 and 2 are added
  Batch batch;
  batch.assign(ids.data(), ids.size());
  for (const Simd simd : supported_levels()) {
    set_simd(simd);
    for (const size_t dim : {1, 7, 16, 33, 64, 200}) {
      std::vector<float> grads(ids.size() * dim, 1.0f);
      std::vector<float> sums(batch.num_unique() * dim);
      const auto is_finite = [&] {
        const bool with_sums = sum_finite_gradients(batch, grads.data(), dim, sums.data());
        CHECK_EQ(sum_finite_gradients(batch, grads.data(), dim, nullptr), with_sums);
        CHECK_EQ(std::isfinite(sum_gradients(batch, grads.data(), dim, nullptr).rounded()), with_sums);
        return with_sums;
      };
      for (size_t d = 0; d < dim; ++d) {
        float &one = grads[1 * dim + d], &two = grads[0 * dim + d], &other = grads[2 * dim + d];
        for (const float bad : {kInfinity, -kInfinity, std::nanf("")}) {
          one = bad;
          CHECK(!is_finite());
          one = 1.0f;
        }
        two = kLargest;
        CHECK(is_finite());
        other = kLargest;
        CHECK(!is_finite());
        two = other = 1.0f;
      }
      CHECK(is_finite());
    }
  }
  set_simd(level);
}

TEST(gradients_whose_sum_overflows_give_no_finite_norm) {
  const std::vector<int64_t> ids{4, 9, 4};
  Batch batch;
  batch.assign(ids.data(), ids.size());
  std::vector<float> sums(2 * 3);
  std::vector<float> grads(9, 3e38f);
  CHECK(!std::isfinite(sum_gradients(batch, grads.data(), 3, sums.data()).rounded()));
  grads.assign(9, 1e38f);
  CHECK(std::isfinite(sum_gradients(batch, grads.data(), 3, sums.data()).rounded()));
  grads[4] = std::numeric_limits<float>::quiet_NaN();
  CHECK(!std::isfinite(sum_gradients(batch, grads.data(), 3, sums.data()).rounded()));
}

TEST(gradients_are_scaled_and_looked_at_in_one_go) {
  std::vector<float> values(100000, 2e38f);
  CHECK(scale(values.size(), 0.5f, values.data()));
  CHECK_EQ(values.front(), 1e38f);
  CHECK_EQ(values.back(), 1e38f);
  values[77777] = 2e38f;
  CHECK(!scale(values.size(), 2.0f, values.data()));
}
