// Index snapshots: files that say where the rows are, so that opening a large table need not read the index of
// every chunk.
//
// An index snapshot is *fuzzy*: a walk takes it part by part while the table changes. Let X be the oldest epoch that
// still takes appends when the walk begins. For each row the walk writes the position that it finds, if the position is
// in a segment of an epoch before X, and otherwise nothing (the record is in a segment of X or later, or is only in RAM
// and will be appended there). Opening a commit that was settled after the walk ended reads these entries and replays
// the segments of epoch X and later over them. The result is the commit's directory:
//   - A row whose record is in epoch X or later is replayed. The replayed record replaces the entry: each record that
//     was appended since X began has a version at least that of the row's record at that moment (replay.h).
//   - A row whose record is in an earlier epoch has had this record since X began, as all later appends went to X or
//     later. So the walk found exactly this position. The row was not dirty, or it would have been appended.
//   - An entry may point into a removed segment. The row has then moved or changed since, and a replayed record
//     replaces the entry. After the replay no such entry may be left.
//   - A count is written as the walk finds it: it says itself what it is. Where it was appended before X began, no
//   later
//     append replaces it unless it is replayed. Otherwise it, or a newer entry of its row, is replayed.
// This also holds for later commits, for commits after a rewind (their new segments have still later epochs), and for
// commits by a release that does not know index snapshots. Entries point only at records that are durable, or that the
// next commit makes durable; it is the first to name the file. The file is durable before that commit's manifest is
// written.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "directory/directory_file.h"
#include "log/log.h"
#include "vfs/vfs.h"

namespace bunkbed {

// Writes an index snapshot through a bounded buffer, under a temporary name until finish().
class IndexSnapshotFile {
 public:
  // `header` has form, uuid, number, replay_epoch and piece_bytes; for a dense file also num_entries.
  IndexSnapshotFile(vfs::Vfs& vfs, const std::string& directory, const DirectoryHeader& header,
                    const std::vector<SegmentCounts>& segments);
  ~IndexSnapshotFile();
  IndexSnapshotFile(const IndexSnapshotFile&) = delete;
  IndexSnapshotFile& operator=(const IndexSnapshotFile&) = delete;
  // A dense file takes its rows in ascending order.
  void add(const int64_t* rows, const Entry* entries, size_t n);
  // The file is durable under its name on return.
  IndexSnapshotEntry finish();

 private:
  void write_segments(const std::vector<SegmentCounts>& segments);
  void remove_temporary();
  void write_piece();
  void add_absent(uint64_t before_row);

  vfs::Vfs& vfs_;
  const std::string directory_;
  const std::string temporary_;
  DirectoryHeader header_;
  std::shared_ptr<vfs::File> file_;
  vfs::Buffer piece_;
  const uint64_t capacity_;  // entries of a piece
  uint32_t count_ = 0;       // entries in the piece so far
  uint64_t piece_index_ = 0;
  uint64_t next_row_ = 0;  // of a dense file
  uint64_t pairs_ = 0;
};

// Replaces a damaged or missing index snapshot by a file without entries.
void write_void_index_snapshot(vfs::Vfs& vfs, const std::string& directory, const Uuid& uuid, uint64_t number);

struct LoadedIndexSnapshot {
  bool is_loaded = false;  // false: the file is void, or its format is unknown; nothing was changed
  uint64_t replay_epoch = 0;
  uint64_t lost = 0;  // entries into segments that the log lacks: the replay must replace as many
};

// Fills an empty directory on several threads, in about `scratch_bytes`, and sets the record counts of the log's
// segments before the replay epoch. Error(kCorruption) names the repair.
LoadedIndexSnapshot load_index_snapshot(vfs::Vfs& vfs, const std::string& directory, const IndexSnapshotEntry& entry,
                                        Log* log, Directory* rows, int64_t num_rows, uint64_t most_rows,
                                        size_t scratch_bytes, const CountRule& counts = {});

// Verifies every byte of an index snapshot without a table. Calls `at` with the number of bytes of each part that is
// done.
void verify_index_snapshot(vfs::Vfs& vfs, const std::string& directory, const IndexSnapshotEntry& entry,
                           const Uuid& uuid, int64_t num_rows, const std::function<void(uint64_t)>& at);

}  // namespace bunkbed
