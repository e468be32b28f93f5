#include "jobs/disk_room.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"

namespace bunkbed {

namespace {

constexpr size_t kLittleMeta = 16u << 10;  // bytes of meta that the slack has room for

}  // namespace

// The chunk size follows the RAM budget. Larger chunks need more slack, but records pack more tightly in them. Returns
// the plan with smaller chunks that needs the least disk for so many rows, or nothing when no plan needs less than now.
std::optional<MemoryPlan> DiskRoom::plan_with_smaller_chunks(uint64_t rows) const {
  const size_t stride = table_.store->log()->stride();
  const MemoryPlan& now = table_.store->plan();
  uint64_t least = disk().needed(rows);
  std::optional<MemoryPlan> best;
  for (MemoryPlan plan = now; plan.log.chunk_bytes > smallest_chunk_bytes(stride);) {
    plan.log.chunk_bytes =
        std::max(smallest_chunk_bytes(stride), vfs::round_up(plan.log.chunk_bytes / 2, vfs::kBlockBytes));
    const uint64_t needed = disk().needed_with(plan.log, rows);
    if (needed >= least) continue;
    least = needed;
    best = plan;
  }
  if (best.has_value()) best->fixed_bytes -= now.log.total(stride) - best->log.total(stride);
  return best;
}

bool DiskRoom::shrink_chunks(uint64_t rows) {
  const std::optional<MemoryPlan> plan = plan_with_smaller_chunks(rows);
  if (!plan.has_value()) return false;
  prefetcher_.reset_queue();  // its buffers are allocated again by apply()
  table_.store->apply(*plan);
  return true;
}

// Compaction can pack the last commit's segments only when the limit leaves it room for that.
void DiskRoom::require_limit() {
  const uint64_t limit = disk().limit();
  if (limit == 0) return;
  while (disk().needed_now() > limit && shrink_chunks(table_.store->directory().stored_rows())) {
  }
  const uint64_t needed = disk().needed_now();
  if (limit >= needed) return;
  throw Error(ErrorKind::kInvalid, "table '" + table_.name + "': disk=" + std::to_string(limit) +
                                       " bytes is too small for " +
                                       std::to_string(table_.store->directory().stored_rows()) + " stored rows in " +
                                       std::to_string(disk().log_bytes()) + " bytes of files and " +
                                       std::to_string(disk().snapshot_bytes()) +
                                       " bytes of snapshots; it needs at least disk=" + std::to_string(needed));
}

// More RAM must not make the table need more disk.
MemoryPlan DiskRoom::within_limit(const MemoryPlan& plan) const {
  const uint64_t limit = disk().limit();
  if (limit == 0 || disk().needed_with(plan.log, table_.store->directory().stored_rows()) <= limit) return plan;
  const MemoryPlan& before = table_.store->plan();
  const size_t stride = table_.store->log()->stride();
  if (before.log.total(stride) > plan.log.total(stride)) {
    throw Error(ErrorKind::kInvalid,
                "table '" + table_.name + "': with ram=" + std::to_string(plan.total_bytes) +
                    " bytes its writes are so small that its limit of disk=" + std::to_string(limit) +
                    " bytes is too small; it would need disk=" +
                    std::to_string(disk().needed_with(plan.log, table_.store->directory().stored_rows())));
  }
  MemoryPlan with_its_chunks = plan;
  with_its_chunks.fixed_bytes -= plan.log.total(stride) - before.log.total(stride);
  with_its_chunks.log = before.log;
  return with_its_chunks;
}

bool DiskRoom::has_room_for(const int64_t* ids, size_t n) {
  device_.require_disk(ids, n);
  return disk().rows_beyond(ids, n) == 0 && disk().has_room_for(ids, n);
}

// Makes room for more stored rows: with smaller chunks, then by removing the commits that are not needed.
void DiskRoom::make_room_for_stored(const int64_t* ids, size_t n) {
  for (bool may_collect = !table_.spec.is_scratch; const uint64_t stored = disk().rows_beyond(ids, n);) {
    if (shrink_chunks(stored)) continue;
    if (std::exchange(may_collect, false)) {
      collector_.collect(1);
      continue;
    }
    // Refused calls append nothing, so compaction would not start by itself.
    const uint64_t tombstones = table_.store->compactor().tombstones(), counts = table_.store->compactor().counts();
    if (tombstones + counts > 0) table_.store->compaction().compact_all();
    if (table_.store->compactor().tombstones() + table_.store->compactor().counts() < tombstones + counts) continue;
    throw table_.out_of_disk(std::to_string(stored) +
                                 " stored rows are more than its limit of disk=" + std::to_string(disk().limit()) +
                                 " bytes has room for, in addition to " + std::to_string(disk().snapshot_bytes()) +
                                 " bytes of snapshots and " + std::to_string(tombstones) +
                                 " ids of deleted rows, which a cursor of the change feed may need",
                             disk().needed(stored));
  }
}

void DiskRoom::make_room(const int64_t* ids, size_t n) {
  const auto guard = table_.lock.exclusive();
  table_.require_writable();
  table_.check_ids(ids, n);
  make_room_for_stored(ids, n);
  if (disk().has_room_for(ids, n)) return;
  if (!table_.spec.is_scratch) collector_.collect(1);
  if (disk().has_room_for(ids, n) || disk().make_room()) return;
  disk().forget_admitted();
  throw Error(ErrorKind::kSystem,
              "table '" + table_.name + "': its files take " + std::to_string(disk().used_bytes()) + " bytes, " +
                  std::to_string(disk().snapshot_bytes()) + " bytes for snapshots alone, and " +
                  std::to_string(table_.store->unwritten_rows()) +
                  " changed rows are still to be written: no room for " + std::to_string(n) +
                  " ids within disk=" + std::to_string(disk().limit()) +
                  "; fewer ids in a call need less, commit() or dropping a snapshot makes some, disk=" +
                  std::to_string(disk().needed_for(n)) + " always has it",
              ENOSPC, table_.path);
}

TableLock::Guard DiskRoom::lock_for(const int64_t* ids, size_t n) {
  for (;;) {
    auto guard = table_.lock.exclusive(TableLock::Commits::kMayRun);
    table_.require_writable();
    table_.check_ids(ids, n);
    if (has_room_for(ids, n)) return guard;
    guard.unlock();
    make_room(ids, n);
  }
}

TableLock::Guard DiskRoom::lock_for_device_cache(size_t rows) {
  auto guard = table_.lock.exclusive();
  table_.require_writable();
  if (table_.spec.num_rows >= 0) rows = std::min(rows, static_cast<size_t>(table_.spec.num_rows));
  require_room_for_any(rows, std::to_string(rows) + " rows of a device cache", "make the cache smaller");
  return guard;
}

TableLock::Guard DiskRoom::lock_for_tombstones(const int64_t* ids, size_t n) {
  const bool is_limited = table_.options.disk_bytes != 0;
  auto guard = table_.lock.exclusive(is_limited ? TableLock::Commits::kEnded : TableLock::Commits::kMayRun);
  table_.require_writable();
  table_.check_ids(ids, n);
  require_room_for_any(disk().rows_like_tombstones(n), "tombstones of " + std::to_string(n) + " ids",
                       "delete fewer at once");
  return guard;
}

void DiskRoom::require_room_for_any(size_t rows, const std::string& what, const std::string& advice) {
  if (disk().has_room_for_any(rows)) return;
  if (!table_.spec.is_scratch) collector_.collect(1);
  if (disk().has_room_for_any(rows) || disk().make_room()) return;
  disk().forget_admitted();
  throw Error(ErrorKind::kSystem,
              "table '" + table_.name + "': its files take " + std::to_string(disk().used_bytes()) +
                  " bytes, and there is no room for the " + what + " within disk=" + std::to_string(disk().limit()) +
                  "; " + advice + ", or open the table with a larger disk=",
              ENOSPC, table_.path);
}

void DiskRoom::make_commit_fit(const std::string& meta, const std::string& keep) {
  disk().forget_admitted();
  const auto beyond_little = [](const std::string& text) { return std::max(text.size(), kLittleMeta) - kLittleMeta; };
  disk().set_meta_bytes(beyond_little(meta.size() > table_.committed.meta.size() ? meta : table_.committed.meta));
  const uint64_t stored = table_.store->directory().stored_rows();
  const bool is_much = meta.size() > std::max(table_.committed.meta.size(), kLittleMeta);
  if (const uint64_t needed = disk().needed(stored); is_much && needed > disk().limit()) {
    disk().set_meta_bytes(beyond_little(table_.committed.meta));
    throw table_.out_of_disk(std::to_string(meta.size()) + " bytes of meta= leave too little of disk=" +
                                 std::to_string(disk().limit()) + " bytes",
                             needed);
  }
  if (!disk().shrink_for_commit(!keep.empty())) {
    try {
      collector_.collect(1);
    } catch (const Error&) {  // the commit does not depend on it
    }
    (void)disk().shrink_for_commit(!keep.empty());  // when it fails the commit goes on: later commits pack the rest
  }
  if (keep.empty()) return;
  const uint64_t needed = disk().needed_to_keep();
  if (needed <= disk().limit()) return;
  throw table_.out_of_disk("keeping '" + keep + "' would leave too little of disk=" + std::to_string(disk().limit()) +
                               " bytes to go on with, in addition to " + std::to_string(disk().snapshot_bytes()) +
                               " bytes of earlier snapshots; drop some, or commit without keep=",
                           needed);
}

}  // namespace bunkbed
