// Lookups and bags: rows read.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "error.h"
#include "table.h"
#include "table_rows.h"
#include "workers.h"

namespace bunkbed {

size_t Table::piece_ids() const { return std::max<size_t>(64, store_->plan().scratch_bytes / kScratchPerId); }

void Table::lookup(const int64_t* ids, size_t n, bool touch, float* out) {
  auto guard = lock_beside_staging();
  require_usable();
  check_ids(ids, n);
  check_not_held(ids, n);
  settle_for(guard, ids, n);
  ++lookups_;
  ids_seen_ += n;
  const size_t piece = piece_ids();
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t count = std::min(piece, n - begin);
    lookup_piece(ids + begin, count, touch, out + begin * spec_.dim);
  }
}

void Table::lookup_piece(const int64_t* ids, size_t n, bool touch, float* out) {
  const size_t dim = spec_.dim;
  Cache& cache = store_->cache();
  const Directory& directory = store_->directory();

  // 1. Rows in RAM are copied at once, before anything can be evicted; places of the others are noted.
  missing_.resize(n);
  const size_t blocks = (n + kBlockIds - 1) / kBlockIds;
  missing_counts_.assign(blocks, 0);
  std::atomic<uint64_t> hits{0};
  parallel_for(n, kBlockIds, [&](size_t from, size_t to) {
    Entry entries[kBlockIds];
    uint64_t block_hits = 0;
    for (size_t begin = from; begin < to; begin += kBlockIds) {
      const size_t count = std::min(kBlockIds, to - begin);
      directory.locate(ids + begin, count, entries);
      uint32_t missing = 0;
      constexpr size_t kAhead = 6;
      for (size_t i = 0; i < count; ++i) {
        if (i + kAhead < count && is_frame(entries[i + kAhead])) {
          const uint32_t ahead = frame_of(entries[i + kAhead]);
          const std::byte* record = cache.record(ahead);
          for (size_t line = 0; line < weight_bytes_ && line < 512; line += 64) __builtin_prefetch(record + line);
          if (touch) cache.prefetch_heat(ahead);
        }
        if (is_frame(entries[i])) {
          const uint32_t frame = frame_of(entries[i]);
          widen(cache.record(frame), out + (begin + i) * dim);
          if (touch) block_hits += cache.touch(frame);
        } else {
          missing_[begin + missing++] = static_cast<uint32_t>(begin + i);
        }
      }
      missing_counts_[begin / kBlockIds] = missing;
    }
    if (block_hits != 0) hits.fetch_add(block_hits, std::memory_order_relaxed);
  });
  if (touch) store_->count_hits(hits);
  size_t num_missing = 0;
  for (size_t block = 0; block < blocks; ++block) {
    for (uint32_t i = 0; i < missing_counts_[block]; ++i) missing_[num_missing++] = missing_[block * kBlockIds + i];
  }
  if (num_missing == 0) return;

  // 2. The others, once each: initial rows are computed straight into their place, stored ones are read.
  batch_.assign(ids, num_missing, missing_.data());
  batch_.group();
  const size_t num_unique = batch_.num_unique();
  const auto places_of = [&](size_t u, auto&& visit) {
    for (uint32_t o = batch_.offsets()[u]; o < batch_.offsets()[u + 1]; ++o) visit(missing_[batch_.order()[o]]);
  };
  std::vector<uint32_t> stored;  // indexes of unique rows that are on disk
  {
    std::vector<Entry> entries(num_unique);
    directory.locate(batch_.unique().data(), num_unique, entries.data());
    for (uint32_t u = 0; u < num_unique; ++u) {
      if (entries[u] != kAbsent) stored.push_back(u);
    }
    if (stored.size() < num_unique) {
      parallel_for(num_unique, row_grain(dim), [&](size_t from, size_t to) {
        std::vector<std::byte> record(weight_bytes_);
        for (size_t u = from; u < to; ++u) {
          if (entries[u] != kAbsent) continue;
          initial_record(batch_.unique()[u], weight_bytes_, record.data());
          places_of(u, [&](uint32_t place) { widen(record.data(), out + place * dim); });
        }
      });
    }
  }
  const size_t frame_bytes = store_->frame_bytes();
  const size_t most = touch ? store_->max_pinned() : std::max<size_t>(1, store_->plan().scratch_bytes / 2 / frame_bytes);
  for (size_t begin = 0; begin < stored.size(); begin += most) {
    const size_t count = std::min(most, stored.size() - begin);
    missing_ids_.resize(count);
    for (size_t i = 0; i < count; ++i) missing_ids_[i] = batch_.unique()[stored[begin + i]];
    if (touch) {
      frames_.resize(count);
      store_->pin(missing_ids_.data(), count, false, frames_.data());
    } else {
      records_.resize(std::max(records_.size(), count * frame_bytes));
      store_->fetch(missing_ids_.data(), count, frame_bytes, records_.data());
    }
    for (size_t i = 0; i < count; ++i) {
      const std::byte* record = touch ? cache.record(frames_[i]) : records_.data() + i * frame_bytes;
      places_of(stored[begin + i], [&](uint32_t place) { widen(record, out + place * dim); });
    }
    if (touch) store_->unpin(frames_.data(), count);
  }
}

