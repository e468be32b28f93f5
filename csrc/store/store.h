// Rows across the tiers: directory, cache and log put together. Moves records between RAM and disk and never
// changes a value; what an update or a lookup means is the table's business.
//
// Invariants:
//   - A row is stored once it was updated or set. Its directory entry is then a frame or a position, never absent.
//   - A frame is dirty or frozen when its bytes are not in the log; a clean frame knows its position there. Frozen: they
//     belong to the commit under way. Whatever wants to change or give up such a frame first appends its record to the
//     epoch that ends (evict(), and pin() for whoever means to write), so the commit holds exactly what was there when
//     it began, and a row that changes meanwhile costs one append and no memory but the log's buffers. Where those are
//     all on their way to the disk, the change waits for one.
//   - Segment::live counts the records of a segment that a directory entry or a clean frame points to.
//   - While a record is being read its frame is already in the directory, so that compaction, which runs in the
//     shadow of reads, finds and moves the frame's position instead of missing the record.
//
// The table's lock covers every call.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"
#include "batch/batch.h"
#include "cache/cache.h"
#include "cache/window.h"
#include "commit/manifests.h"
#include "directory/directory.h"
#include "log/log.h"
#include "store/compaction_scheduler.h"
#include "store/compactor.h"
#include "store/disk_budget.h"
#include "store/memory_plan.h"

namespace bunkbed {

inline constexpr uint32_t kNoFrame = ~0u;
inline constexpr size_t kBlockRows = 1024;  // rows of one block of a parallel walk over the directory

struct StoreStats {
  uint64_t unique_rows = 0;  // rows wanted, each once a step; = hits + misses + first_touches
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t first_touches = 0;
  uint64_t evictions = 0;
  uint64_t written_back = 0;
};

class Store {
 public:
  // `frame_bytes` of each record are kept in frames: all of it, or the weights alone for a reader.
  Store(std::string name, size_t frame_bytes, size_t max_frames, std::unique_ptr<Directory> directory,
        std::unique_ptr<Log> log, const MemoryPlan& plan);

  // Writes the first `record_bytes` (weights alone, or everything) of an untouched row's record; what the table's
  // initialiser and optimizer say.
  using InitialRecord = std::function<void(int64_t row, size_t record_bytes, std::byte* record)>;
  void set_initial_record(InitialRecord initial) { initial_ = std::move(initial); }

  // Most rows one pin() may ask for.
  size_t max_pinned() const {
    const size_t free = cache_.capacity() - std::min(cache_.capacity(), frames_staging_);
    return std::max<size_t>(1, free - std::min<size_t>(free / 8, 8));
  }

  // Makes distinct rows resident and pins them. `create`: the caller means to write them. Absent rows: with `create` they get a dirty frame with their
  // initial record, otherwise kNoFrame. On an error nothing is pinned and no value is lost. `overwrite`: the caller, who
  // cannot fail from then on, writes whole records and marks them dirty, so none is read or made first.
  void pin(const int64_t* rows, size_t n, bool create, uint32_t* frames, bool overwrite = false);
  // The same for a lookup, and for rows that are in the log and not in RAM, which `entries` says where.
  void pin_stored(const int64_t* rows, const Entry* entries, size_t n, uint32_t* frames);
  // Makes sure that the directory can take those of these distinct rows that are new, shrinking the cache if it must;
  // Error(kMemory) when the budget cannot, and then nothing has changed. After it, pin(create) of parts of them cannot
  // fail for want of directory.
  void reserve_rows(const int64_t* rows, size_t n);
  // Whether reserve_rows() of them takes frames away; nothing may be loading then.
  bool must_shrink_for(const int64_t* rows, size_t n) const;
  // Gives the pins of the last pin() back; there are none when all its rows were in RAM already.
  void unpin(const uint32_t* frames, size_t n);
  // The frames of those rows that are in RAM, kNoFrame for the others; with `touch` they count as wanted. Returns how
  // many of them that is news for; the caller hands it to count_hits().
  uint64_t touch_resident(const int64_t* rows, size_t n, uint32_t* frames, bool touch = true);
  // Before touch_resident() with `touch`, which several threads may be in at once.
  void begin_touches();
  // The same for the batch's unique rows, into its placement, which is looked for only where something moved since; the
  // hits are counted. True when all are in RAM. Without a log nothing is evicted, and a step's only batch leaves no note at
  // its frames: that would be one more line of memory for each row, and nobody reads it.
  bool place(const Batch& batch, bool touch);
  // Looks for the batch's rows as place() does, and counts nothing.
  void locate(const Batch& batch);

