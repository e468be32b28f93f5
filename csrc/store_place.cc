// Where rows are: what most of a training step's calls to the store come to once its rows are in RAM.
#include <algorithm>
#include <atomic>

#include "store.h"
#include "workers.h"

namespace bunkbed {

namespace {

// Locates rows and hands each frame to `touch`, which says whether that was news; asks for the heats ahead.
template <typename Touch>
uint64_t locate_and_touch(const Directory& directory, const Cache& cache, const int64_t* rows, size_t n,
                          uint32_t* frames, const Touch& touch) {
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
        if (frames[begin + i] != kNoFrame) block_hits += touch(frames[begin + i]);
      }
    }
    if (block_hits != 0) hits.fetch_add(block_hits, std::memory_order_relaxed);
  });
  return hits;
}

}  // namespace

uint64_t Store::touch_resident(const int64_t* rows, size_t n, uint32_t* frames, bool touch) {
  if (!touch) return touch_distinct(rows, n, frames, false);
  return locate_and_touch(*directory_, cache_, rows, n, frames, [this](uint32_t frame) { return cache_.touch(frame); });
}

// No row twice: no frame is touched by two threads.
uint64_t Store::touch_distinct(const int64_t* rows, size_t n, uint32_t* frames, bool touch) {
  if (touch) begin_touches();
  return locate_and_touch(*directory_, cache_, rows, n, frames,
                          [this, touch](uint32_t frame) { return touch && cache_.touch_alone(frame); });
}

void Store::begin_touches() {
  const uint64_t step = cache_.step();
  if (unnoted_in_ == step) {
    for (const uint32_t frame : unnoted_) {
      if (frame != kNoFrame) cache_.touch_alone(frame);
    }
  }
  unnoted_in_ = 0;
  touches_begun_in_ = step;
}

bool Store::place(const Batch& batch, bool touch) {
  Batch::Placement& placement = batch.placement();
  const size_t n = batch.num_unique();
  const bool is_known = placement.version == directory_->version() && placement.frames.size() == n;
  if (is_known && (!touch || placement.step == cache_.step())) return true;
  placement.frames.resize(n);
  const bool notes = touch && (log_ != nullptr || touches_begun_in_ == cache_.step());
  uint64_t hits = touch_distinct(batch.unique().data(), n, placement.frames.data(), notes);
  const auto missing = static_cast<size_t>(std::count(placement.frames.begin(), placement.frames.end(), kNoFrame));
  const bool all = missing == 0;
  if (touch && !notes) {
    hits = n - missing;
    touches_begun_in_ = unnoted_in_ = cache_.step();
    unnoted_ = placement.frames;
  }
  if (touch) count_hits(hits);
  // Only complete ones are kept: whoever brings in what is missing moves something.
  placement.version = all ? directory_->version() : 0;
  placement.step = touch ? cache_.step() : 0;
  return all;
}

bool Store::place_for_update(const Batch& batch) {
  if (!is_placed(batch)) return false;
  place(batch, true);
  write_frozen_frames(batch.placement().frames.data(), batch.num_unique());
  return true;
}

}  // namespace bunkbed
