#include "batch/gradients.h"

#include <algorithm>
#include <atomic>

#include "base/memory.h"
#include "base/workers.h"
#include "batch/pieces.h"
#include "kernels/kernels.h"

namespace bunkbed {

namespace {

// Sums the gradients, and puts the sum of squares of each block of `grain` rows into `blocks` unless that is null.
// Returns whether all sums are finite.
bool sum_blocks(const Batch& batch, const uint32_t* rows, const float* grads, size_t dim, size_t grain, float* sums,
                ExactSum* blocks) {
  const auto known = static_cast<uint32_t>(batch.size());
  std::atomic<bool> finite{true};
  parallel_for(batch.num_unique(), grain, [&](size_t from, size_t to) {
    ArrayVector<float> own(sums == nullptr ? std::min(grain, to - from) * dim : 0);
    ArrayVector<double> squares(blocks == nullptr ? 0 : std::min(grain, to - from));
    for (size_t begin = from; begin < to; begin += grain) {
      const size_t end = std::min(to, begin + grain);
      if (!kernels().sum_rows(static_cast<int64_t>(dim), grads, rows, batch.offsets().data() + begin, end - begin,
                              known, sums == nullptr ? own.data() : sums + begin * dim,
                              blocks == nullptr ? nullptr : squares.data())) {
        finite.store(false, std::memory_order_relaxed);
      }
      if (blocks == nullptr) continue;
      ExactSum block;
      block.add(squares.data(), end - begin);
      blocks[begin / grain] = block;
    }
  });
  return finite;
}

}  // namespace

ExactSum sum_gradients(const Batch& batch, const float* grads, size_t dim, float* sums) {
  return sum_gradients(batch, batch.order().data(), grads, dim, sums);
}

ExactSum sum_gradients(const Batch& batch, const uint32_t* rows, const float* grads, size_t dim, float* sums) {
  const size_t grain = row_grain(dim);
  ArrayVector<ExactSum> blocks((batch.num_unique() + grain - 1) / grain);
  (void)sum_blocks(batch, rows, grads, dim, grain, sums, blocks.data());
  return total(blocks.data(), blocks.size());
}

bool sum_finite_gradients(const Batch& batch, const float* grads, size_t dim, float* sums) {
  return sum_blocks(batch, batch.order().data(), grads, dim, row_grain(dim), sums, nullptr);
}

ExactSum total(const ExactSum* parts, size_t n) {
  ExactSum sum;
  for (size_t i = 0; i < n; ++i) sum.add(parts[i]);
  return sum;
}

bool scale(size_t n, float scale, float* x) {
  constexpr size_t kGrain = 16384;
  std::atomic<bool> finite{true};
  parallel_for(n, kGrain, [&](size_t from, size_t to) {
    bool all = true;
    for (size_t begin = from; begin < to; begin += kGrain) {
      const auto count = static_cast<int64_t>(std::min(kGrain, to - begin));
      kernels().scale_row(count, scale, x + begin);
      all &= kernels().all_finite(count, x + begin);
    }
    if (!all) finite.store(false, std::memory_order_relaxed);
  });
  return finite;
}

}  // namespace bunkbed
