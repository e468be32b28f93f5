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

// The best scores of a block's rows so far: k of each row, best first; equal scores by ascending column. A place that
// no score has taken has the score -inf and the column -1.
struct BestScores {
  float* scores;     // (rows, k)
  int64_t* columns;  // (rows, k)
  size_t k;
};

// Sets the scores at `hidden` (places row * stride + column) to -inf, then adds to counts[f] the number of scores of
// its row that are at least floors[f]. Changes nothing and throws Error(kInvalid) for a place or start outside its
// range. One thread; blocks of other users may run at the same time, also with the same floors and counts.
void count_reaching(const ScoreBlock& block, size_t num_hidden, const int64_t* hidden, const RowFloors& floors,
                    int64_t* counts);

// Sets the scores at `hidden` to -inf, as above, then takes every score that is better than the last of its row into
// `best`; the block's columns are numbered from `first_column`, above those that `best` has. NaN and -inf are never
// taken. Changes nothing and throws Error(kInvalid) for a place outside the block. One thread; blocks of other rows may
// run at the same time.
void keep_best(const ScoreBlock& block, size_t num_hidden, const int64_t* hidden, int64_t first_column,
               const BestScores& best);

}  // namespace bunkbed