void Table::lookup_bags(const int64_t* ids, size_t n, const int64_t* offsets, size_t num_bags, Pooling pooling,
                        const float* weights, bool touch, float* out) {
  const auto guard = lock();
  require_usable();
  check_ids(ids, n);
  check_not_held(ids, n);
  ++lookups_;
  ids_seen_ += n;
  const size_t dim = spec_.dim;
  std::fill_n(out, num_bags * dim, 0.0f);

  // Rows of one piece lie in scratch, then are added to their bags in batch order. A bag may span pieces.
  const size_t by_rows = std::max<size_t>(1, store_->plan().scratch_bytes / 2 / (dim * sizeof(float)));
  const size_t piece = std::min(piece_ids(), std::min<size_t>(by_rows, 1u << 16));
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t count = std::min(piece, n - begin);
    sums_.resize(std::max(sums_.size(), count * dim));
    lookup_piece(ids + begin, count, touch, sums_.data());
    pool_rows(sums_.data(), begin, begin + count, offsets, num_bags, n, weights, out);
  }
  if (pooling == Pooling::kSum) return;
  for (size_t bag = 0; bag < num_bags; ++bag) {
    const auto from = static_cast<size_t>(offsets[bag]);
    const size_t to = bag + 1 < num_bags ? static_cast<size_t>(offsets[bag + 1]) : n;
    if (from == to) continue;
    // With weights as TensorFlow's combiners: mean by the sum of weights, sqrtn by the root of their squares' sum.
    float divisor = 0.0f;
    if (weights == nullptr) {
      divisor = static_cast<float>(to - from);
    } else {
      for (size_t i = from; i < to; ++i) divisor += pooling == Pooling::kMean ? weights[i] : weights[i] * weights[i];
    }
    if (pooling == Pooling::kSqrtN) divisor = std::sqrt(divisor);
    for (size_t d = 0; d < dim; ++d) out[bag * dim + d] /= divisor;
  }
}

// Adds rows [begin, end) of the batch, which lie at `rows`, to their bags.
void Table::pool_rows(const float* rows, size_t begin, size_t end, const int64_t* offsets, size_t num_bags, size_t n,
                      const float* weights, float* out) const {
  const size_t dim = spec_.dim;
  // The bags that this range meets.
  const int64_t* const first = std::upper_bound(offsets, offsets + num_bags, static_cast<int64_t>(begin));
  const size_t first_bag = first == offsets ? 0 : static_cast<size_t>(first - offsets) - 1;
  const int64_t* const last = std::lower_bound(offsets, offsets + num_bags, static_cast<int64_t>(end));
  const auto last_bag = static_cast<size_t>(last - offsets);
  const Kernels& k = kernels();
  parallel_for(last_bag - first_bag, 64, [&](size_t from_bag, size_t to_bag) {
    for (size_t bag = first_bag + from_bag; bag < first_bag + to_bag; ++bag) {
      const size_t from = std::max(begin, static_cast<size_t>(offsets[bag]));
      const size_t to = std::min(end, bag + 1 < num_bags ? static_cast<size_t>(offsets[bag + 1]) : n);
      for (size_t i = from; i < to; ++i) {
        const float* row = rows + (i - begin) * dim;
        if (weights == nullptr) {
          k.add_row(static_cast<int64_t>(dim), row, out + bag * dim);
        } else {
          k.add_scaled_row(static_cast<int64_t>(dim), weights[i], row, out + bag * dim);
        }
      }
    }
  });
}

void Table::contains(const int64_t* ids, size_t n, bool* out) {
  const auto guard = lock();
  require_usable();
  check_ids(ids, n);
  Entry entries[kBlockIds];
  for (size_t begin = 0; begin < n; begin += kBlockIds) {
    const size_t count = std::min(kBlockIds, n - begin);
    store_->directory().locate(ids + begin, count, entries);
    for (size_t i = 0; i < count; ++i) out[begin + i] = entries[i] != kAbsent;
  }
}

}  // namespace bunkbed
