// Makes room within the limit of a table's files (store/disk_budget.cc states the rule that keeps the limit).
//
// A call checks for room before it changes anything. Without room it does the following, in this order:
//   1. It waits for the commit under way, which then releases the commit before it.
//   2. It removes the commit before the last, which is a spare in case the last one is found damaged. Kept commits, and
//      those that a run names, stay.
//   3. It compacts segments that no commit names.
// A commit that would name too many bytes packs its segments first. A commit that is to be kept is refused when its
// files would leave too little room. A change that adds more rows than the limit has room for is refused, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "jobs/file_collector.h"
#include "jobs/prefetcher.h"
#include "state/device_link.h"
#include "state/table_state.h"

namespace bunkbed {

class DiskRoom {
 public:
  DiskRoom(TableState& table, DeviceLink& device, FileCollector& collector, Prefetcher& prefetcher)
      : table_(table), device_(device), collector_(collector), prefetcher_(prefetcher) {}
  DiskRoom(const DiskRoom&) = delete;
  DiskRoom& operator=(const DiskRoom&) = delete;

  // ---- Calls; they take the lock.
  // Returns the lock of exclusive(kMayRun) after the checks of a call that sets these rows.
  TableLock::Guard lock_for(const int64_t* ids, size_t n) RETURNS_LOCKED(table_.lock);
  // Returns the lock of exclusive(), with room for a device cache to write back so many rows.
  TableLock::Guard lock_for_device_cache(size_t rows) RETURNS_LOCKED(table_.lock);
  // The same after the checks of a call that deletes these rows, with room for their tombstones.
  TableLock::Guard lock_for_tombstones(const int64_t* ids, size_t n) RETURNS_LOCKED(table_.lock);
  void make_room(const int64_t* ids, size_t n);

  // ---- All below require the lock.
  bool has_room_for(const int64_t* ids, size_t n) REQUIRES(table_.lock);
  // For opening: throws when the files of the last commit cannot be packed within the limit, or leave too little of it.
  void require_limit() REQUIRES(table_.lock);
  // Returns `plan`, with the buffer sizes of the present plan when its own would need more disk than the limit.
  MemoryPlan within_limit(const MemoryPlan& plan) const REQUIRES(table_.lock);
  // Before a commit begins: packs, or throws when the commit may not be made. Requires the lock of exclusive().
  void make_commit_fit(const std::string& meta, const std::string& keep) REQUIRES(table_.lock);

 private:
  DiskBudget& disk() const REQUIRES(table_.lock) { return table_.store->disk(); }
  std::optional<MemoryPlan> plan_with_smaller_chunks(uint64_t rows) const REQUIRES(table_.lock);
  void require_room_for_any(size_t rows, const std::string& what, const std::string& advice) REQUIRES(table_.lock);
  bool shrink_chunks(uint64_t rows) REQUIRES(table_.lock);                        // requires the lock of exclusive()
  void make_room_for_stored(const int64_t* ids, size_t n) REQUIRES(table_.lock);  // the same

  TableState& table_;
  DeviceLink& device_;
  FileCollector& collector_;
  Prefetcher& prefetcher_;
};

}  // namespace bunkbed
