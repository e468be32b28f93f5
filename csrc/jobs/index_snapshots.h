// Snapshots of the index (row -> place in the log), which spare an opening the replay of the log. When the table takes one and
// how it enters a commit; directory/checkpoint.h says what one is, and why it is right although the table changes meanwhile.
//
//   1. After a commit, when an opening would have to replay many records: an eighth of the stored rows or, where records are
//      so small that a snapshot would be more than a quarter of their bytes, as many records as make it that quarter, half of
//      the rows at most. So the bytes of snapshots follow the number of dirty rows. A table of few rows takes none. A thread
//      walks the directory part by part, and takes the lock for each part; it checks and writes what it found without
//      the lock.
//   2. The file is complete and durable under its name. The next commit that begins names it; until then a collection leaves
//      it alone. Later commits name it too, until another one replaces it.
//   3. close() of a table that would be slow to open and has nothing uncommitted takes one at once, and commits the same state
//      with it. A table of a run does not: its commits are the run's.
//
// A failure costs the snapshot and nothing else: the next commit tries again.
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

// Tables of fewer rows take none; tests of small tables lower it.
inline std::atomic<uint64_t> checkpoint_rows{100'000};
// Take them within the commit that finds one due, so that tests know when.
inline std::atomic<bool> checkpoints_in_line{false};

class IndexSnapshots {
 public:
  IndexSnapshots(TableState& table, const DeviceLink& device) : table_(table), device_(device) {}
  IndexSnapshots(const IndexSnapshots&) = delete;
  IndexSnapshots& operator=(const IndexSnapshots&) = delete;

  // ---- Without the lock.

  // After a commit: takes a snapshot when one is due.
  void consider();
  // Before the table closes: waits for a walk that is under way. With `may_take`, takes a snapshot first when that is worth it, and
  // returns whether a commit is to be made to name it.
  bool prepare_to_close(bool may_take);

  // ---- With the lock.

  // Fills the directory of a new store with what `manifest` names. `scratch_bytes`: memory that it may use for that.
  void load(const Manifest& manifest, size_t scratch_bytes);
  // The store goes: a walk under way ends, and its file is not used.
  void forget_store();
  // The snapshot that the next commit is to name, if one is ready.
  const std::optional<CheckpointEntry>& ready() const { return ready_; }
  // A commit that names the ready one is durable.
  void committed_ready();
  // Numbers of files that no commit names yet and that must stay.
  std::set<uint64_t> numbers_in_use() const;
  uint64_t next_number() const { return next_number_; }
  // Tells the disk budget what the files take that no commit names.
  void count_bytes();

 private:
  struct Walk;
  uint64_t records_to_replay() const;
  bool is_worth_closing_with() const;
  void take();
  std::optional<CheckpointEntry> write(Walk* walk);

  TableState& table_;
  const DeviceLink& device_;
  std::unique_ptr<std::thread> thread_;
  std::atomic<bool> stop_{false};
  uint64_t store_number_ = 0;  // changes when another store replaces the present one
  bool is_under_way_ = false;
  uint64_t number_ = 0;        // of the one under way
  uint64_t next_number_ = 1;
  std::optional<CheckpointEntry> ready_;  // durable, and named by no commit yet
  uint64_t ready_epoch_ = 0;
  uint64_t replay_epoch_ = 0;  // of the one that the last commit names; 0: none
};

}  // namespace bunkbed
