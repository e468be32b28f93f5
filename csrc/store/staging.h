// Reads of coming batches, on their way while the caller does something else. Batches are read in the order they came
// in, one behind the other without a gap: while one waits for its last reads, the next one's have begun.
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
  // Called once for each batch when none of its reads is under way, from any thread: `failed` when one of them failed,
  // `seconds` since its reads were the next ones to be made.
  using Finished = std::function<void(const Store::Staging&, bool failed, double seconds)>;

  // The log, whose staging lane it uses, outlives the queue; so does whatever `finished` uses.
  StagingQueue(Log* log, size_t read_bytes, Finished finished);
  // Waits until everything is read. The lock that `finished` takes must not be held, unless nothing is queued.
  ~StagingQueue() override;

  // Takes over a batch that has reads. Returns at once.
  void add(Store::Staging staging);

 private:
  struct Job {
    Store::Staging staging;
    size_t next = 0;              // of the plan's extents
    std::atomic<size_t> left;     // reads not done
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
  std::deque<std::shared_ptr<Job>> jobs_ GUARDED_BY(mutex_);  // [i] is job number first_ + i; null once finished
  uint64_t first_ GUARDED_BY(mutex_) = 0;
  size_t turn_ GUARDED_BY(mutex_) = 0;  // of jobs_: the first that may have reads to hand out
  std::chrono::steady_clock::time_point served_ GUARDED_BY(mutex_);  // when the last batch was finished, or the queue became busy
  size_t finishing_ GUARDED_BY(mutex_) = 0;           // batches that were read and whose `finished` has not returned
  std::condition_variable idle_;   // with mutex_: finishing_ became 0
  vfs::ReadStream stream_;  // last: its destructor uses the rest
};

}  // namespace bunkbed
