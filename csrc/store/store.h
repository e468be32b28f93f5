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
#include "store/compactor.h"

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

// How a table's RAM budget is divided. A function of the budget and the record alone.
struct MemoryPlan {
  size_t total_bytes = 0;    // 0: without bound
  LogMemory log;
  size_t compaction_bytes = 0;
  size_t scratch_bytes = 0;  // dedupe, gradient sums, copies in flight
  size_t fixed_bytes = 0;    // all of the above and the compactor's buffer; the rest is directory and frames
};
// `has_log` false: a table in RAM only. `read_unit` is the alignment reads need.
MemoryPlan plan_memory(size_t total_bytes, size_t payload_bytes, uint64_t slots_per_segment, size_t read_unit,
                       bool has_log);
// No plan has smaller chunks.
inline constexpr size_t kSmallestChunk = 16u << 10;
inline size_t smallest_chunk_bytes(size_t stride) {
  return vfs::round_up(std::max(kSmallestChunk, 2 * stride + 2 * vfs::kBlockBytes), vfs::kBlockBytes);
}
// Frames below which no table works.
inline constexpr size_t kMinFrames = 16;

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

  // What pin(create) is for others, for a batch whose rows place() found in RAM and of which none has moved since; they
  // need no pins. False, and nothing done, where that is not so.
  bool place_for_update(const Batch& batch);
  // Whether place() found all of them in RAM and nothing has moved since.
  bool is_placed(const Batch& batch) const {
    return batch.placement().version == directory_->version() && batch.placement().frames.size() == batch.num_unique();
  }

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
  // What the commit appended calls for compaction from now on: beside other calls, in slices. Until then compact_some(),
  // which runs within somebody's step, leaves it alone.
  void count_commit_debt() { compaction_debt_ += std::exchange(commit_debt_, 0); }
  // Lives within `plan` from now on: evicts what is above.
  void apply(const MemoryPlan& plan);
  // Bytes below which this store cannot work now, beside its plan's fixed part.
  size_t minimum_bytes() const { return directory_->bytes() + kMinFrames * Cache::frame_cost(frame_bytes_); }
  void check_budget();

  // Compaction: a little of it, in proportion to what was appended since the last call.
  void compact_some();
  // What was appended so far is no reason to compact: nothing moves until something else is appended.
  void forgive_compaction() {
    compaction_debt_ = commit_debt_ = 0;
    appended_seen_ = log_ == nullptr ? 0 : log_->stats().written_records;
  }
  // The same little of it in slices, by whoever reads for it without the table's lock; see Compactor::plan_read().
  // Between begin_compaction(), false when there is nothing to do, and end_compaction() compact_some() leaves it alone.
  bool begin_compaction();
  // Appends are several segments ahead of it.
  bool is_compaction_behind();
  bool plan_compaction(Compactor::Read* read);
  void compact_slice(Compactor::Read read);
  void end_compaction() { is_compacting_beside_ = false; }
  // At opening: merges segments while there are too many. The merge after a commit is part of the next commit, and is lost
  // when the table closes before it: a table that is opened for each commit would keep one more segment each time.
  void merge_segments() {
    compactor_.merge(plan_.compaction_bytes);
    forgive_compaction();
  }
  // All of it that pays; returns records moved.
  uint64_t compact_all();

  // What durable commits name: dead segments of it leave the log, their files stay.
  void set_held(Manifests::Held held);
  // These too stay, beside those named before.
  void keep_segments(const std::set<uint64_t>& more) { compactor_.add_named_segments(more); }

  // ---- The limit of what the files may take, and the terms; see store/disk.cc.
  // 0: none. `commits`: most of those not kept by name that are there at once. `num_rows`: most rows there may be.
  void set_disk_limit(uint64_t bytes, size_t commits, uint64_t num_rows);
  uint64_t disk_limit() const { return disk_.limit; }
  uint64_t disk_bytes() const;
  // Of them, what is there for kept commits only.
  uint64_t snapshot_bytes() const;
  // Directory checkpoints that no commit names yet.
  void set_checkpoint_bytes(uint64_t bytes) { disk_.checkpoint_bytes = bytes; }
  bool has_disk_bytes(uint64_t bytes) const { return disk_.limit == 0 || disk_bytes() + bytes + reserved_bytes() <= disk_.limit; }
  // Whether these rows may become dirty; one may come twice.
  bool has_disk_for(const int64_t* rows, size_t n);
  // The same for rows nobody knows yet.
  bool has_disk_for_any(size_t rows) {
    disk_.admitted = rows;
    return disk_.limit == 0 || fits_disk(rows);
  }
  // The limit with which so many more rows, or so many that are stored, may always be changed at once.
  uint64_t disk_needed_for(uint64_t rows) const;
  // Compaction for the rows last asked for; false when it does not help.
  bool make_disk_room();
  // They will not.
  void forget_admitted() { disk_.admitted = 0; }
  // Rows whose newest value lies above the table, and which may be set any time.
  void reserve_held(size_t rows) { disk_.held_rows = rows; }
  void set_meta_bytes(uint64_t bytes) { disk_.meta_bytes = bytes; }
  // Packs what a commit that is about to begin would name, so that it leaves room for what comes after it, and more where
  // it is to be kept. False where it cannot.
  bool shrink_for_commit(bool is_to_be_kept);
  // The limit that so many rows need, that the last commit's files leave enough of, and that keeping the present state needs.
  uint64_t disk_needed(uint64_t stored_rows) const;
  uint64_t disk_needed_with(const LogMemory& memory, uint64_t stored_rows) const;
  uint64_t disk_needed_now() const;
  uint64_t disk_needed_to_keep() const;
  // Of segments that no kept commit holds, with what is open and dirty.
  uint64_t log_bytes() const;
  // A directory checkpoint of so many rows takes no more; see checkpoint.h.
  static uint64_t checkpoint_estimate(uint64_t rows) { return 16 * rows + (64u << 10); }
  static uint64_t disk_slack(uint64_t segment_bytes, const LogMemory& memory);
  // How many rows would be stored with these, where that is more than the limit allows; else 0. Where one of them is new,
  // `above` others count too, as far as there are `most` rows in all.
  uint64_t rows_beyond_disk(const int64_t* rows, size_t n, size_t above = 0, uint64_t most = ~uint64_t{0}) const;

  size_t frame_bytes() const { return frame_bytes_; }
  size_t dirty_rows() const { return dirty_rows_ + frozen_rows_; }  // not in the log
  size_t ram_bytes() const;
  const MemoryPlan& plan() const { return plan_; }
  const StoreStats& stats() const { return stats_; }
  const Compactor& compactor() const { return compactor_; }
  Cache& cache() { return cache_; }
  Directory& directory() { return *directory_; }
  Log* log() { return log_.get(); }

 private:
  uint64_t touch_distinct(const int64_t* rows, size_t n, uint32_t* frames, bool touch);
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
  std::vector<int64_t> absent_of(const int64_t* rows, size_t n) const;
  void make_room_for_rows(const int64_t* rows, size_t n);
  void shrink_to(size_t capacity);

  uint64_t slack() const;
  uint64_t slack_in_use() const;
  uint64_t segment_overhead() const;
  uint64_t written_bytes(uint64_t rows) const;
  uint64_t packed_bytes(uint64_t rows) const;
  uint64_t fixed_bytes(uint64_t stored_rows) const;
  uint64_t most_rows() const;
  uint64_t commit_bytes() const;
  uint64_t reserved_rows() const { return dirty_rows() + disk_.held_rows + disk_.admitted; }
  uint64_t reserved_bytes() const { return written_bytes(reserved_rows()) + slack_in_use(); }
  bool fits_disk(size_t rows, uint64_t borrowed = 0) const;
  bool pack_until(const std::function<bool()>& is_enough, const Compactor::MayEmpty& among);
  size_t rows_to_dirty(const int64_t* rows, size_t n) const;
  struct Fetched;
  void fetch(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records, Fetched* counts);

  const std::string name_;
  const size_t frame_bytes_;
  MemoryPlan plan_;
  std::unique_ptr<Directory> directory_;
  Cache cache_;
  std::unique_ptr<Log> log_;
  Compactor compactor_;
  InitialRecord initial_;
  size_t dirty_rows_ = 0;
  size_t frozen_rows_ = 0;
  uint32_t next_to_write_ = 0;  // the frame where write_frozen() goes on
  uint32_t next_dirty_ = 0;     // the frame where write_dirty() goes on
  uint64_t commit_debt_ = 0;    // as compaction_debt_, for what the commit under way appended
  bool has_pins_ = false;  // between a pin() that pinned and its unpin()
  size_t frames_staging_ = 0;  // pinned between begin_staging() and end_staging()
  Window window_;
  size_t window_bytes_ = 0;  // set aside for the window and the cache's list of uses
  std::vector<int64_t> rows_;   // scratch of finish()
  std::vector<Entry> entries_;  // and of expect()
  void count_compaction_debt();
  uint64_t appended_seen_ = 0;  // records in the log when compaction last ran
  uint64_t compaction_debt_ = 0;  // records to look at for what was appended since
  bool is_compacting_beside_ = false;
  struct Disk {
    uint64_t limit = 0;
    size_t commits = 1;
    uint64_t num_rows = ~uint64_t{0};
    std::set<uint64_t> kept;        // segments of kept commits
    uint64_t kept_bytes = 0;
    uint64_t other_bytes = 0;       // files of commits that are not segments
    uint64_t checkpoint_bytes = 0;  // those that are in no commit yet
    uint64_t meta_bytes = 0;        // of a commit's manifest
    size_t held_rows = 0;
    size_t admitted = 0;            // rows that the change under way may make dirty
    bool may_borrow = false;        // the next change may take a segment's bytes of the slack
  } disk_;
  StoreStats stats_;
};

}  // namespace bunkbed
