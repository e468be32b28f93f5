// Reads the rows of coming batches without the table's lock. Batches are read in the order of add(), without a gap: the
// first reads of a batch start before the last reads of the batch before it end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>

#include "base/mutex.h"
#include "store/store.h"
#include "vfs/batch_reads.h"

namespace bunkbed {

class StagingQueue final : private vfs::ReadSource {
 public:
  // Called once for each batch, from any thread, when all reads of the batch have ended. `failed`: one of these reads
  // failed. `seconds`: since the end of the batch before it, or since add() when the queue was empty.
  using Finished = std::function<void(const Store::Staging&, bool failed, double seconds)>;

  // `log`, whose staging lane the queue uses, and all that `finished` uses outlive the queue.
  StagingQueue(Log* log, size_t read_bytes, Finished finished);
  // Waits until all batches are read. The lock that `finished` takes must not be held, unless nothing is queued.
  ~StagingQueue() override;

  // Adds a batch that has reads, and returns at once. Needs no lock.
  void add(Store::Staging staging);

 private:
  struct Job {
    Store::Staging staging;
    size_t next = 0;           // the next extent of the plan to read
    std::atomic<size_t> left;  // reads that have not ended
    std::atomic<bool> failed{false};
    explicit Job(Store::Staging s) : staging(std::move(s)), left(staging.plan.extents.size()) {}
  };
  bool next(vfs::ReadOp* op) noexcept override;
  void done(const vfs::ReadOp& op, const std::byte* data, std::exception_ptr error) noexcept override;
  void finish(const Job& job, double seconds);

  Log* const log_;
  const size_t read_bytes_;
  const Finished finished_;
  Mutex mutex_;
  std::deque<std::shared_ptr<Job>> jobs_ GUARDED_BY(mutex_);  // [i] is job number first_ + i; null after its last read
  uint64_t first_ GUARDED_BY(mutex_) = 0;
  size_t turn_ GUARDED_BY(mutex_) = 0;  // index in jobs_ of the first job that may have reads to start
  // When the last batch was read, or the queue became busy.
  std::chrono::steady_clock::time_point served_ GUARDED_BY(mutex_);
  size_t finishing_ GUARDED_BY(mutex_) = 0;  // batches that were read, and whose `finished_` has not returned
  std::condition_variable idle_;             // with mutex_: finishing_ became 0
  vfs::ReadStream stream_;                   // last member: its destructor uses the others
};

}  // namespace bunkbed