  // What pin(create) is for others, for a batch whose rows place() found in RAM and of which none has moved since; they
  // need no pins. False, and nothing done, where that is not so.
  bool place_for_update(const Batch& batch);
  // Whether place() found all of them in RAM and nothing has moved since.
  bool is_placed(const Batch& batch) const { return is_located(batch) && batch.placement().missing == 0; }

  // Staging: reads that go on without the table's lock.
  //   1. begin_staging(), under the lock: frames are taken, pinned and marked as loading, the directory points at them.
  //      Rows whose records are still in the log's buffers are copied at once, and their frames are ordinary ones when it
  //      returns: a pin that comes and goes with another operation would take the staging's away, and the frame might be
  //      given up, and loading for somebody else, when the staging ends.
  //   2. Staging::plan is executed on the staging lane, anywhere. Meanwhile nobody may use a loading frame; whoever
  //      wants one waits for step 3. Compaction may move its position.
  //   3. end_staging(), under the lock: the frames are ordinary ones, or, after an error, gone again.
  // Distinct rows; those in RAM or never stored are left alone, and at most half of the frames are loading at once. For
  // a batch of the window no row gives way that it or an earlier one wants. Staging::looked rows were dealt with: fewer
  // than n when the frames did not suffice.
  struct Staging {
    ReadPlan plan;
    std::vector<uint32_t> frames;  // that are loading
    size_t copied = 0;             // rows that need no read
    size_t looked = 0;
  };
  Staging begin_staging(const int64_t* rows, size_t n, uint32_t batch = kNoUse);
  void end_staging(const Staging& staging, bool failed);
  bool is_loading(uint32_t frame) const { return cache_.info(frame).loading != 0; }
  void mark_dirty(uint32_t frame) { mark_dirty(&frame, 1); }
  void mark_dirty(const uint32_t* frames, size_t n);
  // Copies the first `record_bytes` of rows' records, a row's as often as it is named; changes nothing in the cache.
  void fetch(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records) {
    fetch(rows, n, record_bytes, records, nullptr);
  }
  // The same for a tier above: the rows count as wanted, those staged for it once. The cache ranks them no higher, for it is
  // the tier above that has them now.
  void fetch_counted(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records);

  // ---- The window: rows that coming batches want go last.
  // False while every stored row is in RAM: then there is nothing to plan.
  bool can_miss() const { return log_ != nullptr && cache_.resident() < directory_->stored_rows(); }
  // Whether expect() of n rows takes frames away; nothing may be loading then.
  bool window_must_grow(size_t n) const { return window_needs(n) > window_bytes_; }
  // Adds a batch of distinct rows; its number, or 0 when the window has no room for it. What the window takes, at most
  // `most_bytes`, goes off the cache.
  uint32_t expect(const int64_t* rows, size_t n, size_t most_bytes);
  // The batch is over. When it was the last one, the window's memory goes back to the cache.
  void finish(uint32_t batch);
  void forget_window();
  const Window& window() const { return window_; }
  size_t window_bytes() const { return window_bytes_; }

  // What Cache::touch() found.
  void count_hits(uint64_t hits) {
    stats_.hits += hits;
    stats_.unique_rows += hits;
  }
  void begin_step() { cache_.begin_step(); }

  // Copies every dirty record into the log; frames stay, clean. Not during a commit.
  void flush();
  // The same of about `most_bytes` of them, also during a commit: these belong to the next one. Goes on where the last call
  // stopped; false when none is left.
  bool write_dirty(size_t most_bytes);

