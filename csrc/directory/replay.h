// Fills a directory from the chunk indexes of segments: of all of them, or of the later ones over a directory that is
// true as of an earlier state of the table. For each id the record with the highest version wins (docs/design/engine.md,
// rule 12).
//
// Why versions of what the directory already holds are not needed. Let it be true as of the moment when commit e was
// settled, and let `later` be segments that e does not name and that were appended to after that moment. For each id in
// them, every record there has a version at least that of the record r which the directory points to:
//   - Records that updates made (evictions, flushes, what a commit appends) take the stream's next version. The stream of
//     epoch e + 1 begins above every version of e, those included that were set aside for records which e still lacked
//     when it was settled (Log::begin_next_epoch). Those records go to segments that e names, beside training or not:
//     their place is e's, however late they are written and whatever the number of their segment.
//   - Compaction appends a record with the version it had, and only while the directory points at it. At that time the
//     row's current record was r or a newer one. A row whose record is only in RAM (dirty, or frozen by a commit) has no
//     current record in the log, and nothing of it is moved.
//   - A commit that failed leaves its records to the next one. They were appended after e was settled; the same holds.
//   - drop() ends an epoch without taking in what was evicted since the last commit: those segments have the epoch of the
//     commit that names them not, and later commits name them. So "later" is: not named by e, and not older than e.
// So replayed records are compared among themselves, and each of them takes the old entry's place. An equal version means
// the same record, moved: the old place may be gone, the new one is there.
//
// Order within `later` proves nothing: while a commit is written beside training, records of the epoch that ends and of
// the next one are appended at once, and a newer record may lie in the segment with the lower number.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "directory/directory.h"
#include "log/log.h"

namespace bunkbed {

struct Replay {
  Log* log;
  Directory* directory;
  int64_t num_rows;       // < 0: any non-negative id
  uint64_t versions_end;  // versions at or above it are damage
  size_t scratch_bytes;   // bounds the memory for versions: more rows than fit take several passes over the indexes
  // These ids come next; some may be new to the directory. Null: it grows as it must.
  std::function<void(const int64_t* ids, size_t n)> reserve;
  // A replayed record takes this entry's place. Null: entries are positions in `log`, which count as live there.
  std::function<void(Entry before)> give_up;

  // Counts the segments' records and live records anew; returns how many records and tombstones it looked at. What it
  // throws leaves the directory half way.
  uint64_t run(const std::vector<Segment*>& segments) const;
  // Over all segments of the log and an empty directory.
  uint64_t run_all() const;
};

}  // namespace bunkbed
