// Mutexes that know their place in the order of locks (docs/design/concurrency.md), and the attributes of Clang's
// thread-safety analysis, which `make lint` runs (packaging/thread_safety.py).
//
// Builds with assertions check at each lock that the thread holds only locks of lower levels, and end the process where
// it does not. A wrong order is found at the first call that takes the locks so, not at the first deadlock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#if defined(__clang__)
#define BUNKBED_ATTRIBUTE(x) __attribute__((x))
#else
#define BUNKBED_ATTRIBUTE(x)
#endif
#define CAPABILITY(name) BUNKBED_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY BUNKBED_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(lock) BUNKBED_ATTRIBUTE(guarded_by(lock))
#define REQUIRES(...) BUNKBED_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) BUNKBED_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) BUNKBED_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) BUNKBED_ATTRIBUTE(release_capability(__VA_ARGS__))
// Of a function that returns the guard of a lock. The analysis does not follow a guard that is moved.
#define RETURNS_LOCKED(...) ACQUIRE(__VA_ARGS__) NO_THREAD_SAFETY_ANALYSIS
// For a body that the analysis cannot follow; say why.
#define NO_THREAD_SAFETY_ANALYSIS BUNKBED_ATTRIBUTE(no_thread_safety_analysis)

namespace bunkbed {

// A thread takes locks in this order, and at most one of each level.
enum class LockLevel : uint8_t {
  kTable,   // TableLock
  kPart,    // of one object: a log, a device map, a queue, a pool, the manifests, a pending commit
  kLocal,   // of the results of one call
  kMemory,  // blocks that the process keeps
  kTesting  // failpoints and backends that fail or lose power
};

// Per thread. They do nothing in builds without assertions.
#ifdef NDEBUG
inline void enter_lock(LockLevel) {}
inline void leave_lock(LockLevel) {}
#else
void enter_lock(LockLevel level);
void leave_lock(LockLevel level);
#endif

class CAPABILITY("mutex") Mutex {
 public:
  explicit Mutex(LockLevel level = LockLevel::kPart) : level_(level) {}
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  // For fork(), which takes and releases it in different functions.
  void lock() ACQUIRE() {
    enter_lock(level_);
    mutex_.lock();
  }
  void unlock() RELEASE() {
    mutex_.unlock();
    leave_lock(level_);
  }

 private:
  friend class MutexLock;
  std::mutex mutex_;
  const LockLevel level_;
};

// Holds a mutex until it is destroyed or unlock() is called.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : level_(mutex.level_) {
    enter_lock(level_);
    lock_ = std::unique_lock(mutex.mutex_);
  }
  ~MutexLock() RELEASE() {
    if (lock_.owns_lock()) leave_lock(level_);
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  void unlock() RELEASE() {
    lock_.unlock();
    leave_lock(level_);
  }
  void lock() ACQUIRE() {
    enter_lock(level_);
    lock_.lock();
  }
  // Releases the mutex while it waits. Call it in a loop over the condition: the analysis does not follow a predicate.
  void wait(std::condition_variable& changed) { changed.wait(lock_); }
  // The same, until `most` has passed at the latest.
  void wait_for(std::condition_variable& changed, std::chrono::milliseconds most) { changed.wait_for(lock_, most); }

 private:
  const LockLevel level_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace bunkbed
