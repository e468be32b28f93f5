#include "store/row_locator.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/workers.h"

namespace bunkbed {

namespace {

// Locates rows, prefetches their heats and passes each frame to `touch`, which returns whether to count a hit. Returns
// the number of hits. `located`, unless null, receives the entries of the rows without a frame.
template <typename Touch>
uint64_t locate_and_touch(const Directory& directory, const Cache& cache, const int64_t* rows, size_t n,
                          uint32_t* frames, Entry* located, const Touch& touch) {
  std::atomic<uint64_t> hits{0};
  parallel_for(n, kBlockRows, [&](size_t from, size_t to) {
    Entry entries[kBlockRows];
    uint64_t block_hits = 0;
    for (size_t begin = from; begin < to; begin += kBlockRows) {
      const size_t count = std::min(kBlockRows, to - begin);
      directory.locate(rows + begin, count, entries);
      for (size_t i = 0; i < count; ++i) {
        const bool resident = is_frame(entries[i]);
        frames[begin + i] = resident ? frame_of(entries[i]) : kNoFrame;
        if (resident) cache.prefetch_heat(frame_of(entries[i]));
      }
      for (size_t i = 0; i < count; ++i) {
        if (frames[begin + i] != kNoFrame) {
          block_hits += touch(frames[begin + i]);
        } else if (located != nullptr) {
          located[begin + i] = entries[i];
        }
      }
    }
    if (block_hits != 0) hits.fetch_add(block_hits, std::memory_order_relaxed);
  });
  return hits;
}

}  // namespace

uint64_t RowLocator::touch_resident(const int64_t* rows, size_t n, uint32_t* frames, bool touch) {
  if (!touch) return touch_distinct(rows, n, frames, false);
  return locate_and_touch(directory_, cache_, rows, n, frames, nullptr,
                          [this](uint32_t frame) { return cache_.touch(frame); });
}

// The rows are distinct, so no two threads touch the same frame.
uint64_t RowLocator::touch_distinct(const int64_t* rows, size_t n, uint32_t* frames, bool touch, Entry* entries) {
  if (touch) begin_touches();
  return locate_and_touch(directory_, cache_, rows, n, frames, entries,
                          [this, touch](uint32_t frame) { return touch && cache_.touch_alone(frame); });
}

std::vector<uint32_t> RowLocator::reading_order(const int64_t* rows, size_t n) const {
  std::vector<Entry> entries(n);
  directory_.locate(rows, n, entries.data());
  return reading_order_of(entries.data(), n);
}

std::vector<uint32_t> reading_order_of(const Entry* entries, size_t n) {
  std::vector<std::pair<Entry, uint32_t>> keys(n);
  // Frames are the highest entries: the subtraction wraps the others above them.
  for (uint32_t i = 0; i < n; ++i) keys[i] = {entries[i] - kFrameBase, i};
  std::sort(keys.begin(), keys.end());
  std::vector<uint32_t> order(n);
  for (size_t i = 0; i < n; ++i) order[i] = keys[i].second;
  return order;
}

void RowLocator::begin_touches() {
  const uint64_t step = cache_.step();
  if (unnoted_in_ == step) {
    for (const uint32_t frame : unnoted_) {
      if (frame != kNoFrame) cache_.touch_alone(frame);
    }
  }
  unnoted_in_ = 0;
  touches_begun_in_ = step;
}

// touch_distinct() of rows whose frames are known.
uint64_t RowLocator::touch_frames(const uint32_t* frames, size_t n) {
  constexpr size_t kAhead = 16;
  begin_touches();
  std::atomic<uint64_t> hits{0};
  parallel_for(n, kBlockRows, [&](size_t from, size_t to) {
    uint64_t block_hits = 0;
    for (size_t i = from; i < to; ++i) {
      if (i + kAhead < to && frames[i + kAhead] != kNoFrame) cache_.prefetch_heat(frames[i + kAhead]);
      if (frames[i] != kNoFrame) block_hits += cache_.touch_alone(frames[i]);
    }
    hits.fetch_add(block_hits, std::memory_order_relaxed);
  });
  return hits;
}

bool RowLocator::place(const Batch& batch, bool touch) {
  Batch::Placement& placement = batch.placement();
  const size_t n = batch.num_unique();
  const bool is_known = is_located(batch);
  if (is_known && (!touch || placement.step == cache_.step())) return placement.missing == 0;
  const bool notes = touch && (may_evict_ || touches_begun_in_ == cache_.step());
  uint64_t hits = 0;
  if (!is_known) {
    placement.frames.resize(n);
    placement.entries.resize(n);
    hits = touch_distinct(batch.unique().data(), n, placement.frames.data(), notes, placement.entries.data());
    placement.missing = static_cast<size_t>(std::count(placement.frames.begin(), placement.frames.end(), kNoFrame));
  } else if (notes) {
    hits = touch_frames(placement.frames.data(), n);
  }
  if (touch && !notes) {
    hits = n - placement.missing;
    touches_begun_in_ = unnoted_in_ = cache_.step();
    unnoted_ = placement.frames;
  }
  if (touch) count_hits(hits);
  placement.version = directory_.version();
  placement.step = touch ? cache_.step() : 0;
  return placement.missing == 0;
}

void RowLocator::locate(const Batch& batch) {
  if (!is_located(batch)) place(batch, false);
}

}  // namespace bunkbed
