// Locates rows and counts their uses: most of what a training step asks of the store once its rows are in RAM. Requires
// the table's lock for every call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/memory.h"
#include "batch/batch.h"
#include "cache/cache.h"
#include "directory/directory.h"

namespace bunkbed {

inline constexpr uint32_t kNoFrame = ~0u;
inline constexpr size_t kBlockRows = 1024;  // rows of one block of a parallel walk over the directory

struct StoreStats {
  uint64_t unique_rows = 0;  // rows looked up or updated, each once per step; = hits + misses + first_touches
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t first_touches = 0;
  uint64_t evictions = 0;
  uint64_t written_back = 0;
  uint64_t admitted_rows = 0;  // of a table with a probability of admission: rows that updates stored, and
  uint64_t refused_rows = 0;   // those that they did not store
};

class RowLocator {
 public:
  // All outlive the locator; `stats` counts the hits. `may_evict`: false without a log.
  RowLocator(const Directory& directory, Cache& cache, bool may_evict, StoreStats* stats)
      : directory_(directory), cache_(cache), may_evict_(may_evict), stats_(stats) {}
  RowLocator(const RowLocator&) = delete;
  RowLocator& operator=(const RowLocator&) = delete;

  void begin_step() { cache_.begin_step(); }
  // Returns in `frames` the frames of the rows in RAM, and kNoFrame for the others. With `touch`, touches these frames
  // and returns how many were touched for the first time in this step. The caller passes that to count_hits().
  uint64_t touch_resident(const int64_t* rows, size_t n, uint32_t* frames, bool touch = true);
  // Required before touch_resident() with `touch`, which several threads may call at once.
  void begin_touches();
  // Locates the batch's unique rows again if a row has moved since the last time, stores the frames in the batch's
  // placement and counts the hits. Returns whether all rows are in RAM. Without a log, the frames of a step's only
  // batch are not touched: no frame is evicted, so the heats are not used, and touching costs a cache line for each
  // row.
  bool place(const Batch& batch, bool touch);
  // The same without counting and touching.
  void locate(const Batch& batch);
  // Whether place() found all rows in RAM and no row has moved since.
  bool is_placed(const Batch& batch) const { return is_located(batch) && batch.placement().missing == 0; }
  // The same for distinct rows. `entries`, unless null, receives the entries of the rows without a frame.
  uint64_t touch_distinct(const int64_t* rows, size_t n, uint32_t* frames, bool touch, Entry* entries = nullptr);
  // The order in which a batch that is larger than the cache uses these rows, as indexes: rows in RAM first, before one
  // of them is evicted; then by position in the log, so that each part of the batch reads one region of the log.
  std::vector<uint32_t> reading_order(const int64_t* rows, size_t n) const;
  // Counts the hits that touch_resident() returned.
  void count_hits(uint64_t hits) {
    stats_->hits += hits;
    stats_->unique_rows += hits;
  }

 private:
  uint64_t touch_frames(const uint32_t* frames, size_t n);
  bool is_located(const Batch& batch) const {
    return batch.placement().version == directory_.version() && batch.placement().frames.size() == batch.num_unique();
  }

  const Directory& directory_;
  Cache& cache_;
  const bool may_evict_;
  StoreStats* const stats_;
  uint64_t touches_begun_in_ = 0;  // the step in which rows were last touched
  // Frames that place() counted but did not touch in this step. begin_touches() touches them when it is called again.
  ArrayVector<uint32_t> unnoted_;
  uint64_t unnoted_in_ = 0;  // that step
};

// RowLocator::reading_order() of rows with these entries.
std::vector<uint32_t> reading_order_of(const Entry* entries, size_t n);

}  // namespace bunkbed
