// Index snapshots (the position of each row in the log), with which opening need not replay the log. Decides when a
// table takes one and how a commit names it. directory/index_snapshot_file.h says why one is right although the table
// changes meanwhile.
//
//   1. After a commit, a snapshot is taken when opening would replay many records: an eighth of the stored rows. When
//      records are so small that a snapshot takes more than a quarter of these records' bytes, it waits for more
//      records: until it is a quarter, or for half of the rows. So the bytes of snapshots follow the number of changed
//      rows. A table of few rows takes none. A thread walks the directory in parts. It takes the lock to copy a part,
//      and writes without it.
//   2. The file is complete and durable under its name. The next commit that begins names it; until then a collection
//      spares it. Later commits name it too, until another snapshot replaces it.
//   3. close() of a table that would be slow to open and has nothing uncommitted takes one at once, and commits the
//      same state with it. A table of a run does not, because only the run commits.
//
// A failure loses only the snapshot: the next commit tries again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <thread>

#include "format/format.h"
#include "state/device_link.h"
#include "state/table_state.h"

namespace bunkbed {

// Tables of fewer rows take none. Tests of small tables lower it.
inline std::atomic<uint64_t> index_snapshot_rows{100'000};
// Take a snapshot on the committing thread, so that tests know when.
inline std::atomic<bool> index_snapshots_in_line{false};

class IndexSnapshots {
 public:
  IndexSnapshots(TableState& table, const DeviceLink& device) : table_(table), device_(device) {}
  IndexSnapshots(const IndexSnapshots&) = delete;
  IndexSnapshots& operator=(const IndexSnapshots&) = delete;

  // ---- Calls; they take the lock.

  // After a commit: takes a snapshot when one is due.
  void consider();
  // Before the table closes: waits for a walk under way. With `may_take`, takes a snapshot first when it is worth its
  // time. Returns whether the caller should commit, to name the snapshot.
  bool prepare_to_close(bool may_take);

  // ---- All below require the lock.

  // Fills the directory of a new store from the files that `manifest` names. `scratch_bytes`: memory that it may use.
  void load(const Manifest& manifest, size_t scratch_bytes) REQUIRES(table_.lock);
  // Before the store is destroyed: a walk under way ends at its next part, and its file is not used.
  void forget_store() REQUIRES(table_.lock);
  // The snapshot that the next commit will name, if one is ready.
  const std::optional<IndexSnapshotEntry>& ready() const { return ready_; }
  // Whether the next commit should name no snapshot: so many rows were deleted that none is worth its place. It would
  // keep every later tombstone in the log.
  bool is_superfluous() const REQUIRES(table_.lock);
  void committed_none() REQUIRES(table_.lock) { replay_epoch_ = 0; }
  // Called when a commit that names the ready snapshot is durable.
  void committed_ready() REQUIRES(table_.lock);
  // Opening may need the tombstones in segments of this epoch and later: an index snapshot was taken before them.
  uint64_t tombstones_needed_from() const REQUIRES(table_.lock);
  // Numbers of files that no commit names yet and that must stay.
  std::set<uint64_t> numbers_in_use() const REQUIRES(table_.lock);
  uint64_t next_number() const REQUIRES(table_.lock) { return next_number_; }
  // Reports the bytes of snapshots that no commit names to the disk budget.
  void count_bytes() REQUIRES(table_.lock);

 private:
  struct Walk;
  uint64_t records_to_replay() const REQUIRES(table_.lock);
  bool is_worth_closing_with() const REQUIRES(table_.lock);
  void take();                                          // takes the lock
  std::optional<IndexSnapshotEntry> write(Walk* walk);  // takes the lock

  TableState& table_;
  const DeviceLink& device_;
  std::unique_ptr<std::thread> thread_ GUARDED_BY(table_.lock);
  std::atomic<bool> stop_{false};
  uint64_t store_number_ GUARDED_BY(table_.lock) = 0;  // changes when another store replaces the present one
  bool is_under_way_ GUARDED_BY(table_.lock) = false;
  uint64_t number_ GUARDED_BY(table_.lock) = 0;  // of the snapshot under way
  uint64_t next_number_ = 1;
  std::optional<IndexSnapshotEntry> ready_;  // durable, and named by no commit yet
  uint64_t ready_epoch_ GUARDED_BY(table_.lock) = 0;
  uint64_t replay_epoch_ GUARDED_BY(table_.lock) = 0;  // of the snapshot that the last commit names; 0: none
};

}  // namespace bunkbed
