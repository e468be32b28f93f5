// Ranks of held-out items from blocks of scores, for evaluations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bunkbed {

// A block of scores: a row for each user, a column for each item.
struct ScoreBlock {
  float* scores;
  size_t rows;
  size_t columns;
  size_t stride;  // scores from one row to the next
};

// The floors of a block's rows: row r has floors[starts[r]] to floors[starts[r + 1] - 1].
struct RowFloors {
  const int64_t* starts;  // (rows + 1), ascending
  const float* floors;    // (n)
  size_t n;
};

// Sets the scores at `hidden` (places row * stride + column) to -inf, then adds to counts[f] the number of scores of
// its row that are at least floors[f]. Changes nothing and throws Error(kInvalid) for a place or start outside its range.
// One thread; blocks of other users may run at the same time, also with the same floors and counts.
void count_reaching(const ScoreBlock& block, size_t num_hidden, const int64_t* hidden, const RowFloors& floors,
                    int64_t* counts);

}  // namespace bunkbed
