// Moves live records out of the emptiest segments, so that the log stays about two thirds live.
//
// 1. When the log holds more dead bytes than it should, take the sealed segment with the smallest live part.
// 2. A record is live when the directory or a clean frame points at its position. Each live record of the segment, in
//    order, is appended again with its version, and the directory or the frame then points at the new position.
// 3. A segment without live records leaves the log. Its file is removed at once if no commit names it, otherwise with
//    that commit.
//
// The number of segments is bounded too, because each commit adds at least one segment, however few rows it holds. A
// tier is the segments whose live bytes are within a factor of 4 of each other. The first tier ends at 32 KiB; the last
// one has the segments that are nearly full. There are 4 tiers for segments of 1 MiB and 8 for 256 MiB.
//
// 4. A table has at most 2 * bytes / segment_bytes + 4 * tiers segments. When it has more, the lowest tier with four or
//    more segments is merged: its smallest segments, up to a segment's bytes in all, are emptied as in step 2.
// 5. A merge that ends within one epoch puts its records into one segment of a higher tier. So a record is moved at
//    most once in each tier. The work after a commit is on average in proportion to the bytes that the commit appended,
//    and at most two segments' bytes.
//
// Tombstones stay as long as a record of their row may be in the log, because replay would find that record. Whether
// there is one is not known for each tombstone, so they are dropped together:
//
// 6. When tombstones take an eighth of the bytes of the records, a purge begins. It notes the next version V and the
//    segments that have a dead record. Every dead record of a row that was deleted before is in one of these. They are
//    emptied as in step 2; tombstones in them are appended again with their versions.
// 7. Once these segments are gone, no tombstone below V has a record in the log. Segments with such tombstones are then
//    emptied, and these tombstones are not appended again. keep_tombstones() says which ones must stay nevertheless.
// A tombstone of a row that was stored again is dropped at any time: the row's record has a higher version. One of a
// row with a count stays: a sweep may make the count none without an entry in the log.
//
// A count of a row that is not stored is moved while the directory has the same count. Of the others, which are dead, a
// purge leaves none in the log either, since a deleted row begins without a count. Which counts are dead is not known
// for each segment:
//
// 9. When the counts in the log are more than twice the counts of the directory, all segments that have some are
//    emptied once, the oldest first. So a count is moved less than once for each count that is appended.
//
// Training leaves dead records all the time, so a log has room for some. Deleted rows leave theirs once:
//
// 8. A delete sets the ratio of dead to live bytes that the log had before it as the goal. Every four bytes that are
//    appended later, but by compaction, raise the dead bytes of the goal by one, until step 1 allows as many. So the
//    disk that rows leave is free soon, and for a while compaction moves more records than it would later. It stops
//    where segments are nearly full.
//
// Rebuilding a directory takes the record with the highest version of each row, wherever the record is. A moved record
// keeps its version, so it cannot replace a newer record that was appended before the move.
// Requires the table's lock for every call but execute() and most_segments().
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "cache/cache.h"
#include "directory/directory.h"
#include "log/log.h"

namespace bunkbed {

// Compaction starts when the records of all stored rows, dirty ones included, are less than this part of the log.
inline constexpr double kTargetLive = 0.65;
// Emptying a segment with a larger live part would free too little space for the bytes that it copies.
inline constexpr double kWorthMoving = 0.9;
// The part of the bytes appended after a delete that raises the goal.
inline constexpr double kGoalRise = 0.25;
// A purge of tombstones begins when these take more than this part of the records' bytes.
inline constexpr double kMostTombstones = 0.125;
// Dead bytes that never start compaction, however small the table is. Tests of small tables lower it.
inline std::atomic<uint64_t> compaction_slack_bytes{256u << 10};

class Compactor {
 public:
  Compactor(Directory* directory, Cache* cache, Log* log) : directory_(directory), cache_(cache), log_(log) {}

  // Examines at least `records` records, fewer when no more compaction is needed.
  void run(size_t records, size_t buffer_bytes);

