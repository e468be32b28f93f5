// The change feed: the rows that changed between two commits of a table, each once, with its newest values, and the ids
// of the rows that were deleted. Reads only files; the writer goes on meanwhile.
//
// How the changes are found. Versions increase over the table's life, and a commit's manifest names the next one. So a
// record or tombstone is newer than commit N when its version is at or above that of N's manifest. All of these are in
// segments of later epochs than N, because a commit seals its segments. The newest of a row is the one with the highest
// version. So only the indexes of these segments are read, and the records that are given out. They also have records
// that compaction moved; their versions are lower, and they are skipped.
//
// Tombstones are dropped at some time (store/compactor.h, step 7). The manifest says from which version on all are
// there. Reading the changes since an older commit is an error, and so is reading those since a commit that the table
// went back from: the rows that changed after such a commit are not all newer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "commit/cursors.h"
#include "format/format.h"
#include "log/log.h"
#include "vfs/vfs.h"

namespace bunkbed {

class Changes {
 public:
  // `since`: the commit that the caller has, epoch 0 for none; without its next_version (0), its manifest must exist.
  // Of one that is new, every row is given, and what was deleted since it came, because it may have some rows. `to`:
  // the commit to read, the newest without it. `ram_bytes` bounds the memory for ids and versions: with more changes,
  // the indexes are read several times. `advice` ends the error where the changes since then are not known.
  Changes(vfs::Vfs& vfs, std::string directory, const std::string& name, Cursor since, std::optional<uint64_t> to,
          size_t ram_bytes, std::string advice = {});
  Changes(const Changes&) = delete;
  Changes& operator=(const Changes&) = delete;

  const Manifest& commit() const { return commit_; }
  // The consumer's cursor once it has every change.
  Cursor cursor() const { return {commit_.epoch, commit_.next_version}; }

  // The next changes: at most n rows with their weights, or at most n ids of deleted rows. Ids: int64[n]; weights:
  // float32[n, dim]. Both counts are 0 when all were given. No id occurs twice.
  struct Found {
    size_t rows = 0;
    size_t deleted = 0;
  };
  Found next(size_t n, int64_t* ids, float* weights, int64_t* deleted);

 private:
  struct Place {
    int64_t id;
    uint64_t version;
    uint64_t position;  // kDeleted: a tombstone
  };
  Cursor checked(Cursor since) const;
  uint64_t version_of(uint64_t epoch) const;
  void open_segments();
  void collect_pass();
  size_t read_rows(size_t n, int64_t* ids, float* weights);

  vfs::Vfs& vfs_;
  const std::string directory_;
  const std::string name_;
  const std::string advice_;
  Manifest commit_;
  Cursor since_;                // epoch 0: everything is given
  uint64_t deleted_since_ = 0;  // tombstones below it are not given
  std::unique_ptr<Log> log_;
  std::vector<Segment*> segments_;  // of epochs after `since`, by number
  uint64_t passes_ = 1;
  uint64_t pass_ = 0;          // the next one
  std::vector<Place> places_;  // the rows of this pass, by position
  size_t next_place_ = 0;
  std::vector<int64_t> deleted_;  // the deleted rows of this pass
  size_t next_deleted_ = 0;
  size_t segment_ = 0, chunk_ = 0;  // of the next row
  Span span_;
  std::vector<int64_t> ids_;
  std::vector<uint64_t> versions_;
};

}  // namespace bunkbed
