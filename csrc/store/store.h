// Directory, cache and log of a table. Moves records between RAM and disk and never changes a value. The table defines
// what a lookup or an update does.
//
// Invariants:
//   - A row is stored once it was updated or set. Its directory entry is then a frame or a position, never absent.
//   - A frame is dirty or frozen when its bytes are not in the log; a clean frame has its position there. A frozen
//     frame belongs to the commit under way. Before such a frame changes or is evicted, evict() or pin(create) appends
//     its record to the epoch that ends. So the commit has the records of the moment when it began. A row that changes
//     during a commit costs one append, and no memory but the log's buffers. When all buffers are being written, the
//     change waits for one.
//   - The count of a row that is not stored is its directory entry. Counts that the log lacks are listed by id, and
//     written when the list is full and before a commit begins. So a commit has the counts of that moment.
//   - Segment::live counts the records of a segment that a directory entry or a clean frame points to.
//   - While a record is being read, its frame is already in the directory. So compaction, which runs during reads,
//     finds the frame and updates its position.
//
// Requires the table's lock for every call.
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
#include "format/admission.h"
#include "log/log.h"
#include "store/compaction_scheduler.h"
#include "store/compactor.h"
#include "store/disk_budget.h"
#include "store/memory_plan.h"
#include "store/row_locator.h"

namespace bunkbed {

inline constexpr size_t kFramesAtOnce = 16u
                                        << 10;  // frames that a load takes at once: their victims are sorted together

// The counts of ids that steps have named and not stored, for a table that stores a row from the n-th step that names
// it. A count is a directory entry. The log has it from write() on.
class Counts {
 public:
  // All arguments outlive the counts. `log` is null for a table in RAM only.
  Counts(Directory* directory, Log* log, const MemoryPlan* plan, UnwrittenRows* unwritten)
      : directory_(directory), log_(log), plan_(plan), unwritten_(unwritten) {}

  // The most rows of a pin() that counts: what the list of counts that the log lacks has room for.
  size_t room() const { return std::max<size_t>(64, plan_->scratch_bytes / kScratchPerCount); }
  // Makes room for so many more rows in the list, in which they are then put without an allocation. May write().
  void make_room(size_t n);
  // Notes that a step at this time named a row that is not stored and has this entry. Requires make_room().
  void raise(int64_t row, Entry before, int64_t now);
  // Appends the counts that the log lacks. On an error they stay listed.
  void write();
  // Forgets the counts that were last raised before this time, now and when the table is opened again. Returns how
  // many.
  uint64_t forget(int64_t before);
  // The time of the last forget(); a count is never raised at an earlier one.
  int64_t since() const { return since_; }
  void set_since(int64_t time) { since_ = time; }
  // Gives distinct rows these counts, but for those that are stored. Requires Store::reserve().
  void set(const int64_t* rows, const Entry* counts, size_t n);
  // Calls `visit` with all counts, in any order.
  void each(const std::function<void(int64_t row, Entry count)>& visit) const;

 private:
  // Bytes of a plan's scratch for each count that waits to be written. It takes 8, and 16 while it is written.
  static constexpr size_t kScratchPerCount = 128;
  void list(int64_t row);

  Directory* const directory_;
  Log* const log_;
  const MemoryPlan* const plan_;
  UnwrittenRows* const unwritten_;
  std::vector<int64_t> listed_;  // rows, perhaps twice or not counted any more; at most room()
  int64_t since_ = 0;
};

class Store {
 public:
  // A frame has the first `frame_bytes` of a record: all of it, or the weights alone in a reader.
  Store(std::string name, size_t frame_bytes, size_t max_frames, std::unique_ptr<Directory> directory,
        std::unique_ptr<Log> log, const MemoryPlan& plan);

  struct Fetched;  // counters of fetch()

  // Writes the first `record_bytes` (the weights, or everything) of the record of a row that is not stored. The table's
  // initialiser and optimizer define them.
  using InitialRecord = std::function<void(int64_t row, size_t record_bytes, std::byte* record)>;
  void set_initial_record(InitialRecord initial) { initial_ = std::move(initial); }

  // The most rows of one pin().
  size_t max_pinned() const {
    const size_t free = cache_.capacity() - std::min(cache_.capacity(), frames_staging_);
    return std::max<size_t>(1, free - std::min<size_t>(free / 8, 8));
  }

