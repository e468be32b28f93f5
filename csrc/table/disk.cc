// What calls do about the limit of a table's files (store/disk.cc says what it takes to keep it).
//
// A change asks before it changes anything. Where there is no room, in this order:
//   1. It waits for the commit under way, which then lets go of the one before it.
//   2. The commit before the last goes; otherwise it stays in case the last one is found damaged. Kept ones, and those a
//      run names, stay.
//   3. Segments that no commit names are compacted.
// A commit packs what it would name first where that is too much, and one that is to be kept is refused where what it
// keeps would leave too little. So is a change that adds more rows than the limit has room for.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "table/table.h"

namespace bunkbed {

namespace {

constexpr size_t kLittleMeta = 16u << 10;  // the slack has room for it

// What more would be stored than there is room for; what to do about it is said last.
Error out_of_disk(const std::string& what, uint64_t needed, const std::string& path) {
  return Error(ErrorKind::kSystem, what + "; disk=" + std::to_string(needed) + " would do", ENOSPC, path);
}

}  // namespace

// Chunks follow the RAM budget, and what so many rows need of the limit follows the chunks: the slack grows with them, and
// records pack more tightly in them. Of the smaller ones those that need least; none where that is no less than now.
std::optional<MemoryPlan> Table::plan_with_smaller_chunks(uint64_t rows) const {
  const size_t stride = store_->log()->stride();
  const MemoryPlan& now = store_->plan();
  uint64_t least = store_->disk_needed(rows);
  std::optional<MemoryPlan> best;
  for (MemoryPlan plan = now; plan.log.chunk_bytes > smallest_chunk_bytes(stride);) {
    plan.log.chunk_bytes = std::max(smallest_chunk_bytes(stride), vfs::round_up(plan.log.chunk_bytes / 2, vfs::kBlockBytes));
    const uint64_t needed = store_->disk_needed_with(plan.log, rows);
    if (needed >= least) continue;
    least = needed;
    best = plan;
  }
  if (best.has_value()) best->fixed_bytes -= now.log.total(stride) - best->log.total(stride);
  return best;
}

// With the lock of lock_.exclusive().
bool Table::shrink_chunks(uint64_t rows) {
  const std::optional<MemoryPlan> plan = plan_with_smaller_chunks(rows);
  if (!plan.has_value()) return false;
  staging_.reset();  // it reads into memory that is laid out again
  store_->apply(*plan);
  return true;
}

// At opening: what the last commit names cannot be packed within a limit that it leaves too little of.
void Table::require_disk_limit() {
  const uint64_t limit = store_->disk_limit();
  if (limit == 0) return;
  while (store_->disk_needed_now() > limit && shrink_chunks(store_->directory().stored_rows())) {
  }
  const uint64_t needed = store_->disk_needed_now();
  if (limit >= needed) return;
  throw Error(ErrorKind::kInvalid, "table '" + name_ + "': disk=" + std::to_string(limit) + " bytes is too small for " +
                                       std::to_string(store_->directory().stored_rows()) + " stored rows in " +
                                       std::to_string(store_->log_bytes()) + " bytes of files and " +
                                       std::to_string(store_->snapshot_bytes()) +
                                       " bytes of snapshots; it needs at least disk=" + std::to_string(needed));
}

// More RAM is no reason to need more disk.
MemoryPlan Table::plan_within_disk(const MemoryPlan& plan) const {
  const uint64_t limit = store_->disk_limit();
  if (limit == 0 || store_->disk_needed_with(plan.log, store_->directory().stored_rows()) <= limit) return plan;
  const MemoryPlan& before = store_->plan();
  const size_t stride = store_->log()->stride();
  if (before.log.total(stride) > plan.log.total(stride)) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': with ram=" + std::to_string(plan.total_bytes) +
                                         " bytes its writes are so small that its limit of disk=" + std::to_string(limit) +
                                         " bytes is too small; it would need disk=" +
                                         std::to_string(store_->disk_needed_with(plan.log, store_->directory().stored_rows())));
  }
  MemoryPlan with_its_chunks = plan;
  with_its_chunks.fixed_bytes -= plan.log.total(stride) - before.log.total(stride);
  with_its_chunks.log = before.log;
  return with_its_chunks;
}

bool Table::has_disk_for(const int64_t* ids, size_t n) {
  require_disk_above(ids, n);
  return store_->rows_beyond_disk(ids, n) == 0 && store_->has_disk_for(ids, n);
}

// Room for more stored rows: smaller chunks, and without the commits that nothing needs.
void Table::make_room_for_stored(const int64_t* ids, size_t n) {
  for (bool may_collect = !spec_.is_scratch; const uint64_t stored = store_->rows_beyond_disk(ids, n);) {
    if (shrink_chunks(stored)) continue;
    if (std::exchange(may_collect, false)) {
      collect_locked(1);
      continue;
    }
    throw out_of_disk("table '" + name_ + "': " + std::to_string(stored) + " stored rows are more than its limit of disk=" +
                          std::to_string(store_->disk_limit()) + " bytes has room for, beside " +
                          std::to_string(store_->snapshot_bytes()) + " bytes of snapshots",
                      store_->disk_needed(stored), path_);
  }
}

