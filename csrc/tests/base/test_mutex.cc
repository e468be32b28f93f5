// The order of locks: taken upwards it holds, taken downwards or twice in one level it ends the process.
#include "base/mutex.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <thread>

#include "tests/check.h"

using namespace bunkbed;

namespace {

// Whether `take` ends a process by abort().
template <typename Take>
bool aborts(const Take& take) {
  const pid_t child = ::fork();
  if (child == 0) {
    (void)std::freopen("/dev/null", "w", stderr);
    take();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

void take(LockLevel first, LockLevel second) {
  Mutex outer(first), inner(second);
  const MutexLock one(outer);
  const MutexLock two(inner);
}

}  // namespace

TEST(mutex_levels_are_taken_in_their_order) {
  const LockLevel levels[] = {LockLevel::kTable, LockLevel::kPart, LockLevel::kLocal, LockLevel::kMemory,
                              LockLevel::kTesting};
  for (const LockLevel first : levels) {
    for (const LockLevel second : levels) {
      const bool is_wrong = second <= first;
      CHECK_EQ(aborts([&] { take(first, second); }), is_wrong);
    }
  }
}

TEST(mutex_may_be_taken_again_after_it_was_released) {
  Mutex part(LockLevel::kPart), other(LockLevel::kPart);
  MutexLock lock(part);
  lock.unlock();
  {
    const MutexLock next(other);
  }
  lock.lock();
  CHECK(aborts([&] { const MutexLock next(other); }));
}

TEST(mutex_levels_are_those_of_a_thread) {
  Mutex part(LockLevel::kPart), other(LockLevel::kPart);
  const MutexLock lock(part);
  bool is_taken = false;
  std::thread([&] {
    const MutexLock next(other);
    is_taken = true;
  }).join();
  CHECK(is_taken);
}

TEST(mutex_wait_releases_it) {
  Mutex mutex;
  std::condition_variable changed;
  bool is_set = false;
  std::thread setter;
  {
    MutexLock lock(mutex);
    setter = std::thread([&] {
      const MutexLock own(mutex);  // while the other thread waits
      is_set = true;
      changed.notify_all();
    });
    while (!is_set) lock.wait(changed);
    lock.wait_for(changed, std::chrono::milliseconds(1));
  }
  setter.join();
  CHECK(is_set);
}