  // The same while other calls run, with reads that do not hold the table's lock:
  //   1. plan_read(), under the lock, plans the read that the next look_on() needs. Returns false when there is nothing
  //      to compact. The compactor's buffer moves into `read`, so run() must not be called before step 3.
  //   2. execute() reads, without the lock. The chosen segment is sealed, and only compaction removes it.
  //   3. take_read(), under the lock, gives the result to the compactor.
  struct Read {
    const Segment* segment = nullptr;  // null: nothing to read
    bool wants_chunks = false;
    uint64_t begin = 0;
    size_t bytes = 0;
    std::vector<ChunkTrailer> chunks;
    Span span;
    uint64_t read_bytes = 0;
    bool failed = false;
  };
  bool plan_read(size_t buffer_bytes, Read* read);
  void execute(Read* read) const;
  void take_read(Read read);
  // Examines up to `records` records of the chosen segment, from the read that was taken. Returns how many.
  size_t look_on(size_t records, size_t buffer_bytes) { return segment_ == 0 ? 0 : look(records, buffer_bytes); }
  bool is_needed() const;
  // The most segments of a log of so many bytes, without those of a commit under way.
  static uint64_t most_segments(uint64_t bytes, uint64_t segment_bytes);
  // Chooses the segments to merge when there are too many. Returns how many records the merge must examine. Called only
  // after appends, because a scan needs that no record moves otherwise (CompactionScheduler::forgive).
  uint64_t begin_merge();
  // Makes all merges that are due.
  void merge(size_t buffer_bytes);
  // The segments that durable commits name, and their bytes. Their files stay when their last record is dead.
  void set_named_segments(std::map<uint64_t, uint64_t> named) { named_ = std::move(named); }
  // Names segments in addition to those named before.
  void add_named_segments(const std::set<uint64_t>& more);
  void drop_dead_segments();
  // Bytes of segments that are named and no longer in the log.
  uint64_t named_bytes() const;

  // Decides which segments may be emptied. Without it, all may.
  using MayEmpty = std::function<bool(const Segment& segment, bool is_named)>;
  void set_may_empty(MayEmpty may_empty) { may_empty_ = std::move(may_empty); }
  // Empties segments that `among` accepts, the emptiest first, until `is_enough()`, even if is_needed() is false.
  // Returns false when emptying the others would free nothing.
  bool empty_until(const std::function<bool()>& is_enough, const MayEmpty& among, size_t buffer_bytes);

  // Tombstones that must stay: those in segments of epoch `epoch` and later, and those of version `version` and higher.
  struct KeptTombstones {
    uint64_t epoch = ~uint64_t{0};
    uint64_t version = ~uint64_t{0};
  };
  void set_kept_tombstones(std::function<KeptTombstones()> kept) { kept_tombstones_ = std::move(kept); }
  // The log has every tombstone from this version on; 0: no row was ever deleted.
  uint64_t deletions_from() const { return deletions_from_; }
  void set_deletions_from(uint64_t version) { deletions_from_ = version; }
  uint64_t tombstones() const;
  uint64_t counts() const;  // in the log

  uint64_t segments_compacted() const { return segments_compacted_; }
  uint64_t records_moved() const { return records_moved_; }
  uint64_t total_bytes() const;
  uint64_t live_bytes() const;
  uint64_t settled_bytes() const;
  // Before rows are deleted: see step 8.
  void set_goal();

 private:
  bool has_too_many_bytes() const;
  bool has_too_many_segments() const;
  bool may_choose(const Segment& segment) const;
  bool has_too_many_tombstones() const;
  bool has_too_many_counts() const;
  double goal_bytes() const;
  const Segment* pick_for_purge();
  const Segment* pick_for_counts();
  void append_kept_tombstones(const Segment& segment);
  void append_live_counts();
  void choose_merge();
  bool begin(const Segment* segment);
  bool pick(const MayEmpty* among = nullptr);
  bool choose(const MayEmpty* among = nullptr);
  template <typename Call>
  bool read_or_set_aside(Call&& call);
  size_t look(size_t n, size_t buffer_bytes);

  Directory* directory_;
  Cache* cache_;
  Log* log_;
  std::map<uint64_t, uint64_t> named_;
  MayEmpty may_empty_;
  std::function<KeptTombstones()> kept_tombstones_;
  uint64_t deletions_from_ = 0;
  double goal_ = 1e300;  // dead / settled bytes, when so many records had been appended, but by compaction
  uint64_t goal_appended_ = 0;
  std::set<uint64_t> purging_;     // segments that the purge under way must empty
  uint64_t purge_version_ = 0;     // V of the purge under way, 0: none
  uint64_t purged_version_ = 0;    // V of the last purge that ended
  uint64_t counts_round_ = 0;      // segments below it are emptied by the round of step 9 under way, 0: none
  uint64_t counts_left_ = 0;       // counts that the last round left in the log
  std::set<uint64_t> damaged_;     // segments that could not be read; never chosen again
  std::vector<uint64_t> merging_;  // segments of the merge under way that are still to be chosen

  uint64_t segment_ = 0;  // 0: none chosen
  std::vector<ChunkTrailer> chunks_;
  size_t chunk_ = 0;
  size_t record_ = 0;
  std::vector<int64_t> ids_;
  std::vector<uint64_t> versions_;
  std::vector<uint64_t> counts_;
  Span span_;

  uint64_t segments_compacted_ = 0;
  uint64_t records_moved_ = 0;
};

}  // namespace bunkbed
