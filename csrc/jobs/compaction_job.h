// Compaction in the background: in slices on a thread of the I/O pool, while calls go on. Its large reads run without the lock.
#pragma once

#include "state/table_state.h"

namespace bunkbed {

class CompactionJob {
 public:
  explicit CompactionJob(TableState& table) : table_(table) {}
  CompactionJob(const CompactionJob&) = delete;
  CompactionJob& operator=(const CompactionJob&) = delete;

  // Starts it when compaction is due. When it runs already and is behind the appends, waits for its end instead: the log must
  // not outgrow it. Requires the lock.
  void start(TableLock::Guard& guard);
  // Runs it on this thread after a commit, unless it runs already and takes the work over. Requires that the lock is not held.
  void run_after_commit();

 private:
  void run();

  TableState& table_;
};

}  // namespace bunkbed