  // Makes distinct rows resident and pins them. `create`: the caller will write them. An absent row gets a dirty frame
  // with its initial record when `create`, otherwise kNoFrame. On an error nothing is pinned and no value is lost.
  // `overwrite`: records are not read or made, because the caller writes whole records, marks them dirty and cannot
  // fail. `admission`, unless null: an absent row that it refuses is not created, and gets kNoFrame. When it counts,
  // the count of such a row is raised, and n is at most counts().room().
  void pin(const int64_t* rows, size_t n, bool create, uint32_t* frames, bool overwrite = false,
           const Admission* admission = nullptr);
  // The same for a lookup of stored rows that were just located. `entries`: where they are.
  void pin_stored(const int64_t* rows, const Entry* entries, size_t n, uint32_t* frames);
  // Counts the rows of these distinct rows that are not stored and get an entry by pin(create) with this admission.
  Directory::NewRows new_rows(const int64_t* rows, size_t n, const Admission* admission = nullptr) const;
  // Reserves directory space for new rows, and shrinks the cache if needed. Throws Error(kMemory), with nothing
  // changed, when the budget has no room. After it, pin(create) of any of these rows cannot fail for lack of directory
  // space.
  void reserve(const Directory::NewRows& coming);
  // Whether reserve() for these rows, all admitted, removes frames. If so, no frame may be loading when it is
  // called.
  bool must_shrink_for(const int64_t* rows, size_t n) const;
  // Removes the pins of the last pin(). There are none when all its rows were in RAM already.
  void unpin(const uint32_t* frames, size_t n);
  // Deletes rows, which are distinct; those that are not stored are skipped. None may be loading. `wrote`: set
  // before the first change; a failure after that leaves the log with tombstones of rows that the directory has.
  void erase(const int64_t* rows, size_t n, bool* wrote);
  // Appends whole records of distinct rows to the log, and takes no frames for them. None may be loading. Requires
  // reserve() and a log. `wrote`: set before the first change. After a failure some rows have the new records.
  void append_records(const int64_t* rows, size_t n, const std::byte* records, bool* wrote);
  // Replaces pin(create) for a batch that is_placed(); its rows need no pins. Otherwise does nothing and returns false.
  bool place_for_update(const Batch& batch);

  // Staging: prefetch with reads that do not hold the table's lock.
  //   1. begin_staging(), under the lock, takes and pins frames, marks them as loading and points the directory at
  //      them. Rows whose records are still in the log's buffers are copied at once, and are not pinned when it
  //      returns. A pin is one bit, not a count: unpin() of another operation would remove the staging's pin, and the
  //      frame could be evicted and be loading for another staging when this one ends.
  //   2. The staging lane executes Staging::plan, without the lock. Meanwhile no call may use a loading frame: a call
  //      that needs its row waits for step 3. Compaction may change the frame's position.
  //   3. end_staging(), under the lock, unpins the frames or, after an error, releases them.
  // The rows are distinct. Rows in RAM and rows that are not stored are skipped. At most half of the frames are loading
  // at once. Staging for a batch of the window evicts no row that this or an earlier batch wants.
  struct Staging {
    ReadPlan plan;
    std::vector<uint32_t> frames;  // loading frames
    size_t copied = 0;             // rows that need no read
    size_t looked = 0;             // rows that are staged or skipped; fewer than n when there were too few frames
  };
  Staging begin_staging(const int64_t* rows, size_t n, uint32_t batch = kNoUse);
  void end_staging(const Staging& staging, bool failed);
  bool is_loading(uint32_t frame) const { return cache_.info(frame).loading != 0; }
  void mark_dirty(const uint32_t* frames, size_t n);  // skips kNoFrame
  // Copies the first `record_bytes` of the rows' records. Rows may be repeated. Does not change the cache.
  void fetch(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records, Fetched* counts = nullptr);
  // The same for a device cache. Counts the rows in the statistics, and a staged row only as the miss that staging
  // counted. The rows are not touched, because the device cache has them now.
  void fetch_counted(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records);

