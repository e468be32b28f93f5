#include "batch/bag_gradients.h"

#include <algorithm>

#include "base/memory.h"
#include "base/workers.h"
#include "batch/gradients.h"
#include "batch/pieces.h"
#include "kernels/kernels.h"

namespace bunkbed {

namespace {

size_t bag_end(const BagGradients& bags, size_t bag, size_t n) {
  return bag + 1 < bags.num_bags ? static_cast<size_t>(bags.offsets[bag + 1]) : n;
}

// A bag's gradient divided by its length, for every bag: (num_bags, dim).
void divide_by_lengths(const BagGradients& bags, size_t n, float* out) {
  parallel_for(bags.num_bags, row_grain(bags.dim), [&](size_t from, size_t to) {
    for (size_t bag = from; bag < to; ++bag) {
      const size_t length = bag_end(bags, bag, n) - static_cast<size_t>(bags.offsets[bag]);
      const auto divisor = static_cast<float>(std::max<size_t>(1, length));
      for (size_t d = 0; d < bags.dim; ++d) out[bag * bags.dim + d] = bags.grads[bag * bags.dim + d] / divisor;
    }
  });
}

}  // namespace

ExactSum sum_bag_gradients(const Batch& batch, const BagGradients& bags, float* sums) {
  const size_t dim = bags.dim;
  const size_t n = batch.size();
  ArrayVector<uint32_t> bag_of(n);
  for (size_t bag = 0; bag < bags.num_bags; ++bag) {
    std::fill(bag_of.begin() + bags.offsets[bag], bag_of.begin() + static_cast<ptrdiff_t>(bag_end(bags, bag, n)),
              static_cast<uint32_t>(bag));
  }
  ArrayVector<float> divided(bags.is_mean ? bags.num_bags * dim : 0);
  if (bags.is_mean) divide_by_lengths(bags, n, divided.data());
  const float* const grads = bags.is_mean ? divided.data() : bags.grads;
  const uint32_t* const order = batch.order().data();
  if (bags.weights == nullptr) {
    ArrayVector<uint32_t> rows(n);
    parallel_for(n, kBlockIds, [&](size_t from, size_t to) {
      for (size_t o = from; o < to; ++o) rows[o] = bag_of[order[o]];
    });
    return sum_gradients(batch, rows.data(), grads, dim, sums);
  }

  const auto& starts = batch.offsets();
  const Kernels& k = kernels();
  const size_t grain = row_grain(dim);
  ArrayVector<ExactSum> blocks((batch.num_unique() + grain - 1) / grain);
  const auto sum_block = [&](size_t from, size_t to) {
    constexpr uint32_t kBlock = 512;
    const void* rows[kBlock + kPoolAhead];
    float weights[kBlock];
    ExactSum squares;
    uint32_t block = 0, block_end = 0;  // `rows` and `weights` are for these places in order()
    for (size_t u = from; u < to; ++u) {
      for (uint32_t done = starts[u]; done < starts[u + 1];) {
        if (done >= block_end) {
          block = done;
          block_end = std::min(starts[to], block + kBlock);
          for (uint32_t o = block; o < block_end; ++o) {
            rows[o - block] = grads + size_t{bag_of[order[o]]} * dim;
            weights[o - block] = bags.weights[order[o]];
          }
          std::fill_n(rows + (block_end - block), kPoolAhead, rows);  // prefetched, not read: an address in cache
        }
        const uint32_t end = std::min(starts[u + 1], block_end);
        const PoolRun run{rows + (done - block),
                          weights + (done - block),
                          int64_t{end - done},
                          done == starts[u] ? PoolFrom::kFirst : PoolFrom::kOut,
                          false,
                          1.0f};
        k.pool_rows(DType::kFloat32, static_cast<int64_t>(dim), run, sums + u * dim);
        done = end;
      }
      squares.add(k.sum_of_squares(static_cast<int64_t>(dim), sums + u * dim));
    }
    blocks[from / grain] = squares;
  };
  parallel_for(batch.num_unique(), grain, [&](size_t from, size_t to) {
    for (size_t begin = from; begin < to; begin += grain) sum_block(begin, std::min(to, begin + grain));
  });
  return total(blocks.data(), blocks.size());
}

void bag_dots(const BagGradients& bags, size_t n, const float* rows, float* dots) {
  const Kernels& k = kernels();
  const size_t grain = std::max<size_t>(1, kBlockIds * bags.num_bags / std::max<size_t>(1, n));
  parallel_for(bags.num_bags, grain, [&](size_t from, size_t to) {
    for (size_t bag = from; bag < to; ++bag) {
      for (size_t i = static_cast<size_t>(bags.offsets[bag]); i < bag_end(bags, bag, n); ++i) {
        dots[i] = k.dot(static_cast<int64_t>(bags.dim), rows + i * bags.dim, bags.grads + bag * bags.dim);
      }
    }
  });
}

}  // namespace bunkbed
