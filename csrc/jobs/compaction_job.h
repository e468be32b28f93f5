// Background compaction: in slices on a thread of the I/O pool, while calls go on. Its large reads do not hold the
// lock.
#pragma once

#include "state/table_state.h"

namespace bunkbed {

class CompactionJob {
 public:
  explicit CompactionJob(TableState& table) : table_(table) {}
  CompactionJob(const CompactionJob&) = delete;
  CompactionJob& operator=(const CompactionJob&) = delete;

  // Starts compaction when it is due. When it runs already and is behind the appends, waits until it is not, so that
  // the log does not grow without bound. Requires the lock.
  void start(TableLock::Guard& guard) REQUIRES(table_.lock);
  // After a commit: compacts on this thread, unless compaction runs already and does this work, too. Takes the lock.
  void run_after_commit();

 private:
  // The analysis does not follow a guard that is released and assigned in a loop.
  void run() NO_THREAD_SAFETY_ANALYSIS;  // takes the lock

  TableState& table_;
};

}  // namespace bunkbed
