#include "losses.h"

#include <algorithm>
#include <vector>

#include "float_mode.h"
#include "kernels/kernels.h"
#include "workers.h"

namespace bunkbed {

namespace {

// Scores a thread takes at once; a sum is over the rows (or these blocks) in order, whoever made them.
constexpr size_t kGrainScores = 16384;

double sum_in_order(const std::vector<float>& parts) {
  double sum = 0.0;
  for (const float part : parts) sum += part;
  return sum;
}

}  // namespace

double bpr_slopes(size_t rows, size_t columns, float hardness, float* positive, float* negative) {
  std::vector<float> losses(rows);
  parallel_for(rows, std::max<size_t>(1, kGrainScores / std::max<size_t>(1, columns)), [&](size_t begin, size_t end) {
    const DefaultFloatMode mode;
    for (size_t row = begin; row < end; ++row) {
      const LossSums sums =
          kernels().bpr_row(static_cast<int64_t>(columns), hardness, positive[row], negative + row * columns);
      losses[row] = sums.loss;
      positive[row] = -sums.slope;
    }
  });
  return sum_in_order(losses);
}

double logistic_slopes(size_t n, float* x) {
  constexpr size_t kBlock = 1024;
  std::vector<float> losses((n + kBlock - 1) / kBlock);
  parallel_for(losses.size(), kGrainScores / kBlock, [&](size_t begin, size_t end) {
    const DefaultFloatMode mode;
    for (size_t block = begin; block < end; ++block) {
      const size_t first = block * kBlock;
      losses[block] = kernels().bpr_row(static_cast<int64_t>(std::min(kBlock, n - first)), 0.0f, 0.0f, x + first).loss;
    }
  });
  return sum_in_order(losses);
}

}  // namespace bunkbed
