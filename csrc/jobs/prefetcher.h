// Coming batches: the window of their ids, and the reads that bring their rows into RAM ahead of time.
//
// The protocol (docs/design/architecture.md, "Plan, then execute"; docs/design/engine.md, rule 9):
//   1. expect() enters a batch into the window: from now on the cache evicts its rows last.
//   2. advance() says that one batch is over and the next one begins. Then the rows of the `depth` batches after it are
//      staged, nearest batch first: frames are taken under the lock and the reads are queued. Rows that the staged batch, or
//      one before it, wants are not evicted for this. When that leaves no frame, staging stops and goes on at the next
//      advance().
//   3. The queue (store/staging.h) reads without the lock. A lookup or update that wants a row which is being read waits
//      for the batch of that row; exclusive calls wait until nothing is being staged.
// Values never change: whatever is staged, evicted or forgotten, a lookup finds the same bits.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "jobs/compaction_job.h"
#include "state/table_state.h"
#include "store/staging.h"

namespace bunkbed {

class Prefetcher {
 public:
  static constexpr uint32_t kWindowFull = ~0u;

  Prefetcher(TableState& table, CompactionJob& compaction) : table_(table), compaction_(compaction) {}
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // ---- Calls; they take the lock. Table declares them for users.
  uint32_t expect(const int64_t* ids, size_t n, uint32_t most);
  void advance(uint32_t over, uint32_t begun, uint32_t depth);
  void forget(uint32_t batch);
  void stage(const int64_t* ids, size_t n);

  // ---- All below require the lock.
  // Waits until none of these rows is being read. Returns whether the lock was released meanwhile.
  bool wait_for_rows(TableLock::Guard& guard, const int64_t* ids, size_t n);
  // The same for the rows of a batch. Leaves them located.
  bool wait_for_rows(TableLock::Guard& guard, const Batch& batch);
  // Forgets the batches, and the queue with the memory that it reads into. Nothing may be staging.
  void reset();
  // The same for the queue alone: its memory is laid out again.
  void reset_queue() { queue_.reset(); }
  uint32_t depth() const { return ahead_.depth; }

 private:
  void stage_ahead();
  template <typename AnyLoading>
  bool wait_while(TableLock::Guard& guard, const AnyLoading& any_loading);
  size_t stage_rows(const int64_t* rows, size_t n, uint32_t batch);

  TableState& table_;
  CompactionJob& compaction_;
  std::unique_ptr<StagingQueue> queue_;  // made when first needed; destroyed before the store that it reads into
  // How far the window has been staged, and the times that the depth follows from.
  struct Ahead {
    uint32_t begun = 0;
    uint32_t batch = 0;  // being staged
    size_t row = 0;      // so many of its rows are staged
    uint32_t depth = 0;
    double since_s = 0.0;   // of the last advance()
    double waited_s = 0.0;  // since then, for staged rows
    double step_s = 0.0;    // a step without its waits
    double reads_s = 0.0;   // of a batch
    uint32_t wished_depth() const;
  } ahead_;
  const std::chrono::steady_clock::time_point created_ = std::chrono::steady_clock::now();
};

}  // namespace bunkbed
