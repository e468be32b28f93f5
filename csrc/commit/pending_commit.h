// A commit that was started; wait() returns when it is durable. It may outlive its table.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>

namespace bunkbed {

class PendingCommit {
 public:
  // Waits until the commit is durable and returns its epoch. Each call throws the error of a failed commit.
  uint64_t wait() {
    std::unique_lock lock(mutex_);
    over_.wait(lock, [this] { return is_over_; });
    if (error_) {
      is_reported_ = true;
      std::rethrow_exception(error_);
    }
    return epoch_;
  }
  bool is_over() {
    const std::lock_guard guard(mutex_);
    return is_over_;
  }
  // It failed, and no wait() has thrown the error.
  bool is_unreported_failure() {
    const std::lock_guard guard(mutex_);
    return error_ != nullptr && !is_reported_;
  }

  void succeed(uint64_t epoch) { end(epoch, nullptr); }
  void fail(std::exception_ptr error) { end(0, std::move(error)); }

 private:
  void end(uint64_t epoch, std::exception_ptr error) {
    const std::lock_guard guard(mutex_);
    epoch_ = epoch;
    error_ = std::move(error);
    is_over_ = true;
    over_.notify_all();
  }

  std::mutex mutex_;  // guards the members below
  std::condition_variable over_;
  bool is_over_ = false;
  bool is_reported_ = false;
  uint64_t epoch_ = 0;
  std::exception_ptr error_;
};

}  // namespace bunkbed
