// Lookups: rows read.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/error.h"
#include "base/fault.h"
#include "base/workers.h"
#include "batch/pieces.h"
#include "table/table.h"

namespace bunkbed {

size_t Table::piece_ids() const { return std::max<size_t>(64, store_->plan().scratch_bytes / kScratchPerId); }

void Table::lookup(const int64_t* ids, size_t n, bool touch, float* out) {
  auto guard = begin_lookup(ids, n, touch);
  ids_seen_ += n;
  const size_t piece = piece_ids();
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t count = std::min(piece, n - begin);
    if (begin > 0 && fault_is("lookup_without_lock")) {
      guard.unlock();
      std::this_thread::yield();
      guard = begin_lookup(ids + begin, n - begin, touch);
    }
    lookup_piece(ids + begin, count, touch, out + begin * spec_.dim);
  }
}

Batch Table::batch(const int64_t* ids, size_t n) const {
  lock_.require_own_process();
  check_ids(ids, n);
  Batch batch;
  assign_checked(&batch, ids, n);
  return batch;
}

void Table::lookup(const Batch& batch, bool touch, float* out) {
  const int64_t* const rows = batch.unique().data();
  const size_t num_unique = batch.num_unique();
  auto guard = begin_lookup(rows, num_unique, touch);
  ids_seen_ += batch.size();
  const bool all_resident = store_->place(batch, touch);
  const uint32_t* const frames = batch.placement().frames.data();
  parallel_for(batch.size(), kBlockIds, [&](size_t from, size_t to) {
    copy_resident(frames, batch.inverse().data() + from, {to - from, batch.size() - from}, out + from * spec_.dim);
  });
  if (!all_resident) lookup_missing(batch, frames, touch, out);
}

TableLock::Guard Table::begin_lookup(const int64_t* ids, size_t n, bool touch) {
  auto guard = lock_.work();
  require_usable();
  check_ids(ids, n);
  settle_for(guard, ids, n);
  check_not_held(ids, n);  // now: the lock may have been given up
  ++lookups_;
  // Nothing else ends a reader's steps, and a row counts once in each.
  if (touch && !options_.writable) store_->begin_step();
  return guard;
}

// Rows in RAM are copied at once, before anything can be evicted; places of the others are noted.
void Table::lookup_piece(const int64_t* ids, size_t n, bool touch, float* out) {
  missing_.resize(n);
  const size_t blocks = (n + kBlockIds - 1) / kBlockIds;
  missing_counts_.assign(blocks, 0);
  std::atomic<uint64_t> hits{0};
  if (touch) store_->begin_touches();
  parallel_for(n, kBlockIds, [&](size_t from, size_t to) {
    uint32_t frames[kBlockIds];
    uint64_t block_hits = 0;
    for (size_t begin = from; begin < to; begin += kBlockIds) {
      const size_t count = std::min(kBlockIds, to - begin);
      block_hits += store_->touch_resident(ids + begin, count, frames, touch);
      copy_resident(frames, nullptr, {count, count}, out + begin * spec_.dim);
      uint32_t missing = 0;
      for (size_t i = 0; i < count; ++i) {
        if (frames[i] == kNoFrame) missing_[begin + missing++] = static_cast<uint32_t>(begin + i);
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
  assign_checked(&batch_, ids, num_missing, missing_.data());
  lookup_missing(batch_, nullptr, touch, out);
}

// Copies the weights of frames[i], or of frames[index[i]], to row i of `out`; kNoFrame leaves it alone. Of rows after the
// last, as many as are known are asked for ahead.
//
// Ordinary stores: streaming ones were 7 % faster here and cost whoever reads the rows next twice that.
void Table::copy_resident(const uint32_t* frames, const uint32_t* index, CopiedRows rows, float* out) const {
  static_assert(kNoFrame == RowPlaces::kNowhere);
  const Cache& cache = store_->cache();
  const std::byte* const weights = cache.record(0) + fields_[0].offset;
  kernels().gather_rows(spec_.dtype, spec_.dim, {weights, cache.stride(), frames, index, static_cast<int64_t>(rows.n),
                                                    static_cast<int64_t>(rows.known)}, out);
}

// The batch's rows that are not in RAM (those with kNoFrame; all when `frames` is null), once each: initial rows are
// computed straight into their places, stored ones are read.
void Table::lookup_missing(const Batch& batch, const uint32_t* frames, bool touch, float* out) {
  const size_t dim = spec_.dim;
  Cache& cache = store_->cache();
  const auto places_of = [&](size_t u, auto&& visit) {
    for (uint32_t o = batch.offsets()[u]; o < batch.offsets()[u + 1]; ++o) visit(size_t{batch.order()[o]});
  };
  std::vector<uint32_t> absent, stored;  // indexes of unique rows: never trained, and on disk
  {
    std::vector<Entry> entries(batch.num_unique());
    store_->directory().locate(batch.unique().data(), batch.num_unique(), entries.data());
    for (uint32_t u = 0; u < batch.num_unique(); ++u) {
      if (frames == nullptr || frames[u] == kNoFrame) (entries[u] == kAbsent ? absent : stored).push_back(u);
    }
  }
  parallel_for(absent.size(), row_grain(dim), [&](size_t from, size_t to) {
    std::vector<std::byte> record(weight_bytes_);
    for (size_t i = from; i < to; ++i) {
      initial_record(batch.unique()[absent[i]], weight_bytes_, record.data());
      places_of(absent[i], [&](size_t place) { widen(record.data(), out + place * dim); });
    }
  });
  const size_t frame_bytes = store_->frame_bytes();
  const size_t most = touch ? store_->max_pinned() : std::max<size_t>(1, store_->plan().scratch_bytes / 2 / frame_bytes);
  for (size_t begin = 0; begin < stored.size(); begin += most) {
    const size_t count = std::min(most, stored.size() - begin);
    missing_ids_.resize(count);
    for (size_t i = 0; i < count; ++i) missing_ids_[i] = batch.unique()[stored[begin + i]];
    if (touch) {
      frames_.resize(count);
      store_->pin(missing_ids_.data(), count, false, frames_.data());
    } else {
      records_.resize(std::max(records_.size(), count * frame_bytes));
      store_->fetch(missing_ids_.data(), count, frame_bytes, records_.data());
    }
    for (size_t i = 0; i < count; ++i) {
      const std::byte* record = touch ? cache.record(frames_[i]) : records_.data() + i * frame_bytes;
      places_of(stored[begin + i], [&](size_t place) { widen(record, out + place * dim); });
    }
    if (touch) store_->unpin(frames_.data(), count);
  }
}

void Table::contains(const int64_t* ids, size_t n, bool* out) {
  const auto guard = lock_.exclusive(TableLock::Commits::kMayRun);
  require_usable();
  check_ids(ids, n);
  Entry entries[kBlockIds];
  for (size_t begin = 0; begin < n; begin += kBlockIds) {
    const size_t count = std::min(kBlockIds, n - begin);
    store_->directory().locate(ids + begin, count, entries);
    for (size_t i = 0; i < count; ++i) {
      // What was trained above only is stored as soon as it is written back.
      out[begin + i] = entries[i] != kAbsent || (holder_ != nullptr && holder_->first_held(ids + begin + i, 1) == 0);
    }
  }
}

}  // namespace bunkbed
