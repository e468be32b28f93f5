// Counts of scores that reach floors: compared with a loop, at every level, and bad places.
#include "recsys/ranks.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/sample.h"

namespace bunkbed {
namespace {

using test::Sampler;

constexpr float kInf = std::numeric_limits<float>::infinity();

// Few different values, so that many are equal.
float coarse(Sampler& sampler) { return static_cast<float>(sampler.bits() % 7) - 3.0f; }

}  // namespace

TEST(counts_of_a_row_follow_their_definition_at_every_level) {
  Sampler sampler(1);
  for (int64_t n = 1; n <= 70; ++n) {
    for (int64_t num_floors = 0; num_floors <= 9; ++num_floors) {
      std::vector<float> x, floors;
      for (int64_t i = 0; i < n; ++i) x.push_back(i % 11 == 5 ? -kInf : i % 13 == 6 ? kInf - kInf : coarse(sampler));
      for (int64_t f = 0; f < num_floors; ++f) floors.push_back(f == 8 ? -kInf : coarse(sampler));
      std::vector<int64_t> expected(floors.size(), 5);  // counts are added
      for (size_t f = 0; f < floors.size(); ++f) {
        for (const float score : x) expected[f] += score >= floors[f];
      }
      for (Simd level : test::supported_levels()) {
        std::vector<int64_t> got(floors.size(), 5);
        kernels_for(level).count_reaching(n, x.data(), num_floors, floors.data(), got.data());
        CHECK(got == expected);
      }
    }
  }
}

TEST(counts_of_a_block_leave_out_hidden_scores_and_other_rows) {
  Sampler sampler(2);
  const size_t rows = 5, columns = 33, stride = 40;
  std::vector<float> scores(rows * stride);
  for (float& score : scores) score = coarse(sampler);
  const std::vector<int64_t> starts = {3, 5, 5, 10, 11, 14};  // row 1 has none, the first three belong to other blocks
  std::vector<float> floors(15);
  for (float& floor : floors) floor = coarse(sampler);
  const std::vector<int64_t> hidden = {0, 32, 2 * 40 + 7, 4 * 40, 4 * 40 + 32, 0};
  std::vector<int64_t> expected(floors.size(), 1);
  for (size_t r = 0; r < rows; ++r) {
    for (auto f = static_cast<size_t>(starts[r]); f < static_cast<size_t>(starts[r + 1]); ++f) {
      for (size_t c = 0; c < columns; ++c) {
        bool is_hidden = false;
        for (const int64_t place : hidden) is_hidden |= place == static_cast<int64_t>(r * stride + c);
        expected[f] += !is_hidden && scores[r * stride + c] >= floors[f];
      }
    }
  }
  std::vector<int64_t> got(floors.size(), 1);
  count_reaching({scores.data(), rows, columns, stride}, hidden.size(), hidden.data(),
                 {starts.data(), floors.data(), floors.size()}, got.data());
  CHECK(got == expected);
}

TEST(counts_refuse_places_and_starts_outside_their_arrays_and_change_nothing) {
  std::vector<float> scores(2 * 8, 1.0f);
  const std::vector<float> floors = {0.0f, 0.0f};
  std::vector<int64_t> counts(2, 0);
  const auto count = [&](const std::vector<int64_t>& hidden, const std::vector<int64_t>& starts) {
    count_reaching({scores.data(), 2, 5, 8}, hidden.size(), hidden.data(), {starts.data(), floors.data(), 2},
                   counts.data());
  };
  for (const int64_t place : {int64_t{-1}, int64_t{5}, int64_t{13}, int64_t{16}}) {
    CHECK_THROWS(count({0, place}, {0, 1, 2}), ErrorKind::kInvalid,
                 "hidden place " + std::to_string(place) + " at position 1 is outside the block of 2 x 5 scores");
  }
  CHECK_THROWS(count({0}, {0, 1, 3}), ErrorKind::kInvalid, "number of floors, 2, got 3 at position 2");
  CHECK_THROWS(count({0}, {0, 2, 1}), ErrorKind::kInvalid, "got 1 at position 2");
  CHECK_THROWS(count({0}, {-1, 1, 2}), ErrorKind::kInvalid, "got -1 at position 0");
  CHECK(scores == std::vector<float>(16, 1.0f) && counts == std::vector<int64_t>(2, 0));
  count({12}, {0, 1, 2});
  CHECK(counts == (std::vector<int64_t>{5, 4}));
}

TEST(best_scores_of_blocks_are_the_first_of_all_sorted_scores) {
  Sampler sampler(3);
  const size_t rows = 4, stride = 40, width = 33, blocks = 5;
  for (const size_t k : {size_t{1}, size_t{3}, size_t{200}}) {
    std::vector<std::vector<std::pair<float, int64_t>>> all(rows);
    std::vector<float> best(rows * k, -kInf);
    std::vector<int64_t> columns(rows * k, -1);
    for (size_t b = 0; b < blocks; ++b) {
      std::vector<float> scores(rows * stride);
      for (size_t i = 0; i < scores.size(); ++i) scores[i] = i % 17 == 3 ? kInf - kInf : coarse(sampler);
      const std::vector<int64_t> hidden = {5, static_cast<int64_t>(2 * stride + b), 3 * stride + 32};
      for (size_t r = 0; r < rows; ++r) {
        for (size_t c = 0; c < width; ++c) {
          const auto place = static_cast<int64_t>(r * stride + c);
          const float score = scores[r * stride + c];
          const bool is_hidden = std::find(hidden.begin(), hidden.end(), place) != hidden.end();
          if (!is_hidden && score == score) all[r].push_back({-score, static_cast<int64_t>(b * width + c)});
        }
      }
      keep_best({scores.data(), rows, width, stride}, hidden.size(), hidden.data(), static_cast<int64_t>(b * width),
                {best.data(), columns.data(), k});
    }
    for (size_t r = 0; r < rows; ++r) {
      std::sort(all[r].begin(), all[r].end());
      for (size_t i = 0; i < k; ++i) {
        const bool is_there = i < all[r].size();
        CHECK_EQ(best[r * k + i], is_there ? -all[r][i].first : -kInf);
        CHECK_EQ(columns[r * k + i], is_there ? all[r][i].second : -1);
      }
    }
  }
}

TEST(best_scores_refuse_places_outside_the_block_and_change_nothing) {
  std::vector<float> scores(2 * 8, 1.0f), best(2, -kInf);
  std::vector<int64_t> columns(2, -1);
  const std::vector<int64_t> hidden = {0, 13};
  CHECK_THROWS(keep_best({scores.data(), 2, 5, 8}, 2, hidden.data(), 0, {best.data(), columns.data(), 1}),
               ErrorKind::kInvalid, "hidden place 13 at position 1 is outside the block of 2 x 5 scores");
  CHECK(scores == std::vector<float>(16, 1.0f) && columns == std::vector<int64_t>(2, -1));
}

}  // namespace bunkbed
