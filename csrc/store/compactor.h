// Moves live records out of the emptiest segments, so that the log stays about two thirds live.
//
// 1. When the log holds more dead bytes than it should, take the sealed segment with the smallest live part.
// 2. For each of its records, in order: is it still the newest of its row (the directory or a clean frame points
//    at exactly this place)? Then append it again, with the version it had, and point there.
// 3. A segment without live records leaves the log; its file goes at once if no commit names it, otherwise with
//    that commit.
//
// The number of segments is bounded too. A commit leaves at least one segment, however few rows it holds. A tier is the
// segments whose live bytes are within a factor of 4 of each other: the first tier ends at 32 KiB, the last one holds
// those of about a segment's full size. There are 4 tiers for segments of 1 MiB and 8 for 256 MiB.
//
// 4. A table has at most  2 * bytes / segment_bytes + 4 * tiers  segments. When it has more, the lowest tier with four or
//    more is merged: the smallest ones, up to a segment's bytes in all, are emptied as in step 2.
// 5. A merge is finished within one epoch where it can be: its records are then in one segment, of a higher tier. So a
//    record is moved at most once in each tier. The work after a commit is on average in proportion to what the commit
//    appended, and at most two segments' bytes.
//
// Versions, not places, decide which record of a row wins when a directory is rebuilt; a moved record keeps its
// version, so a move can never outrank a newer record that was appended before it.
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

// Compaction begins where the records of all stored rows, of those that are dirty in RAM too, are less than this part of
// the log.
inline constexpr double kTargetLive = 0.65;
// A fuller segment gives back too little for the copying.
inline constexpr double kWorthMoving = 0.9;
// Dead bytes that are left alone however small the table; tests of small tables lower it.
inline std::atomic<uint64_t> compaction_slack_bytes{256u << 10};

class Compactor {
 public:
  Compactor(Directory* directory, Cache* cache, Log* log) : directory_(directory), cache_(cache), log_(log) {}

  // Does at least `records` records' worth of looking when there is need; less when there is none.
  void run(size_t records, size_t buffer_bytes);

  // The same beside other calls, without the table's lock while it reads:
  //   1. plan_read(), under the lock: what must be read before the next run() goes on without reading; false when there
  //      is nothing to compact. The compactor's buffer goes with it, so run() waits for step 3.
  //   2. execute(), anywhere. The chosen segment is sealed, and stays: only compaction lets go of it.
  //   3. take_read(), under the lock.
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
  // Looks at up to `records` of them without reading any more, if that was all; returns how many.
  size_t look_on(size_t records, size_t buffer_bytes) { return segment_ == 0 ? 0 : look(records, buffer_bytes); }
  bool is_needed() const;
  // Segments of a log of so many bytes, those of a commit under way not counted.
  static uint64_t most_segments(uint64_t bytes, uint64_t segment_bytes);
  // Chooses the segments to merge when there are too many; returns how many records must be looked at for that. The store
  // calls it where records were appended: a scan depends on it that nothing moves otherwise (CompactionScheduler::forgive).
  uint64_t begin_merge();
  // All merges that are due, now.
  void merge(size_t buffer_bytes);
  // Segments that durable commits name, and their bytes; their files stay when their last record is dead.
  void set_named_segments(std::map<uint64_t, uint64_t> named) { named_ = std::move(named); }
  void add_named_segments(const std::set<uint64_t>& more);
  void drop_dead_segments();
  // Bytes of segments that are named and no longer in the log.
  uint64_t named_bytes() const;

  // Which segments may be emptied; without, all of them.
  using MayEmpty = std::function<bool(const Segment& segment, bool is_named)>;
  void set_may_empty(MayEmpty may_empty) { may_empty_ = std::move(may_empty); }
  // Empties segments, now and whether or not there is need, until `is_enough`: the emptiest of those that `among` holds
  // first; false when none is left that would give anything back.
  bool empty_until(const std::function<bool()>& is_enough, const MayEmpty& among, size_t buffer_bytes);

  uint64_t segments_compacted() const { return segments_compacted_; }
  uint64_t records_moved() const { return records_moved_; }
  uint64_t total_bytes() const;
  uint64_t live_bytes() const;
  uint64_t settled_bytes() const;

 private:
  bool has_too_many_bytes() const;
  bool has_too_many_segments() const;
  bool may_choose(const Segment& segment) const;
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
  std::set<uint64_t> damaged_;  // segments that could not be read; left alone
  std::vector<uint64_t> merging_;  // segments of the merge under way that are still to be chosen

  uint64_t segment_ = 0;  // 0: none chosen
  std::vector<ChunkTrailer> chunks_;
  size_t chunk_ = 0;
  size_t record_ = 0;
  std::vector<int64_t> ids_;
  std::vector<uint64_t> versions_;
  Span span_;

  uint64_t segments_compacted_ = 0;
  uint64_t records_moved_ = 0;
};

}  // namespace bunkbed
