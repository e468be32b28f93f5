// Bags: pools rows directly from their frames.
//
// The rows of a bag are added in batch order, so each element is one chain of additions and its bits depend on nothing
// else. For as many bags at a time as the scratch has room for:
//   1. pool_resident(): each thread takes bags, locates their ids block by block and adds the records in RAM to the
//      bag's sum. A bag stops at its first row that is not in RAM. No row is read or evicted in this step.
//   2. pool_missing(): looks up the remaining rows of such bags, piece by piece into scratch, and adds them to the
//      sums.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/workers.h"
#include "batch/pieces.h"
#include "kernels/kernels.h"
#include "table/row_reader.h"

namespace bunkbed {

struct RowReader::Bags {
  const int64_t* ids;  // (n)
  size_t n;
  const int64_t* starts;  // where the bags from `first` on start, and where the last one ends
  size_t first;
  Pooling pooling;
  const float* weights;  // (n) or null
  bool touch;            // whether rows that are read stay in RAM
  bool counts_touches;   // whether to touch the frames of rows in RAM

  size_t begin(size_t bag) const { return static_cast<size_t>(starts[bag - first]); }
  size_t end(size_t bag) const { return static_cast<size_t>(starts[bag - first + 1]); }

  // The divisor of the sum of a bag that is not empty. With weights it is that of TensorFlow's combiners: the sum of
  // the weights for mean, the square root of the sum of their squares for sqrtn. Weights that sum to 0 make a bag of
  // zeros there; so does this divisor.
  float divisor(size_t bag) const {
    float divisor = 0.0f;
    if (weights == nullptr) {
      divisor = static_cast<float>(end(bag) - begin(bag));
    } else {
      for (size_t i = begin(bag); i < end(bag); ++i) {
        divisor += pooling == Pooling::kMean ? weights[i] : weights[i] * weights[i];
      }
    }
    if (divisor == 0.0f) return std::numeric_limits<float>::infinity();
    return pooling == Pooling::kSqrtN ? std::sqrt(divisor) : divisor;
  }

  // The run that adds rows [from, to) of a bag to its sum, and divides if these are its last.
  PoolRun run(size_t bag, size_t from, size_t to, const void* const* rows) const {
    const bool divides = pooling != Pooling::kSum && to == end(bag) && to > begin(bag);
    return {rows,
            weights == nullptr ? nullptr : weights + from,
            static_cast<int64_t>(to - from),
            from == begin(bag) ? PoolFrom::kZero : PoolFrom::kOut,
            divides,
            divides ? divisor(bag) : 1.0f};
  }
};

void RowReader::lookup_bags(const int64_t* ids, size_t n, const int64_t* offsets, size_t num_bags, Pooling pooling,
                            const float* weights, bool touch, float* out) {
  const auto guard = begin_lookup(ids, n, touch);
  table_.counts.ids += n;
  const size_t piece = table_.piece_ids();
  for (size_t first = 0; first < num_bags; first += piece) {
    const size_t count = std::min(piece, num_bags - first);
    // A copy that is checked again, because another thread may change the caller's array.
    table_.scratch.bag_starts.resize(count + 1);
    std::copy_n(offsets + first, std::min(count + 1, num_bags - first), table_.scratch.bag_starts.begin());
    if (first + count == num_bags) table_.scratch.bag_starts[count] = static_cast<int64_t>(n);
    if (table_.scratch.bag_starts[0] < 0 || table_.scratch.bag_starts[count] > static_cast<int64_t>(n) ||
        !std::is_sorted(table_.scratch.bag_starts.begin(), table_.scratch.bag_starts.end())) {
      throw Error(ErrorKind::kInvalid,
                  "table '" + table_.name + "': the offsets were changed while their bags were looked up");
    }
    const Bags bags{ids,     n,     table_.scratch.bag_starts.data(), first, pooling,
                    weights, touch, touch && table_.may_evict()};
    pool_resident(bags, first, count, out);
    pool_missing(bags, first, count, out);
  }
}

void RowReader::pool_resident(const Bags& bags, size_t first, size_t count, float* out) {
  constexpr size_t kBlock = 1024;
  const auto dim = static_cast<int64_t>(table_.spec.dim);
  Cache& cache = table_.store->cache();
  const Directory& directory = table_.store->directory();
  const Kernels& k = kernels();
  const auto prefetch_weights = [bytes = std::min<size_t>(table_.weight_bytes, 512)](const void* row) {
    for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const std::byte*>(row) + line, 0, 2);
  };
  const size_t num_ids = bags.end(first + count - 1) - bags.begin(first);
  const size_t grain = std::max<size_t>(1, 2 * kBlock * count / std::max<size_t>(1, num_ids));
  table_.scratch.pooled_to.resize(std::max(table_.scratch.pooled_to.size(), count));
  std::atomic<uint64_t> hits{0};
  parallel_for(count, grain, [&](size_t from_bag, size_t to_bag) REQUIRES(table_.lock) {
    Entry entries[kBlock];
    const void* rows[kBlock + kPoolAhead];
    size_t block = 0, block_end = 0;  // the range of ids that `entries` and `rows` describe
    const size_t stop = bags.end(first + to_bag - 1);
    uint64_t new_hits = 0;
    for (size_t bag = first + from_bag; bag < first + to_bag; ++bag) {
      const size_t bag_end = bags.end(bag);
      size_t done = bags.begin(bag);
      for (bool is_resident = true; is_resident;) {
        if (done < bag_end && done >= block_end) {
          block = done;
          block_end = std::min(stop, block + kBlock);
          const size_t size = block_end - block;
          directory.locate(bags.ids + block, size, entries);
          for (size_t i = 0; i < size; ++i) {
            rows[i] = is_frame(entries[i]) ? cache.record(frame_of(entries[i])) : nullptr;
          }
          for (size_t i = 0; i < std::min<size_t>(size, kPoolAhead); ++i) prefetch_weights(rows[i]);
          if (bags.counts_touches) {
            for (size_t i = 0; i < size; ++i) {
              if (rows[i] != nullptr) cache.prefetch_heat(frame_of(entries[i]));
            }
          }
          for (size_t i = size; i < size + kPoolAhead; ++i) rows[i] = entries;  // any valid address
        }
        const size_t from = done;
        const size_t to = std::max(from, std::min(bag_end, block_end));
        while (done < to && rows[done - block] != nullptr) ++done;
        if (bags.counts_touches) {
          for (size_t i = from; i < done; ++i) new_hits += cache.touch(frame_of(entries[i - block]));
        }
        const size_t at = std::min(from, block_end) - block;  // an empty bag may be outside the block
        k.pool_rows(table_.spec.dtype, dim, bags.run(bag, from, done, rows + at), out + bag * table_.spec.dim);
        is_resident = done == to && done < bag_end;
      }
      table_.scratch.pooled_to[bag - first] = done;
    }
    if (new_hits != 0) hits.fetch_add(new_hits, std::memory_order_relaxed);
  });
  if (bags.counts_touches) table_.store->rows().count_hits(hits);
}