  // ---- A commit: the epoch ends (see Log). From freeze() on, what is dirtied belongs to the next epoch.
  void freeze();
  // Appends frozen records, about `most_bytes` of them, from where the last call stopped; false when none is left.
  bool write_frozen(size_t most_bytes);
  // The commit failed: what is frozen still is dirty again.
  void thaw();
  // Lives within `plan` from now on: evicts what is above.
  void apply(const MemoryPlan& plan);
  // Bytes below which this store cannot work now, beside its plan's fixed part.
  size_t minimum_bytes() const { return directory_->bytes() + kMinFrames * Cache::frame_cost(frame_bytes_); }
  void check_budget();

  // These too stay, beside those named before.
  void keep_segments(const std::set<uint64_t>& more) { compactor_.add_named_segments(more); }

  size_t frame_bytes() const { return frame_bytes_; }
  size_t unwritten_rows() const { return unwritten_.total(); }  // whose newest record is not in the log
  size_t ram_bytes() const;
  const MemoryPlan& plan() const { return plan_; }
  const StoreStats& stats() const { return stats_; }
  Compactor& compactor() { return compactor_; }
  CompactionScheduler& compaction() { return compaction_; }
  DiskBudget& disk() { return disk_; }
  Cache& cache() { return cache_; }
  Directory& directory() { return *directory_; }
  Log* log() { return log_.get(); }

 private:
  uint64_t touch_distinct(const int64_t* rows, size_t n, uint32_t* frames, bool touch, Entry* entries = nullptr);
  uint64_t touch_frames(const uint32_t* frames, size_t n);
  bool is_located(const Batch& batch) const {
    return batch.placement().version == directory_->version() && batch.placement().frames.size() == batch.num_unique();
  }
  // The rows of a pin() that are not in RAM, by their places in it.
  struct Missing {
    const int64_t* rows;
    const Entry* entries;
    std::vector<uint32_t> places;
  };
  void load(const Missing& missing, size_t n, bool create, bool overwrite, uint32_t* frames);
  uint64_t touches_begun_in_ = 0;  // the step in which rows were last counted as wanted
  // Those counted in this step without a note at their frames: made up for when other rows are to be counted.
  ArrayVector<uint32_t> unnoted_;
  uint64_t unnoted_in_ = 0;
  void evict(uint32_t frame);
  void hold_staged(uint32_t frame);
  void write_frozen_frame(uint32_t frame);
  void append_batch(const uint32_t* frames, size_t n, bool are_frozen);
  void write_frozen_frames(const uint32_t* frames, size_t n);
  uint32_t take_frame();
  uint32_t take_frame_for(uint32_t batch);
  void hold_row(uint32_t frame, int64_t row);
  size_t window_needs(size_t n) const { return window_.bytes_after(n) + cache_.uses_bytes() + n * sizeof(uint32_t) * 2; }
  size_t capacity_for(size_t directory_bytes) const;
  void make_room_for_rows(const int64_t* rows, size_t n);
  void shrink_to(size_t capacity);

  struct Fetched;
  void fetch(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records, Fetched* counts);

  const std::string name_;
  const size_t frame_bytes_;
  MemoryPlan plan_;
  std::unique_ptr<Directory> directory_;
  Cache cache_;
  std::unique_ptr<Log> log_;
  UnwrittenRows unwritten_;
  Compactor compactor_;
  CompactionScheduler compaction_;
  DiskBudget disk_;
  InitialRecord initial_;
  uint32_t next_to_write_ = 0;  // the frame where write_frozen() goes on
  uint32_t next_dirty_ = 0;     // the frame where write_dirty() goes on
  bool has_pins_ = false;  // between a pin() that pinned and its unpin()
  size_t frames_staging_ = 0;  // pinned between begin_staging() and end_staging()
  Window window_;
  size_t window_bytes_ = 0;  // set aside for the window and the cache's list of uses
  std::vector<int64_t> rows_;   // scratch of finish()
  std::vector<Entry> entries_;  // and of expect() and pin()
  StoreStats stats_;
};

}  // namespace bunkbed
