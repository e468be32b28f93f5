// Threads: a few for compute, many for blocking reads, a few for writes. The pools are process-wide and start at first
// use. A forked child starts its own (threads do not survive a fork).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace bunkbed {

// A loop whose blocks any thread may claim. The caller always works on it too and can finish it alone. A helper that
// starts late finds no block to claim.
class Loop {
 public:
  using Body = std::function<void(size_t begin, size_t end)>;
  Loop(size_t n, size_t grain, const Body& body) : n_(n), grain_(grain), body_(body) {}
  void work();  // claim and run blocks until none is left
  // Throws the first exception of any block, if there was one. Requires that no thread works on the loop any more.
  void rethrow() NO_THREAD_SAFETY_ANALYSIS;
  bool exhausted() const { return next_.load(std::memory_order_relaxed) >= n_; }

 private:
  friend class Pool;
  const size_t n_;
  const size_t grain_;
  const Body& body_;
  std::atomic<size_t> next_{0};
  Mutex error_mutex_{LockLevel::kLocal};
  std::exception_ptr error_ GUARDED_BY(error_mutex_);
  std::atomic<size_t> helpers_{0};  // threads inside work(); changed under the pool's mutex, read without it
  size_t wanted_ = 0;               // guarded by the pool's mutex: helpers that may still join
};

class Pool {
 public:
  // With `spins`, a thread that finished a loop polls for the next one for a moment before it sleeps: the loops of one
  // operation follow each other within microseconds, and waking a thread takes tens of microseconds.
  explicit Pool(size_t num_threads, bool spins = false);
  ~Pool();
  // Runs body over [0, n) in blocks of `grain` on the caller and at most `helpers` threads.
  void run(size_t n, size_t grain, size_t helpers, const Loop::Body& body);
  // Runs `job` on `times` threads of the pool, or that often on fewer; in no order relative to other jobs.
  void submit(std::function<void()> job, size_t times = 1);

 private:
  struct Job {
    std::function<void()> run;
    size_t times;
  };
  void main();
  void start(const std::shared_ptr<Loop>& loop, size_t helpers);
  void join(Loop& loop);
  void wake(size_t wanted);  // wakes that many threads, or all
  const bool spins_;
  std::atomic<size_t> num_loops_{0};  // loops_.size(), for threads that read it without the mutex
  Mutex mutex_;                       // guards also the counters of every Loop
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<std::shared_ptr<Loop>> loops_ GUARDED_BY(mutex_);
  std::deque<Job> jobs_ GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
  bool stopping_ GUARDED_BY(mutex_) = false;
};

// One T for each thread that works on a loop at the same time. A thread takes one for a block and gives it back.
template <typename T>
class PerThread {
 public:
  explicit PerThread(std::function<std::unique_ptr<T>()> make) : make_(std::move(make)) {}
  template <typename Use>
  void with_one(const Use& use) {
    T* one = nullptr;
    {
      const MutexLock guard(mutex_);
      if (idle_.empty()) {
        all_.push_back(make_());
        idle_.push_back(all_.back().get());
      }
      one = idle_.back();
      idle_.pop_back();
    }
    use(*one);
    const MutexLock guard(mutex_);
    idle_.push_back(one);
  }
  // Requires that no thread works on the loop any more.
  const std::vector<std::unique_ptr<T>>& all() const NO_THREAD_SAFETY_ANALYSIS { return all_; }

 private:
  const std::function<std::unique_ptr<T>()> make_;
  Mutex mutex_{LockLevel::kLocal};
  std::vector<std::unique_ptr<T>> all_ GUARDED_BY(mutex_);
  std::vector<T*> idle_ GUARDED_BY(mutex_);
};

// Compute threads used by one loop, the caller included. Default: the processors this process may use, or the
// environment's BUNKBED_NUM_THREADS.
size_t num_threads();
void set_num_threads(size_t n);

// Runs body over [0, n) on up to num_threads() threads; inline when n <= grain.
void parallel_for(size_t n, size_t grain, const Loop::Body& body);
// Runs body(i) for each item i; work[i] says how large an item is, and `grain` how much work is worth a thread. Items
// that are more than a thread's share, and all items of little work, run one after another, with their own loops on all
// threads. Threads share the others, each with its own loops inline. Runs every item, also after one that throws; then
// throws the exception of the first.
void parallel_items(const std::vector<size_t>& work, size_t grain, const std::function<void(size_t item)>& body);
// Returns how many loops were offered to other threads so far; a small batch offers none.
size_t loops_shared();

// The pool whose threads may block in reads.
Pool& io_pool();
inline constexpr size_t kIoThreads = 64;
// The pool for writes: a stream of reads may use all threads of io_pool() until it ends.
Pool& write_pool();
inline constexpr size_t kWriteThreads = 4;

}  // namespace bunkbed
