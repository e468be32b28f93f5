// Fills a directory from the chunk indexes of all segments, or applies later segments to a directory of an earlier
// state of the table. For each id the record with the highest version wins (docs/design/engine.md, rule 12).
//
// Why the versions of the directory's own records are not needed. Let the directory be correct for the moment when
// commit e was settled, and let `later` be the segments that e does not name and that were appended to after that
// moment. For each id in these segments, every record there has a version at least that of the record r that the
// directory points to:
//   - Records made by updates (evictions, flushes, the records of a commit) take the stream's next version. The stream
//     of epoch e + 1 begins above every version of e, including the versions reserved for records that e still lacked
//     when it was settled (Log::begin_next_epoch). Those records go to segments that e names, however late they are
//     written and whatever the number of their segment.
//   - Compaction appends a record with the version it had, and only while the directory points at it. At that time the
//     row's current record was r or a newer one. A row whose record is only in RAM (dirty, or frozen by a commit) has
//     no current record in the log, so compaction moves no record of it.
//   - A failed commit leaves its records to the next one. They were appended after e was settled; the same holds.
//   - drop() ends an epoch without the records evicted since the last commit. Their segments have the epoch of the
//     commit that does not name them; later commits name them. So "later" means: not named by e, and not older than e.
// So replayed records are compared only with each other, and each replaces the old entry. An equal version means the
// same record, moved: the old position may be gone, the new one exists.
//
// A count has a version of the stream, too, as it is appended by an update (Counts::write). Compaction moves one
// only while the directory has the same count: then the row is absent, and its newest entry in the log says the same.
// With a tombstone of a row that has a count it appends the count, too, with a new version.
// A reader skips all counts. So does a rule: such a count of a row is newer than its other entries that remain.
//
// The order within `later` proves nothing: while a commit is written during training, records of the ending epoch and
// of the next one are appended at the same time, and a newer record may be in the segment with the lower number.
//
// Threads read the indexes of chunks and put what these say of each id into buckets, which are groups of the
// directory's parts. Then each bucket is one thread's: it keeps the newest of each id and enters it. So a thread works
// in a small part of the directory, and no two in the same one. Of records with equal versions the one with the lower
// position stays, so the result does not depend on threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "directory/directory.h"
#include "log/log.h"

namespace bunkbed {

class SegmentFinder;

struct Replay {
  Log* log;
  Directory* directory;
  int64_t num_rows;       // < 0: any non-negative id
  uint64_t versions_end;  // versions at or above it are damage
  size_t scratch_bytes;   // bounds the memory for what is read: more records than fit take several passes over them
  CountRule counts = {};
  // For a directory in use, which then one thread changes. It may have frames.
  struct InUse {
    // Called with ids before they are set; some may be new to the directory.
    std::function<void(const int64_t* ids, size_t n)> reserve;
    // Called with each entry of a stored row that a replayed one replaces.
    std::function<void(Entry before)> give_up;
  };
  const InUse* in_use = nullptr;

  struct Result {
    uint64_t entries = 0;  // records, tombstones and counts in the segments
    uint64_t lost = 0;     // replaced positions in segments that the log does not have; none where it is in use
  };
  // Replays the segments and counts their records and live records from zero. An exception leaves the directory partly
  // changed, or empty.
  Result run(const std::vector<Segment*>& segments) const;
  // Replays all segments of the log into an empty directory.
  Result run_all() const;

 private:
  struct Chunk;
  struct Reader;
  struct Writer;
  std::vector<Chunk> find_chunks(const std::vector<Segment*>& segments, size_t threads) const;
  void read(Chunk* chunk, size_t pass, size_t passes, Reader* reader) const;
  void enter_bucket(size_t bucket, const std::vector<std::unique_ptr<Reader>>& readers, const SegmentFinder& finder,
                    Writer* writer) const;
  void enter(const Writer& writer, std::vector<Entry>* entries) const;
};

// Throws Error(kCorruption) for an id or a version that the commit cannot have, or a count that is none. `counts` is
// empty where the chunk has none.
void check_index(const Segment& segment, const ChunkTrailer& chunk, const std::vector<int64_t>& ids,
                 const std::vector<uint64_t>& versions, const std::vector<uint64_t>& counts, int64_t num_rows,
                 uint64_t versions_end);

}  // namespace bunkbed
