// A filesystem that can hold back reads, writes or syncs, so that a test decides how long work is under way. It can
// also delay each write and sync, so that other threads run in between.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "state/table_lock.h"
#include "tests/check.h"
#include "tests/sandbox.h"

namespace bunkbed::test {

class GatedVfs final : public FaultVfs {
 public:
  explicit GatedVfs(std::chrono::microseconds delay = {}) : delay_(delay) {}
  // Holds back operations of this kind on files until release(). A table waits for them when it is destroyed.
  void hold(Op op) { gate_->hold(op); }
  void release() { gate_->release(); }
  // Returns when so many operations are held back.
  void wait_until_waiting(size_t operations = 1) { gate_->wait_until_waiting(operations); }

  // Calls release() in its destructor, so also when a test fails.
  class Release {
   public:
    explicit Release(GatedVfs& vfs) : vfs_(vfs) {}
    ~Release() { vfs_.release(); }
    Release(const Release&) = delete;
    Release& operator=(const Release&) = delete;

   private:
    GatedVfs& vfs_;
  };

  std::shared_ptr<vfs::File> create(const std::string& path) override { return gated(FaultVfs::create(path)); }
  std::shared_ptr<vfs::File> create_small(const std::string& path) override {
    return gated(FaultVfs::create_small(path));
  }
  std::shared_ptr<vfs::File> open(const std::string& path, bool direct) override {
    return gated(FaultVfs::open(path, direct));
  }

 private:
  class Gate {
   public:
    void hold(Op op) {
      const std::lock_guard guard(mutex_);
      held_ = op;
      is_held_ = true;
    }
    void release() {
      const std::lock_guard guard(mutex_);
      is_held_ = false;
      changed_.notify_all();
    }
    void pass(Op op) {
      std::unique_lock lock(mutex_);
      if (!is_held_ || held_ != op) return;
      ++waiting_;
      changed_.notify_all();
      changed_.wait(lock, [this] { return !is_held_; });
      --waiting_;
    }
    void wait_until_waiting(size_t operations) {
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, std::chrono::minutes(1), [&] { return waiting_ >= operations; })) return;
      fail(__FILE__, __LINE__, "no operation came to the gate");
    }

   private:
    std::mutex mutex_;  // guards the members below
    std::condition_variable changed_;
    Op held_ = Op::kRead;
    bool is_held_ = false;
    size_t waiting_ = 0;
  };
  class File final : public vfs::File {
   public:
    File(std::shared_ptr<vfs::File> below, std::shared_ptr<Gate> gate, std::chrono::microseconds delay)
        : below_(std::move(below)), gate_(std::move(gate)), delay_(delay) {}
    void read(void* data, size_t n, uint64_t offset) override {
      gate_->pass(Op::kRead);
      below_->read(data, n, offset);
    }
    void write(const void* data, size_t n, uint64_t offset) override {
      gate_->pass(Op::kWrite);
      wait();
      below_->write(data, n, offset);
    }
    void sync() override {
      gate_->pass(Op::kSync);
      wait();
      below_->sync();
    }
    uint64_t size() override { return below_->size(); }
    uint32_t read_alignment() const override { return below_->read_alignment(); }
    const std::string& path() const override { return below_->path(); }
    bool is_at(const std::string& path) override { return below_->is_at(path); }
    Identity identity() override { return below_->identity(); }

   private:
    void wait() const {
      if (delay_.count() > 0) std::this_thread::sleep_for(delay_);
    }

    const std::shared_ptr<vfs::File> below_;
    const std::shared_ptr<Gate> gate_;
    const std::chrono::microseconds delay_;
  };
  std::shared_ptr<vfs::File> gated(std::shared_ptr<vfs::File> file) {
    return std::make_shared<File>(std::move(file), gate_, delay_);
  }

  const std::chrono::microseconds delay_;
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
};

// Calls release() when a call waits for rows that are being read, at the latest in its destructor.
class ReleaseWhenWaitedFor {
 public:
  ReleaseWhenWaitedFor(GatedVfs& vfs, TableLock& lock)
      : thread_([this, &vfs, &lock] {
          for (bool is_waited_for = false; !is_waited_for && !is_over_;) {
            const auto guard = lock.work();
            is_waited_for = lock.is_waited_for();
          }
          vfs.release();
        }) {}
  ~ReleaseWhenWaitedFor() {
    is_over_ = true;
    thread_.join();
  }
  ReleaseWhenWaitedFor(const ReleaseWhenWaitedFor&) = delete;
  ReleaseWhenWaitedFor& operator=(const ReleaseWhenWaitedFor&) = delete;

 private:
  std::atomic<bool> is_over_{false};
  std::thread thread_;  // uses the above
};

}  // namespace bunkbed::test
