// Commits. One, in order (docs/design/engine.md, rule 14):
//
//   1. prepare(), under the lock, at once: the next epoch begins. This settles what the commit holds: every record in the log,
//      and every dirty one in RAM, which is frozen from now on (Store::freeze). The facts of the manifest are noted.
//   2. make_durable(): the frozen records are appended to the epoch that ends, some at a time; between them lookups and updates
//      go on. An update that wants to change a frozen record appends it first. Then every chunk is written to its file.
//   3. Without the lock: the segments of that epoch are synced, and the directory when one is new. They are sealed, so
//      bytes below a committed length never change again.
//   4. Without the lock: the manifest is written under a temporary name, synced, linked under its epoch, the directory
//      synced. From here on the commit is durable, and the calls that wait for it continue.
//   5. tidy_up(): some compaction for what was appended, and what no remaining manifest names is removed. An index snapshot is
//      started when one is due (jobs/index_snapshots.h); one that was ready at 1 is named by the manifest.
//
// Why the manifest of an epoch E is right although rows change, leave RAM and are moved by compaction meanwhile:
//   - What is appended from 1 on, by evictions of rows dirtied since and by compaction, goes to segments of E + 1, which
//     E does not name. So the segments of E hold the state at 1 and nothing else.
//   - Compaction may empty a segment that E must name. E names all that were live at 1, and their files stay until E is
//     durable and collected, because they count as named from 1 on.
//   - A row may have several records in the segments of E. The highest version wins, and the versions set aside for the
//     frozen records are higher than all others of E.
//
// A failure before 4 leaves the last commit as it was and the rows in memory as they are: frozen ones are dirty again,
// those that reached the log stay there, in segments that the next commit names. The number of its epoch is not used again: a
// manifest whose link was reported to have failed may exist all the same. After a failed sync the kernel may count bytes
// as clean that the disk does not have: the table then refuses writes until it is reopened.
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
      : table_(table), device_(device), disk_(disk), collector_(collector), index_(index), compaction_(compaction), ram_(ram) {}
  Committer(const Committer&) = delete;
  Committer& operator=(const Committer&) = delete;

  // ---- Calls; they take the lock. Table declares them for users.
  uint64_t commit(const std::optional<std::string>& meta, const std::string& keep);
  std::shared_ptr<PendingCommit> begin_commit(const std::optional<std::string>& meta, const std::string& keep);
  void write_dirty();
  void collect(size_t newest);
  // For closing: commits the same state again, with the index snapshot that is ready. A failure costs nothing else.
  void commit_index_snapshot();

  // ---- With the lock of exclusive().
  // Writes a manifest that needs no records of its own, and makes it the last commit.
  void publish(Manifest manifest);
  // Joins the thread of the last commit.
  void join();

 private:
  // A commit under way: what the manifest will say, and what undoing it takes.
  struct Job {
    Manifest manifest;
    bool was_changed = false;
    bool has_index_snapshot = false;  // the first to name the one that was ready
    std::shared_ptr<PendingCommit> pending = std::make_shared<PendingCommit>();
  };
  std::unique_ptr<Job> prepare(const std::optional<std::string>& meta, const std::string& keep,
                               std::shared_ptr<PendingCommit>* pending, bool even_if_same = false);
  Manifest manifest_now(uint64_t epoch) const;
  void run(Job* job);
  void make_durable(Job* job);
  template <typename Work>
  void in_slices(const Work& work);
  void give_up(Job* job, const std::exception_ptr& error);
  void tidy_up();
  void end();

  TableState& table_;
  DeviceLink& device_;
  DiskRoom& disk_;
  FileCollector& collector_;
  IndexSnapshots& index_;
  CompactionJob& compaction_;
  RamSnapshots& ram_;
  std::unique_ptr<std::thread> thread_;        // of the last begin_commit(); done with the table once that is over
  std::shared_ptr<PendingCommit> last_commit_;  // of begin_commit()
};

}  // namespace bunkbed
