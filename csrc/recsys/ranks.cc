#include "recsys/ranks.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/error.h"
#include "kernels/kernels.h"

namespace bunkbed {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Scores that are compared with a floor at once: few are above it, and the compiler compares several per instruction.
constexpr size_t kRun = 16;

bool any_above(const float* scores, float floor) {
  int found = 0;
  for (size_t i = 0; i < kRun; ++i) found |= static_cast<int>(scores[i] > floor);
  return found != 0;
}

void require_starts(const ScoreBlock& block, const RowFloors& floors) {
  for (size_t r = 0; r <= block.rows; ++r) {
    const int64_t lowest = r == 0 ? 0 : floors.starts[r - 1];
    if (floors.starts[r] < lowest || floors.starts[r] > static_cast<int64_t>(floors.n)) {
      throw Error(ErrorKind::kInvalid, "starts of rows must ascend from 0 to the number of floors, " +
                                           std::to_string(floors.n) + ", got " + std::to_string(floors.starts[r]) +
                                           " at position " + std::to_string(r));
    }
  }
}

void hide(const ScoreBlock& block, size_t num_hidden, const int64_t* hidden) {
  for (size_t h = 0; h < num_hidden; ++h) {
    const auto place = static_cast<uint64_t>(hidden[h]);  // a negative one is beyond every row
    if (place / block.stride >= block.rows || place % block.stride >= block.columns) {
      throw Error(ErrorKind::kInvalid, "hidden place " + std::to_string(hidden[h]) + " at position " +
                                           std::to_string(h) + " is outside the block of " +
                                           std::to_string(block.rows) + " x " + std::to_string(block.columns) +
                                           " scores, of rows " + std::to_string(block.stride) + " scores apart");
    }
  }
  for (size_t h = 0; h < num_hidden; ++h) block.scores[hidden[h]] = -kInfinity;
}

}  // namespace

void count_reaching(const ScoreBlock& block, size_t num_hidden, const int64_t* hidden, const RowFloors& floors,
                    int64_t* counts) {
  require_starts(block, floors);
  hide(block, num_hidden, hidden);
  const Kernels& kernel = kernels();
  for (size_t r = 0; r < block.rows; ++r) {
    const int64_t first = floors.starts[r];
    kernel.count_reaching(static_cast<int64_t>(block.columns), block.scores + r * block.stride,
                          floors.starts[r + 1] - first, floors.floors + first, counts + first);
  }
}

void keep_best(const ScoreBlock& block, size_t num_hidden, const int64_t* hidden, int64_t first_column,
               const BestScores& best) {
  hide(block, num_hidden, hidden);
  const size_t k = best.k;
  for (size_t r = 0; r < block.rows; ++r) {
    const float* const row = block.scores + r * block.stride;
    float* const scores = best.scores + r * k;
    int64_t* const columns = best.columns + r * k;
    for (size_t first = 0; first < block.columns; first += kRun) {
      const size_t end = std::min(first + kRun, block.columns);
      if (end - first == kRun && !any_above(row + first, scores[k - 1])) continue;
      for (size_t c = first; c < end; ++c) {
        if (!(row[c] > scores[k - 1])) continue;
        // Before the first worse score: one that is as good has a smaller column.
        size_t at = k - 1;
        for (; at > 0 && scores[at - 1] < row[c]; --at) {
          scores[at] = scores[at - 1];
          columns[at] = columns[at - 1];
        }
        scores[at] = row[c];
        columns[at] = first_column + static_cast<int64_t>(c);
      }
    }
  }
}

}  // namespace bunkbed
