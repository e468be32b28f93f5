// Makes commits. The steps of a commit (docs/design/engine.md, rule 14):
//
//   1. prepare(), under the lock, starts the next epoch. This fixes the contents of the commit: every record in the
//      log, and every dirty record in RAM, which is now frozen (Store::freeze). It also notes the facts of the
//      manifest.
//   2. make_durable() appends the frozen records to the epoch that ends, in slices between which calls go on. An update
//      of a frozen record appends it first. Then every chunk is written to its file.
//   3. Without the lock: the segments of that epoch are synced, and the directory when a segment is new. They are
//      sealed, so bytes below a committed length never change again.
//   4. Without the lock: the manifest is written under a temporary name, synced and linked under its epoch, and the
//      directory is synced. From here on the commit is durable, and the calls that wait for it continue.
//   5. tidy_up() compacts, and removes files that no remaining manifest names; in the background it pauses after each
//      segment. Then an index snapshot starts if one is due (jobs/index_snapshots.h). The manifest names the one that
//      was ready at step 1.
//
// Why the manifest of an epoch E is right although rows change, are evicted and are moved by compaction meanwhile:
//   - All appends after step 1, by evictions of newly dirty rows and by compaction, go to segments of E + 1, which E
//     does not name. So the segments of E have exactly the state at step 1.
//   - Compaction may empty a segment that E must name. E names all segments that were live at step 1. Their files stay
//     until E is durable and collected, because they count as named from step 1 on.
//   - A row may have several records in the segments of E. The highest version wins, and the versions that are reserved
//     for the frozen records are higher than all others of E.
//
// A failure before step 4 changes neither the last commit nor the rows in memory. Frozen records become dirty again;
// those that were appended stay in the log, in segments that the next commit names. The epoch's number is not used
// again: the manifest may exist although its link was reported to have failed. After a failed sync the kernel may treat
// bytes as clean that are not on the disk, so the table refuses writes until it is reopened.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "commit/pending_commit.h"
#include "jobs/compaction_job.h"
#include "jobs/disk_room.h"
#include "jobs/file_collector.h"
#include "jobs/index_snapshots.h"
#include "jobs/ram_snapshots.h"
#include "state/device_link.h"
#include "state/table_state.h"

namespace bunkbed {

class Committer {
 public:
  Committer(TableState& table, DeviceLink& device, DiskRoom& disk, FileCollector& collector, IndexSnapshots& index,
            CompactionJob& compaction, RamSnapshots& ram)
      : table_(table),
        device_(device),
        disk_(disk),
        collector_(collector),
        index_(index),
        compaction_(compaction),
        ram_(ram) {}
  Committer(const Committer&) = delete;
  Committer& operator=(const Committer&) = delete;

  // ---- Calls; they take the lock. Table declares them for users.
  uint64_t commit(const std::optional<std::string>& meta, const std::string& keep);
  std::shared_ptr<PendingCommit> begin_commit(const std::optional<std::string>& meta, const std::string& keep);
  void write_dirty();
  void collect(size_t newest);
  // For closing: commits the same state again, with the index snapshot that is ready. Ignores failures.
  void commit_index_snapshot();

  // ---- All below require the lock of exclusive().
  // Writes a manifest that needs no records of its own, and makes it the last commit.
  void publish(Manifest manifest) REQUIRES(table_.lock);
  // Joins the thread of the last commit.
  void join() REQUIRES(table_.lock);

 private:
  // A commit under way: its manifest, and the facts that undoing it needs.
  struct Job {
    Manifest manifest;
    Log* log = nullptr;  // of the store, which stays until the commit is over
    bool was_changed = false;
    bool has_index_snapshot = false;  // the manifest names a new index snapshot
    std::shared_ptr<PendingCommit> pending = std::make_shared<PendingCommit>();
  };
  // manifest_now() requires the lock. The others take it.
  std::unique_ptr<Job> prepare(const std::optional<std::string>& meta, const std::string& keep,
                               std::shared_ptr<PendingCommit>* pending, bool even_if_same = false);
  Manifest manifest_now(uint64_t epoch) const REQUIRES(table_.lock);
  void run(Job* job, FileCollector::Pace pace);
  void make_durable(Job* job);
  template <typename Work>
  void in_slices(Log* log, const Work& work);
  void give_up(Job* job, const std::exception_ptr& error);
  void tidy_up(FileCollector::Pace pace);
  void end();

  TableState& table_;
  DeviceLink& device_;
  DiskRoom& disk_;
  FileCollector& collector_;
  IndexSnapshots& index_;
  CompactionJob& compaction_;
  RamSnapshots& ram_;
  // of the last begin_commit(); does not use the table after that commit
  std::unique_ptr<std::thread> thread_ GUARDED_BY(table_.lock);
  std::shared_ptr<PendingCommit> last_commit_ GUARDED_BY(table_.lock);  // of the last begin_commit()
};

}  // namespace bunkbed