void Table::make_disk_room(const int64_t* ids, size_t n) {
  const auto guard = lock_.exclusive();
  require_writable();
  check_ids(ids, n);
  make_room_for_stored(ids, n);
  if (store_->has_disk_for(ids, n)) return;
  if (!spec_.is_scratch) collect_locked(1);
  if (store_->has_disk_for(ids, n) || store_->make_disk_room()) return;
  store_->forget_admitted();
  throw Error(ErrorKind::kSystem,
              "table '" + name_ + "': its files take " + std::to_string(store_->disk_bytes()) + " bytes, " +
                  std::to_string(store_->snapshot_bytes()) + " of them for snapshots alone, and " +
                  std::to_string(store_->dirty_rows()) + " changed rows are still to be written: no room for " +
                  std::to_string(n) + " ids within disk=" + std::to_string(store_->disk_limit()) +
                  "; commit() or dropping a snapshot makes some, disk=" + std::to_string(store_->disk_needed_for(n)) +
                  " always has it",
              ENOSPC, path_);
}

TableLock::Guard Table::lock_with_disk_for(const int64_t* ids, size_t n) {
  for (;;) {
    auto guard = lock_.exclusive(TableLock::Commits::kMayRun);
    require_writable();
    check_ids(ids, n);
    if (has_disk_for(ids, n)) return guard;
    guard.unlock();
    make_disk_room(ids, n);
  }
}

size_t Table::rows_above() const {
  if (holder_ == nullptr) return 0;
  const size_t frames = holder_->max_held();
  return spec_.num_rows < 0 ? frames : std::min(frames, static_cast<size_t>(spec_.num_rows));
}

// The lock, with room for so many rows to be written back.
TableLock::Guard Table::lock_with_disk_above(size_t rows) {
  auto guard = lock_.exclusive();
  require_writable();
  if (spec_.num_rows >= 0) rows = std::min(rows, static_cast<size_t>(spec_.num_rows));
  if (store_->has_disk_for_any(rows)) return guard;
  if (!spec_.is_scratch) collect_locked(1);
  if (store_->has_disk_for_any(rows) || store_->make_disk_room()) return guard;
  store_->forget_admitted();
  throw Error(ErrorKind::kSystem,
              "table '" + name_ + "': its files take " + std::to_string(store_->disk_bytes()) +
                  " bytes, and there is no room for the " + std::to_string(rows) +
                  " rows of a device cache within disk=" + std::to_string(store_->disk_limit()) +
                  "; make the cache smaller, or open the table with a larger disk=",
              ENOSPC, path_);
}

// Before rows that are stored nowhere yet are trained above, where it would be too late once they are written back, or
// here, where they would take the room of those above: all the holder's rows may be such.
void Table::require_disk_above(const int64_t* ids, size_t n) const {
  if (holder_ == nullptr) return;
  const uint64_t most = spec_.num_rows < 0 ? ~uint64_t{0} : static_cast<uint64_t>(spec_.num_rows);
  if (const uint64_t stored = store_->rows_beyond_disk(ids, n, rows_above(), most)) {
    throw out_of_disk("table '" + name_ + "': " + std::to_string(stored) +
                          " stored rows, those of its device cache included, are more than its limit of disk=" +
                          std::to_string(store_->disk_limit()) + " bytes has room for",
                      store_->disk_needed(stored), path_);
  }
}

// With the lock of lock_.exclusive(), before the commit begins.
void Table::make_commit_fit(const std::string& meta, const std::string& keep) {
  store_->forget_admitted();
  const auto beyond_little = [](const std::string& text) { return std::max(text.size(), kLittleMeta) - kLittleMeta; };
  store_->set_meta_bytes(beyond_little(meta.size() > committed_.meta.size() ? meta : committed_.meta));
  const uint64_t stored = store_->directory().stored_rows();
  const bool is_much = meta.size() > std::max(committed_.meta.size(), kLittleMeta);
  if (const uint64_t needed = store_->disk_needed(stored); is_much && needed > store_->disk_limit()) {
    store_->set_meta_bytes(beyond_little(committed_.meta));
    throw out_of_disk("table '" + name_ + "': " + std::to_string(meta.size()) + " bytes of meta= leave too little of disk=" +
                          std::to_string(store_->disk_limit()) + " bytes",
                      needed, path_);
  }
  if (!store_->shrink_for_commit(!keep.empty())) {
    try {
      collect_locked(1);
    } catch (const Error&) {  // nothing of the commit depends on it
    }
    (void)store_->shrink_for_commit(!keep.empty());  // the commit may go on as it is: later ones pack the rest
  }
  if (keep.empty()) return;
  const uint64_t needed = store_->disk_needed_to_keep();
  if (needed <= store_->disk_limit()) return;
  throw out_of_disk("table '" + name_ + "': keeping '" + keep + "' would leave too little of disk=" +
                        std::to_string(store_->disk_limit()) + " bytes to go on with, beside " +
                        std::to_string(store_->snapshot_bytes()) + " bytes of earlier snapshots; drop some, or commit without keep=",
                    needed, path_);
}

void Table::require_disk_to_keep(const std::string& keep) {
  const auto guard = lock_.exclusive();
  require_writable();
  if (store_->disk_limit() != 0) make_commit_fit(committed_.meta, keep);
}

void Table::count_checkpoint_bytes() {
  store_->set_checkpoint_bytes((checkpoints_.ready.has_value() ? checkpoints_.ready->bytes : 0) +
                               (checkpoints_.is_under_way ? Store::checkpoint_estimate(store_->directory().stored_rows()) : 0));
}

}  // namespace bunkbed
