// Makes the rows of a table available: the store of a new table in RAM, of a commit that is opened, and of a newer commit that
// a reader moves to. Requires the table's lock for every call but refresh(), unless the table is not handed out yet.
//
// A reader moves to the newest commit, as seen from the commit that it is at, as follows:
//   1. The newest commit must follow from it: same table, a later epoch, numbers that only grew; every segment that both name
//      is still the same file, at the same length; every other one is no older than the reader's epoch.
//   2. Its new segments are replayed over the directory (directory/replay.h): O(changed rows). Frames of rows that have a new
//      record are released, even when the record was only moved: their versions are not known.
//   3. Nothing may be left in the segments that it no longer names, and the rows must be as many as it says.
//
// When 1 or 3 does not hold - the table went back to an earlier commit, a run took back a commit that it had not named, other
// files were put there - the directory is built from all segments. What these checks do not detect is correct: an id without a
// new record points into a file that the newest commit names, and that record was the highest of all it names but the new
// segments. An id with a new record points to the highest of these, and they were appended when every segment common to both
// was in the log, so it is the highest of all (directory/replay.h). If a segment number is used twice, because files were put
// there, the files tell them apart.
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

  // The state of a new table in RAM.
  void start_in_ram(const Uuid& uuid);
  // A store without rows and without files.
  void make_store_in_ram();
  // The state of a commit.
  void load(const Manifest& manifest);
  // For opening, after load(): the limit of the files, and segments to merge.
  void finish_opening();
  // Forgets all rows. Until another store is made the table has none.
  void drop_store();
  uint64_t refresh();

 private:
  void make_store(const MemoryPlan& plan, std::unique_ptr<Log> log);
  void remove_leftovers();
  bool replay_onto(const Manifest& newest);

  TableState& table_;
  DeviceLink& device_;
  IndexSnapshots& index_;
  FileCollector& collector_;
  Prefetcher& prefetcher_;
  DiskRoom& disk_;
};

}  // namespace bunkbed
