#include "base/workers.h"

#include "base/float_mode.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/mutex.h"

namespace bunkbed {

namespace {

// Spins until done() or for kTime.
template <typename Done>
void spin_until(const Done& done) {
  constexpr auto kTime = std::chrono::microseconds(60);
  const auto start = std::chrono::steady_clock::now();
  while (!done()) {
    for (int i = 0; i < 16; ++i) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    if (std::chrono::steady_clock::now() - start > kTime) return;
  }
}

}  // namespace

void Loop::work() {
  const DefaultFloatMode mode;
  for (;;) {
    const size_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
    if (begin >= n_) return;
    try {
      body_(begin, std::min(n_, begin + grain_));
    } catch (...) {
      const MutexLock guard(error_mutex_);
      if (!error_) error_ = std::current_exception();
      next_.store(n_, std::memory_order_relaxed);
    }
  }
}

void Loop::rethrow() {
  if (error_) std::rethrow_exception(error_);
}

Pool::Pool(size_t num_threads, bool spins) : spins_(spins) {
  threads_.reserve(num_threads);
  for (size_t i = 0; i < num_threads; ++i) {
    try {
      threads_.emplace_back([this] { main(); });
    } catch (const std::system_error& error) {
      // With fewer threads the pool is slower, but correct. Without any, a submitted job would never run.
      if (threads_.empty()) {
        throw Error(ErrorKind::kSystem, std::string("cannot start a thread: ") + error.what(), error.code().value());
      }
      break;
    }
  }
}

Pool::~Pool() {
  {
    const MutexLock guard(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Pool::main() {
  MutexLock lock(mutex_);
  for (;;) {
    while (!stopping_ && loops_.empty() && jobs_.empty()) lock.wait(wake_);
    if (!jobs_.empty()) {
      std::function<void()> job;
      if (--jobs_.front().times > 0) {
        job = jobs_.front().run;
      } else {
        job = std::move(jobs_.front().run);
        jobs_.pop_front();
      }
      lock.unlock();
      job();
      job = nullptr;  // its captures must not be destroyed under the lock
      lock.lock();
      continue;
    }
    if (!loops_.empty()) {
      // Copied: the queue may drop its reference while this thread works.
      const std::shared_ptr<Loop> loop = loops_.front();
      ++loop->helpers_;
      if (--loop->wanted_ == 0 || loop->exhausted()) loops_.pop_front();
      num_loops_.store(loops_.size(), std::memory_order_relaxed);
      lock.unlock();
      loop->work();
      lock.lock();
      if (--loop->helpers_ == 0) done_.notify_all();
      if (spins_ && loops_.empty() && jobs_.empty() && !stopping_) {
        lock.unlock();
        spin_until([this] { return num_loops_.load(std::memory_order_relaxed) != 0; });
        lock.lock();
      }
      continue;
    }
    if (stopping_) return;
  }
}

void Pool::start(const std::shared_ptr<Loop>& loop, size_t helpers) {
  if (helpers == 0) return;
  {
    const MutexLock guard(mutex_);
    loop->wanted_ = helpers;
    loops_.push_back(loop);
    num_loops_.store(loops_.size(), std::memory_order_relaxed);
  }
  wake(helpers);
}

void Pool::join(Loop& loop) {
  loop.work();
  MutexLock lock(mutex_);
  loop.wanted_ = 0;
  std::erase_if(loops_, [&loop](const auto& queued) { return queued.get() == &loop; });
  num_loops_.store(loops_.size(), std::memory_order_relaxed);
  if (spins_ && loop.helpers_ != 0) {
    lock.unlock();
    spin_until([&loop] { return loop.helpers_.load(std::memory_order_relaxed) == 0; });
    lock.lock();  // the helpers' writes are visible from here on, whether or not they ended in time
  }
  while (loop.helpers_ != 0) lock.wait(done_);
}

void Pool::run(size_t n, size_t grain, size_t helpers, const Loop::Body& body) {
  const size_t blocks = (n + grain - 1) / grain;
  const auto loop = std::make_shared<Loop>(n, grain, body);
  start(loop, std::min({helpers, threads_.size(), blocks > 0 ? blocks - 1 : 0}));
  join(*loop);
  loop->rethrow();
}

void Pool::submit(std::function<void()> job, size_t times) {
  if (times == 0) return;
  {
    const MutexLock guard(mutex_);
    jobs_.push_back({std::move(job), times});
  }
  wake(times);
}

// Wakes no more threads than there is work for: of 64 threads woken for four reads, sixty would contend for the lock.
void Pool::wake(size_t wanted) {
  if (wanted >= threads_.size()) return wake_.notify_all();
  for (size_t i = 0; i < wanted; ++i) wake_.notify_one();
}

namespace {

size_t default_threads() {
  if (const char* text = std::getenv("BUNKBED_NUM_THREADS")) {
    const long value = std::strtol(text, nullptr, 10);
    if (value > 0) return static_cast<size_t>(value);
  }
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return static_cast<size_t>(CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<size_t>& thread_setting() {
  static std::atomic<size_t> value{default_threads()};
  return value;
}

// One pool per process. A forked child gets a new one and leaves the parent's object alone: its threads do not exist in
// the child, so it can be neither used nor joined.
class PoolOfProcess {
 public:
  Pool& get(size_t size, bool spins = false) {
    const MutexLock guard(mutex_);
    if (pool_ == nullptr || owner_ != ::getpid() || size > size_) {
      if (pool_ != nullptr && owner_ == ::getpid()) retired_.push_back(pool_);  // other threads may be using it
      pool_ = new Pool(size, spins);
      size_ = size;
      owner_ = ::getpid();
    }
    return *pool_;
  }

 private:
  Mutex mutex_;
  Pool* pool_ = nullptr;
  std::vector<Pool*> retired_;
  size_t size_ = 0;
  pid_t owner_ = 0;
};

}  // namespace

size_t num_threads() { return thread_setting().load(std::memory_order_relaxed); }
void set_num_threads(size_t n) { thread_setting().store(std::max<size_t>(1, n), std::memory_order_relaxed); }

namespace {
std::atomic<size_t> shared_loops{0};
}

size_t loops_shared() { return shared_loops.load(std::memory_order_relaxed); }

namespace {

// Whether this thread runs an item of parallel_items() that shares the threads with other items.
thread_local bool is_shared_item = false;

}  // namespace

void parallel_for(size_t n, size_t grain, const Loop::Body& body) {
  const size_t threads = num_threads();
  if (threads <= 1 || n <= grain || is_shared_item) {
    if (n > 0) body(0, n);
    return;
  }
  shared_loops.fetch_add(1, std::memory_order_relaxed);
  // Leaked on purpose: threads must not be joined while the interpreter unloads.
  static auto* pool = new PoolOfProcess;
  pool->get(threads - 1, true).run(n, grain, threads - 1, body);
}

void parallel_items(const std::vector<size_t>& work, size_t grain, const std::function<void(size_t item)>& body) {
  const size_t total = std::accumulate(work.begin(), work.end(), size_t{0});
  std::vector<std::exception_ptr> errors(work.size());
  const auto run = [&](size_t item) {
    try {
      body(item);
    } catch (...) {
      errors[item] = std::current_exception();
    }
  };
  std::vector<size_t> shared;
  for (size_t item = 0; item < work.size(); ++item) {
    if (work[item] > std::max(grain, total / num_threads())) {
      run(item);
    } else {
      shared.push_back(item);
    }
  }
  // Blocks of about `grain`. A single block stays on the caller, and its items are as if run alone.
  const size_t block = std::max<size_t>(1, shared.size() * grain / std::max<size_t>(1, total));
  if (shared.size() <= block) {
    for (const size_t item : shared) run(item);
    shared.clear();
  }
  parallel_for(shared.size(), block, [&](size_t from, size_t to) {
    const bool was_shared = std::exchange(is_shared_item, true);
    for (size_t i = from; i < to; ++i) run(shared[i]);
    is_shared_item = was_shared;
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

Pool& io_pool() {
  static auto* pool = new PoolOfProcess;
  return pool->get(kIoThreads);
}

Pool& write_pool() {
  static auto* pool = new PoolOfProcess;
  return pool->get(kWriteThreads);
}

}  // namespace bunkbed