  // ---- The window: rows of coming batches are evicted last.
  // False while every stored row is in RAM. Then there is nothing to plan.
  bool can_miss() const { return log_ != nullptr && cache_.resident() < directory_->stored_rows(); }
  // Whether expect() of n rows removes frames. If so, no frame may be loading when it is called.
  bool window_must_grow(size_t n) const { return window_needs(n) > window_bytes_; }
  // Adds a batch of distinct rows. Returns its number, or kNoUse when the window has no room. The window's memory, at
  // most `most_bytes`, is taken from the cache.
  uint32_t expect(const int64_t* rows, size_t n, size_t most_bytes);
  // Removes a batch. When it was the last one, the window's memory returns to the cache.
  void finish(uint32_t batch);
  void forget_window();
  const Window& window() const { return window_; }
  size_t window_bytes() const { return window_bytes_; }

  // Appends every dirty record to the log. The frames stay and are clean. Not during a commit.
  void flush();
  // The same for about `most_bytes` of records, also during a commit: they belong to the next commit. Goes on where the
  // last call stopped. Returns false when no dirty record is left.
  bool write_dirty(size_t most_bytes);

  // ---- A commit ends the epoch (see Log). Rows that become dirty after freeze() belong to the next epoch.
  void freeze();
  // Appends about `most_bytes` of frozen records, from where the last call stopped. Returns false when none is left.
  bool write_frozen(size_t most_bytes);
  // After a failed commit: frames that are still frozen become dirty again.
  void thaw();
  // Replaces the memory plan. Evicts frames that it has no room for.
  void apply(const MemoryPlan& plan);
  // The fewest bytes with which this store works now, without the plan's fixed part.
  size_t minimum_bytes() const { return directory_->bytes() + kMinFrames * Cache::frame_cost(frame_bytes_); }

  // The smallest budget that has room for a directory of so many bytes.
  size_t budget_for(size_t directory_bytes) const;

  size_t frame_bytes() const { return frame_bytes_; }
  size_t unwritten_rows() const { return unwritten_.total(); }  // rows whose newest record is not in the log
  size_t ram_bytes() const;
  const MemoryPlan& plan() const { return plan_; }
  const StoreStats& stats() const { return stats_; }
  Compactor& compactor() { return compactor_; }
  CompactionScheduler& compaction() { return compaction_; }
  DiskBudget& disk() { return disk_; }
  RowLocator& rows() { return rows_; }
  Counts& counts() { return counts_; }
  Cache& cache() { return cache_; }
  Directory& directory() { return *directory_; }
  Log* log() { return log_.get(); }

 private:
  // The rows of a pin() that are not in RAM.
  struct Missing {
    const int64_t* rows;
    const Entry* entries;
    std::vector<uint32_t> places;  // indexes in `rows`
  };
  void load(Missing* missing, size_t n, bool create, bool overwrite, uint32_t* frames);
  void evict(uint32_t frame);
  void hold_staged(uint32_t frame);
  void give_up_record(Entry entry);
  void append_batch(const uint32_t* frames, size_t n, bool are_frozen);
  void write_frozen_frames(const uint32_t* frames, size_t n);
  // Takes `n` frames for rows of a batch of the window (kNoUse: of none); fewer only where no more frame may be
  // evicted.
  std::vector<uint32_t> take_frames(size_t n, uint32_t batch);
  void release_unused(const std::vector<uint32_t>& frames, size_t used);
  void hold_row(uint32_t frame, int64_t row);
  size_t window_needs(size_t n) const {
    return window_.bytes_after(n) + cache_.uses_bytes() + n * sizeof(uint32_t) * 2;
  }
  size_t capacity_for(size_t directory_bytes) const;
  void check_budget() const;  // throws Error(kMemory) when the budget is smaller than the minimum
  void shrink_to(size_t capacity);

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
  StoreStats stats_;
  RowLocator rows_;
  Counts counts_;
  InitialRecord initial_;
  uint32_t next_to_write_ = 0;  // the frame where write_frozen() goes on
  uint32_t next_dirty_ = 0;     // the frame where write_dirty() goes on
  bool has_pins_ = false;       // true between a pin() that pinned and its unpin()
  size_t frames_staging_ = 0;   // pinned between begin_staging() and end_staging()
  Window window_;
  size_t window_bytes_ = 0;        // reserved for the window and the cache's list of uses
  std::vector<uint32_t> refused_;  // scratch memory of pin()
  std::vector<int64_t> finished_;  // scratch memory of finish()
  std::vector<Entry> entries_;     // the same of finish(), expect() and pin()
};

}  // namespace bunkbed
