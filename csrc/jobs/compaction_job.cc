#include "jobs/compaction_job.h"

#include <utility>

#include "base/workers.h"

namespace bunkbed {

// Not on the caller's thread: its large reads wait behind those of staging, for longer than a step of a small model.
void CompactionJob::start(TableLock::Guard& guard) {
  CompactionScheduler& compaction = table_.store->compaction();
  if (table_.lock.is_compacting() && compaction.is_behind()) {
    table_.lock.wait_for_compaction(guard, [&]() NO_THREAD_SAFETY_ANALYSIS { return !compaction.is_behind(); });
    return;
  }
  if (!compaction.begin()) return;
  table_.lock.begin_compaction();
  try {
    io_pool().submit([this] { run(); });
  } catch (...) {
    table_.lock.end_compaction();
    compaction.end();
    throw;
  }
}

void CompactionJob::run_after_commit() {
  {
    const auto guard = table_.lock.slice();
    table_.store->compaction().count_commit_debt();
    if (table_.lock.is_compacting() || !table_.store->compaction().begin()) return;
    table_.lock.begin_compaction();
  }
  run();
}

// An exclusive caller cancels compaction unless it is behind. Without this exception, on a busy machine, calls could
// cancel every compaction before its first slice, and the log would grow without bound.
void CompactionJob::run() {
  auto guard = table_.lock.slice();
  CompactionScheduler& compaction = table_.store->compaction();
  const auto may_go_on = [&]()
                             NO_THREAD_SAFETY_ANALYSIS { return !table_.lock.is_settling() || compaction.is_behind(); };
  // After a failed write the log keeps the bytes; the next append tries again and reports the failure.
  try {
    for (Compactor::Read read; may_go_on() && compaction.plan(&read);) {
      guard.unlock();
      table_.store->compactor().execute(&read);
      guard = table_.lock.slice();
      compaction.take(std::move(read));
      table_.lock.end_compaction_slice();
    }
  } catch (const std::exception&) {
    if (!guard) guard = table_.lock.slice();
  }
  compaction.end();
  table_.lock.end_compaction();
}

}  // namespace bunkbed
