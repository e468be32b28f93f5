// A commit that was started; wait() returns when it is durable. It may outlive its table.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>

#include "base/mutex.h"

namespace bunkbed {

class PendingCommit {
 public:
  // Waits until the commit is durable and returns its epoch. Each call throws the error of a failed commit.
  uint64_t wait() {
    MutexLock lock(mutex_);
    while (!is_over_) lock.wait(over_);
    if (error_) {
      is_reported_ = true;
      std::rethrow_exception(error_);
    }
    return epoch_;
  }
  bool is_over() {
    const MutexLock guard(mutex_);
    return is_over_;
  }
  // It failed, and no wait() has thrown the error.
  bool is_unreported_failure() {
    const MutexLock guard(mutex_);
    return error_ != nullptr && !is_reported_;
  }

  void succeed(uint64_t epoch) { end(epoch, nullptr); }
  void fail(std::exception_ptr error) { end(0, std::move(error)); }

 private:
  void end(uint64_t epoch, std::exception_ptr error) {
    const MutexLock guard(mutex_);
    epoch_ = epoch;
    error_ = std::move(error);
    is_over_ = true;
    over_.notify_all();
  }

  Mutex mutex_;
  std::condition_variable over_;
  bool is_over_ GUARDED_BY(mutex_) = false;
  bool is_reported_ GUARDED_BY(mutex_) = false;
  uint64_t epoch_ GUARDED_BY(mutex_) = 0;
  std::exception_ptr error_ GUARDED_BY(mutex_);
};

}  // namespace bunkbed
