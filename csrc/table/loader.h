// Makes the store: of a new table in RAM, of a commit that is opened, and of a newer commit that a reader moves to.
// refresh() takes the lock. All others require the lock of exclusive(), unless the table is not handed out yet.
//
// A reader moves from its commit to another, mostly the newest one, as follows:
//   1. That commit must follow from the reader's: same table, a later epoch, numbers that only grew. Each segment
//      that both name must be the same file with the same length. Each other segment must not be older than the
//      reader's epoch.
//   2. The new segments are replayed over the directory (directory/replay.h): O(changed rows). Frames of rows that have
//      a new record are released, even when the record was only moved, because the versions of frames are not known.
//   3. The segments that the commit does not name must have no live record, and the number of rows must be
//      right.
//
// When 1 or 3 does not hold, the directory is built again from all segments. Reasons: a rewind, a run that took back a
// commit that it had not named, files that were replaced. When 1 and 3 hold, the result is correct. An id without a new
// record points to a file that the commit names, and its record has the highest version in the segments that are
// not new. An id with a new record points to the new record with the highest version. It was appended when all common
// segments were in the log, so its version is the highest of all (directory/replay.h). If a segment number is used
// twice because files were replaced, comparing the files detects it.
#pragma once

#include <memory>

#include "format/format.h"
#include "jobs/disk_room.h"
#include "jobs/file_collector.h"
#include "jobs/index_snapshots.h"
#include "jobs/prefetcher.h"
#include "state/device_link.h"
#include "state/table_state.h"

namespace bunkbed {

class Loader {
 public:
  Loader(TableState& table, DeviceLink& device, IndexSnapshots& index, FileCollector& collector, Prefetcher& prefetcher,
         DiskRoom& disk)
      : table_(table), device_(device), index_(index), collector_(collector), prefetcher_(prefetcher), disk_(disk) {}
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Makes the state of a new table in RAM.
  void start_in_ram(const Uuid& uuid) REQUIRES(table_.lock);
  // Makes a store without rows and without files.
  void make_store_in_ram() REQUIRES(table_.lock);
  // Makes the state of a commit.
  void load(const Manifest& manifest) REQUIRES(table_.lock);
  // For opening, after load(): checks the disk limit and merges segments.
  void finish_opening() REQUIRES(table_.lock);
  // Destroys the store. The table has no store until another one is made.
  void drop_store() REQUIRES(table_.lock);
  uint64_t refresh(std::optional<uint64_t> to);

 private:
  std::unique_ptr<Directory> make_directory(const MemoryPlan& plan, size_t frame_bytes) const;
  void make_store(const MemoryPlan& plan, std::unique_ptr<Log> log) REQUIRES(table_.lock);
  void remove_leftovers() REQUIRES(table_.lock);
  bool replay_onto(const Manifest& newest) REQUIRES(table_.lock);
  Manifest commit_to_follow(std::optional<uint64_t> to) const REQUIRES(table_.lock);

  TableState& table_;
  DeviceLink& device_;
  IndexSnapshots& index_;
  FileCollector& collector_;
  Prefetcher& prefetcher_;
  DiskRoom& disk_;
};

}  // namespace bunkbed
