// Directory checkpoints: files that say where the rows are, so that opening a large table need not read the index of
// every chunk.
//
// One is *fuzzy*: it is taken while the table changes, part by part. Let X be the oldest epoch that still takes appends
// when the walk begins. For each row the walk writes the position it finds, if that lies in a segment of an epoch before
// X, and otherwise nothing (the row's record lies in a segment of X or later, or in RAM alone and will). Opening a commit
// that was settled after the walk's end reads these entries and replays the segments of epoch X and later over them. That
// gives the commit's directory:
//   - A row whose record lies in such a segment is replayed, and a replayed record beats the entry: whatever was appended
//     since X began has a version at least that of what was the row's record then (replay.h).
//   - A row whose record lies in an older segment has had it ever since X began, for all that was appended since went to X
//     or later. So the walk found exactly that position; the row was not dirty either, or it would have been appended.
//   - An entry may point into a segment that is gone: the row has moved or changed since, and a replay beats it. After the
//     replay none may be left.
// It stays true for later commits, for those that go back to it (their new segments have later epochs still), and for those
// a release makes that knows nothing of it. Entries point at nothing but what a commit has made durable or the next one,
// which is the first to name the file, will; and the file is durable before that commit's manifest is written.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "directory/directory_file.h"
#include "log/log.h"
#include "vfs/vfs.h"

namespace bunkbed {

// Writes one, in a bounded buffer, under a temporary name until it is whole.
class CheckpointFile {
 public:
  // `header`: what is known at the beginning: form, uuid, number, replay_epoch, piece_bytes; of a dense one num_entries.
  CheckpointFile(vfs::Vfs& vfs, const std::string& directory, const DirectoryHeader& header,
                 const std::vector<SegmentCounts>& segments);
  ~CheckpointFile();
  CheckpointFile(const CheckpointFile&) = delete;
  CheckpointFile& operator=(const CheckpointFile&) = delete;
  // In the order of the rows where the form is dense.
  void add(const int64_t* rows, const Entry* entries, size_t n);
  // Durable under its name when it returns.
  CheckpointEntry finish();

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
  uint64_t next_row_ = 0;    // of a dense one
  uint64_t pairs_ = 0;
};

// A file that says nothing in the place of one that is damaged or missing.
void write_void_checkpoint(vfs::Vfs& vfs, const std::string& directory, const Uuid& uuid, uint64_t number);

struct LoadedCheckpoint {
  bool is_loaded = false;     // false: it says nothing, or nothing this release can read; nothing was changed
  uint64_t replay_epoch = 0;
  uint64_t lost = 0;          // entries into segments the log does not have: as many must be replayed over
};

// Fills an empty directory, and counts the records of the log's segments of earlier epochs; on several threads, in about
// `scratch_bytes`. Error(kCorruption) that says what to do.
LoadedCheckpoint load_checkpoint(vfs::Vfs& vfs, const std::string& directory, const CheckpointEntry& entry, Log* log,
                                 Directory* rows, int64_t num_rows, uint64_t stored_rows, size_t scratch_bytes);

// The same reading without a table: verifies every byte. `at` is called with each number of bytes done.
void verify_checkpoint(vfs::Vfs& vfs, const std::string& directory, const CheckpointEntry& entry, const Uuid& uuid,
                       int64_t num_rows, const std::function<void(uint64_t)>& at);

}  // namespace bunkbed
