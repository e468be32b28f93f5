#include "recsys/losses.h"

#include <algorithm>
#include <vector>

#include "base/float_mode.h"
#include "base/workers.h"
#include "kernels/kernels.h"

namespace bunkbed {

namespace {

// Scores that a thread takes at once. A sum adds rows (or these blocks) in order, whatever thread computed them.
constexpr size_t kGrainScores = 16384;

// Number of rows, of so many numbers each, that a thread takes at once.
size_t rows_of(size_t numbers) { return std::max<size_t>(1, 4 * kGrainScores / std::max<size_t>(1, numbers)); }

double sum_in_order(const std::vector<float>& parts) {
  double sum = 0.0;
  for (const float part : parts) sum += part;
  return sum;
}

}  // namespace

double bpr_slopes(size_t rows, size_t columns, float hardness, const float* weights, float* positive, float* negative) {
  std::vector<float> losses(rows);
  parallel_for(rows, std::max<size_t>(1, kGrainScores / std::max<size_t>(1, columns)), [&](size_t begin, size_t end) {
    const DefaultFloatMode mode;
    for (size_t row = begin; row < end; ++row) {
      const LossSums sums =
          kernels().bpr_row(static_cast<int64_t>(columns), hardness, positive[row], negative + row * columns);
      losses[row] = sums.loss;
      positive[row] = -sums.slope;
      if (weights == nullptr) continue;
      losses[row] *= weights[row];
      positive[row] *= weights[row];
      for (size_t k = row * columns; k < (row + 1) * columns; ++k) negative[k] *= weights[row];
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

PairSquares pair_scores(size_t rows, size_t items_per_row, size_t dim, const float* queries, const float* items,
                        float* scores) {
  std::vector<PairSquares> squares(rows);
  const Kernels& kernel = kernels();
  const auto width = static_cast<int64_t>(dim);
  parallel_for(rows, rows_of(items_per_row * dim), [&](size_t begin, size_t end) {
    const DefaultFloatMode mode;
    for (size_t row = begin; row < end; ++row) {
      const float* own = items + row * items_per_row * dim;
      const float* others = own + dim;
      for (size_t k = 0; k < items_per_row; ++k) {
        scores[row * items_per_row + k] = kernel.dot(width, queries + row * dim, own + k * dim);
      }
      squares[row].first = kernel.dot(width, own, own);
      squares[row].others = kernel.dot(width * static_cast<int64_t>(items_per_row - 1), others, others);
    }
  });
  PairSquares sum;
  for (const PairSquares& part : squares) {
    sum.first += part.first;
    sum.others += part.others;
  }
  return sum;
}

void pair_grads(size_t rows, size_t items_per_row, size_t dim, PairDecay decay, const float* slopes,
                const float* queries, const float* items, float* query_grads, float* item_grads) {
  const Kernels& kernel = kernels();
  parallel_for(rows, rows_of(items_per_row * dim), [&](size_t begin, size_t end) {
    const DefaultFloatMode mode;
    std::fill(query_grads + begin * dim, query_grads + end * dim, 0.0f);
    for (size_t at = begin * items_per_row; at < end * items_per_row; ++at) {
      const size_t row = at / items_per_row;
      kernel.pair_grad_row(static_cast<int64_t>(dim), slopes[at], at % items_per_row == 0 ? decay.first : decay.others,
                           queries + row * dim, items + at * dim, item_grads + at * dim, query_grads + row * dim);
    }
  });
}

}  // namespace bunkbed
