// Slopes of losses: compared with the formula in double, and the same bits at every level and number of threads.
#include "recsys/losses.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/workers.h"
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/sample.h"

namespace bunkbed {
namespace {

using test::Sampler;

constexpr float kInf = std::numeric_limits<float>::infinity();

double softplus(double d) { return std::max(d, 0.0) + std::log1p(std::exp(-std::abs(d))); }
double sigmoid(double d) { return 1.0 / (1.0 + std::exp(-d)); }

struct Expected {
  double loss = 0.0;
  double slope = 0.0;
  std::vector<double> slopes;
};

Expected by_formula(float hardness, float positive, const std::vector<float>& scores) {
  Expected expected;
  double total = 0.0;
  for (float score : scores) total += hardness == 0.0f ? 0.0 : std::exp(double{hardness} * score);
  for (float score : scores) {
    const double weight = hardness == 0.0f ? 1.0 : std::exp(double{hardness} * score) / total;
    const double d = double{score} - positive;
    expected.slopes.push_back(score == -kInf ? 0.0 : weight * sigmoid(d));
    expected.slope += expected.slopes.back();
    expected.loss += score == -kInf ? 0.0 : weight * softplus(d);
  }
  return expected;
}

bool is_near(double got, double wanted) { return std::abs(got - wanted) <= 3e-6 * std::abs(wanted) + 1e-9; }

}  // namespace

TEST(losses_of_a_row_follow_their_formula_with_the_same_bits_at_every_level) {
  Sampler sampler(1);
  for (int64_t n = 1; n <= 50; ++n) {
    for (float hardness : {0.0f, 0.7f}) {
      std::vector<float> scores;
      for (int64_t i = 0; i < n; ++i) scores.push_back(i % 5 == 3 ? -kInf : sampler.uniform(-20.0f, 20.0f));
      const float positive = sampler.uniform(-3.0f, 3.0f);
      const Expected expected = by_formula(hardness, positive, scores);
      std::vector<float> first = scores;
      const LossSums sums = kernels_for(Simd::kScalar).bpr_row(n, hardness, positive, first.data());
      CHECK(is_near(sums.loss, expected.loss));
      CHECK(is_near(sums.slope, expected.slope));
      for (size_t i = 0; i < scores.size(); ++i) CHECK(is_near(first[i], expected.slopes[i]));
      for (Simd level : test::supported_levels()) {
        std::vector<float> got = scores;
        const LossSums again = kernels_for(level).bpr_row(n, hardness, positive, got.data());
        test::check_same_bits(got, first, "bpr_row");
        CHECK_EQ(again.loss, sums.loss);
        CHECK_EQ(again.slope, sums.slope);
      }
    }
  }
}

TEST(losses_of_a_row_nobody_competes_in_are_zero_and_of_a_nan_are_nan) {
  for (Simd level : test::supported_levels()) {
    for (float hardness : {0.0f, 2.0f}) {
      std::vector<float> scores(21, -kInf);
      const LossSums none = kernels_for(level).bpr_row(21, hardness, 1.0f, scores.data());
      CHECK_EQ(none.loss, 0.0f);
      CHECK_EQ(none.slope, 0.0f);
      for (float slope : scores) CHECK_EQ(slope, 0.0f);
      scores.assign(21, 1.0f);
      scores[17] = std::numeric_limits<float>::quiet_NaN();
      CHECK(std::isnan(kernels_for(level).bpr_row(21, hardness, 1.0f, scores.data()).loss));
      scores.assign(21, std::numeric_limits<float>::quiet_NaN());
      CHECK(std::isnan(kernels_for(level).bpr_row(21, hardness, 1.0f, scores.data()).loss));
    }
  }
}

TEST(losses_of_a_batch_have_the_same_bits_for_every_number_of_threads) {
  const size_t before = num_threads();
  Sampler sampler(2);
  const size_t rows = 700;
  const size_t columns = 90;
  std::vector<float> scores;
  for (size_t i = 0; i < rows * columns; ++i) scores.push_back(sampler.uniform(-5.0f, 5.0f));
  std::vector<float> positives;
  for (size_t i = 0; i < rows; ++i) positives.push_back(sampler.uniform(-5.0f, 5.0f));
  std::vector<std::vector<float>> results;
  std::vector<double> losses;
  for (size_t threads : {1, 2, 5}) {
    set_num_threads(threads);
    std::vector<float> x = scores;
    std::vector<float> p = positives;
    losses.push_back(bpr_slopes(rows, columns, 0.5f, nullptr, p.data(), x.data()));
    x.insert(x.end(), p.begin(), p.end());
    std::vector<float> y = scores;
    losses.push_back(logistic_slopes(y.size(), y.data()));
    x.insert(x.end(), y.begin(), y.end());
    results.push_back(x);
  }
  set_num_threads(before);
  for (size_t i = 1; i < results.size(); ++i) {
    test::check_same_bits(results[i], results[0], "slopes");
    CHECK_EQ(losses[2 * i], losses[0]);
    CHECK_EQ(losses[2 * i + 1], losses[1]);
  }
  double expected = 0.0;
  for (float score : scores) expected += softplus(score);
  CHECK(is_near(losses[1], expected));
}

TEST(losses_of_rows_with_weights_are_those_without_times_the_weight) {
  Sampler sampler(4);
  const size_t rows = 30;
  const size_t columns = 21;
  for (float hardness : {0.0f, 0.7f}) {
    std::vector<float> scores;
    for (size_t i = 0; i < rows * columns; ++i) scores.push_back(sampler.uniform(-5.0f, 5.0f));
    std::vector<float> positives;
    std::vector<float> weights;
    double expected = 0.0;
    std::vector<float> plain = scores;
    for (size_t row = 0; row < rows; ++row) {
      positives.push_back(sampler.uniform(-5.0f, 5.0f));
      weights.push_back(row == 3 ? 0.0f : sampler.uniform(0.0f, 4.0f));
      const std::vector<float> own(scores.begin() + row * columns, scores.begin() + (row + 1) * columns);
      expected += weights[row] * by_formula(hardness, positives[row], own).loss;
    }
    std::vector<float> p = positives;
    bpr_slopes(rows, columns, hardness, nullptr, p.data(), plain.data());
    std::vector<float> weighted = scores;
    const double loss = bpr_slopes(rows, columns, hardness, weights.data(), positives.data(), weighted.data());
    CHECK(is_near(loss, expected));
    for (size_t row = 0; row < rows; ++row) {
      CHECK_EQ(positives[row], p[row] * weights[row]);
      for (size_t k = row * columns; k < (row + 1) * columns; ++k) CHECK_EQ(weighted[k], plain[k] * weights[row]);
    }
  }
}

TEST(losses_of_pairs_pass_over_their_items_with_the_same_bits_at_every_level_and_number_of_threads) {
  const size_t threads_before = num_threads();
  const Simd before = current_simd();
  Sampler sampler(3);
  const size_t rows = 300;
  const size_t per_row = 5;
  const auto draw = [&](size_t n) {
    std::vector<float> values;
    for (size_t i = 0; i < n; ++i) values.push_back(sampler.uniform(-2.0f, 2.0f));
    return values;
  };
  for (size_t dim : {1, 8, 37, 64}) {
    const std::vector<float> queries = draw(rows * dim);
    const std::vector<float> items = draw(rows * per_row * dim);
    const std::vector<float> slopes = draw(rows * per_row);
    std::vector<float> first;
    for (Simd level : test::supported_levels()) {
      set_simd(level);
      for (size_t threads : {1, 3}) {
        set_num_threads(threads);
        std::vector<float> got(rows * per_row);
        std::vector<float> query_grads(rows * dim, 99.0f);
        std::vector<float> item_grads(items.size(), 99.0f);
        const PairSquares squares = pair_scores(rows, per_row, dim, queries.data(), items.data(), got.data());
        pair_grads(rows, per_row, dim, {0.5f, 0.25f}, slopes.data(), queries.data(), items.data(), query_grads.data(),
                   item_grads.data());
        for (const auto& part : {query_grads, item_grads}) got.insert(got.end(), part.begin(), part.end());
        got.push_back(static_cast<float>(squares.first));
        got.push_back(static_cast<float>(squares.others));
        if (first.empty()) first = got;
        test::check_same_bits(got, first, "pairs");
      }
    }
    PairSquares squares;
    for (size_t at = 0; at < rows * per_row; ++at) {
      const float* query = queries.data() + at / per_row * dim;
      const float* item = items.data() + at * dim;
      double score = 0.0;
      for (size_t i = 0; i < dim; ++i) {
        score += double{query[i]} * item[i];
        (at % per_row == 0 ? squares.first : squares.others) += double{item[i]} * item[i];
        const float decay = at % per_row == 0 ? 0.5f : 0.25f;
        const float grad = first[rows * (per_row + dim) + at * dim + i];
        CHECK(std::abs(grad - (slopes[at] * query[i] + decay * item[i])) <= 1e-5f);
      }
      CHECK(std::abs(first[at] - score) <= 1e-4);
    }
    for (size_t row = 0; row < rows; ++row) {
      for (size_t i = 0; i < dim; ++i) {
        double grad = 0.0;
        for (size_t k = 0; k < per_row; ++k) {
          grad += double{slopes[row * per_row + k]} * items[(row * per_row + k) * dim + i];
        }
        CHECK(std::abs(first[rows * per_row + row * dim + i] - grad) <= 1e-4);
      }
    }
    CHECK(std::abs(first[first.size() - 2] - squares.first) <= 1e-5 * squares.first);
    CHECK(std::abs(first[first.size() - 1] - squares.others) <= 1e-5 * squares.others);
  }
  set_num_threads(threads_before);
  set_simd(before);
}

}  // namespace bunkbed
