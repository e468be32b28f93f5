// Prefetching: the window of coming batches, and the reads that bring their rows into RAM before they are used.
//
// The protocol (docs/design/architecture.md, "Plan, then execute"; docs/design/engine.md, rule 9):
//   1. expect() adds a batch to the window. From now on the cache evicts its rows last. Where the cache has room for
//      every stored row, which is so after a table that fits in RAM was opened again, none is evicted: then expect()
//      stages the batch at once, and the window stays empty and takes no memory from the cache. A batch of more rows
//      than the cache has frames is not added.
//   2. advance() ends one batch and starts the next. It stages the rows of the `depth` batches after that, nearest
//      batch first: it takes frames under the lock and queues the reads. Staging evicts no row that the staged batch,
//      or an earlier one, wants. When no frame is left, staging stops and goes on at the next advance().
//   3. The queue (store/staging.h) reads without the lock. A lookup or update of a row that is being read waits until a
//      batch has been read. Exclusive calls wait until no batch is being staged.
// Staging, eviction and forget() never change a value: lookups return the same bits.
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
  void advance(uint32_t over, uint32_t current, uint32_t depth);
  void forget(uint32_t batch);
  void stage(const int64_t* ids, size_t n);

  // ---- All below require the lock.
  // Waits until none of these rows is being read. Returns whether it waited and so released the lock.
  bool wait_for_rows(TableLock::Guard& guard, const int64_t* ids, size_t n) REQUIRES(table_.lock);
  // The same for the rows of a batch. When staging is under way, locates them.
  bool wait_for_rows(TableLock::Guard& guard, const Batch& batch) REQUIRES(table_.lock);
  // Forgets the batches, and destroys the queue with the memory that it reads into. No batch may be staging.
  void reset() REQUIRES(table_.lock);
  // The same for the queue alone, before the log's buffers change.
  void reset_queue() REQUIRES(table_.lock) { queue_.reset(); }
  uint32_t depth() const REQUIRES(table_.lock) { return ahead_.depth; }

 private:
  // These require the lock, too.
  void stage_now(TableLock::Guard& guard, const int64_t* ids, size_t n) REQUIRES(table_.lock);
  void stage_ahead() REQUIRES(table_.lock);
  template <typename AnyLoading>
  bool wait_while(TableLock::Guard& guard, const AnyLoading& any_loading) REQUIRES(table_.lock);
  size_t stage_rows(const int64_t* rows, size_t n, uint32_t batch) REQUIRES(table_.lock);

  TableState& table_;
  CompactionJob& compaction_;
  // made when first needed; destroyed before the store that it reads into
  std::unique_ptr<StagingQueue> queue_ GUARDED_BY(table_.lock);
  // How far the window has been staged, and the times that choose the depth.
  struct Ahead {
    uint32_t current = 0;  // the batch that the caller works on
    uint32_t batch = 0;    // the batch that is being staged
    size_t row = 0;        // the number of its rows that are staged
    uint32_t depth = 0;
    double since_s = 0.0;   // the time of the last advance()
    double waited_s = 0.0;  // time that calls have waited for staged rows since then
    double step_s = 0.0;    // average of a step, without waits
    double reads_s = 0.0;   // average of the reads of a batch
    uint32_t wished_depth() const;
  } ahead_ GUARDED_BY(table_.lock);
  const std::chrono::steady_clock::time_point created_ = std::chrono::steady_clock::now();
};

}  // namespace bunkbed