void RowReader::pool_missing(const Bags& bags, size_t first, size_t count, float* out) {
  struct Part {
    size_t bag, from, count;
  };
  const size_t dim = table_.spec.dim;
  const size_t by_rows = std::max<size_t>(1, table_.store->plan().scratch_bytes / 2 / (dim * sizeof(float)));
  const size_t piece = std::min({table_.piece_ids(), by_rows, size_t{1} << 16});
  const Kernels& k = kernels();
  std::vector<Part> parts;
  for (size_t bag = first;;) {
    parts.clear();
    table_.scratch.bag_ids.clear();
    while (bag < first + count && table_.scratch.bag_ids.size() < piece) {
      size_t& done = table_.scratch.pooled_to[bag - first];
      const size_t taken = std::min(bags.end(bag) - done, piece - table_.scratch.bag_ids.size());
      if (taken > 0) {
        parts.push_back({bag, done, taken});
        table_.scratch.bag_ids.insert(table_.scratch.bag_ids.end(), bags.ids + done, bags.ids + done + taken);
        done += taken;
      }
      if (done == bags.end(bag)) ++bag;
    }
    if (parts.empty()) return;
    table_.scratch.sums.resize(std::max(table_.scratch.sums.size(), table_.scratch.bag_ids.size() * dim));
    lookup_piece(table_.scratch.bag_ids.data(), table_.scratch.bag_ids.size(), bags.touch, table_.scratch.sums.data());
    const float* row = table_.scratch.sums.data();
    for (const Part& part : parts) {
      constexpr size_t kBlock = 64;
      const void* rows[kBlock + kPoolAhead];
      for (size_t from = 0; from < part.count; from += kBlock) {
        const size_t size = std::min(kBlock, part.count - from);
        for (size_t i = 0; i < size; ++i, row += dim) rows[i] = row;
        for (size_t i = size; i < size + kPoolAhead; ++i) rows[i] = rows;
        const size_t place = part.from + from;
        k.pool_rows(DType::kFloat32, static_cast<int64_t>(dim), bags.run(part.bag, place, place + size, rows),
                    out + part.bag * dim);
      }
    }
  }
}

}  // namespace bunkbed
