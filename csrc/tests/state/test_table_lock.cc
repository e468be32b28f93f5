// The three modes of a table's lock: which caller waits for which, and that no caller starves.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "state/table_lock.h"
#include "tests/check.h"

using namespace bunkbed;

namespace {

constexpr int kRounds = 300;

// Waits until `claim` is true under the lock.
template <typename Claim>
void wait_until(TableLock* lock, const Claim& claim) {
  for (;;) {
    {
      const auto guard = lock->work();
      if (claim()) return;
    }
    std::this_thread::yield();
  }
}

// Gives other threads time to start waiting. Without it a test passes too, but detects less.
void wait_briefly() { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }

}  // namespace

TEST(table_lock_excludes_all_other_holders) {
  TableLock lock("t");
  int inside = 0, most = 0, total = 0;  // not atomic, so that ThreadSanitizer reports an overlap
  std::vector<std::thread> threads;
  for (int way = 0; way < 6; ++way) {
    threads.emplace_back([&, way] {
      for (int round = 0; round < kRounds; ++round) {
        const auto guard = way % 3 == 0 ? lock.work() : way % 3 == 1 ? lock.exclusive() : lock.slice();
        most = std::max(most, ++inside);
        ++total;
        --inside;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(most, 1);
  CHECK_EQ(total, 6 * kRounds);
}

TEST(table_lock_of_a_moved_guard_is_released_once) {
  TableLock lock("t");
  TableLock::Guard guard = lock.work();
  TableLock::Guard other = std::move(guard);
  CHECK(!guard);
  CHECK(static_cast<bool>(other));
  guard.unlock();
  other.unlock();
  other = lock.slice();
  other = TableLock::Guard();
  CHECK(!other);
  (void)lock.work();
}

TEST(table_lock_exclusive_waits_for_staging_compaction_and_a_commit) {
  for (const auto commits : {TableLock::Commits::kEnded, TableLock::Commits::kMayRun}) {
    TableLock lock("t");
    {
      const auto guard = lock.work();
      lock.begin_batch();
      lock.begin_batch();
      lock.begin_compaction();
      lock.begin_commit();
    }
    bool was_staging = true, was_compacting = true, was_committing = true;
    std::atomic<bool> entered{false};
    std::thread call([&] {
      const auto guard = lock.exclusive(commits);
      was_staging = lock.is_staging();
      was_compacting = lock.is_compacting();
      was_committing = lock.is_committing();
      entered = true;
    });
    const auto end = [&](void (TableLock::*what)()) {
      CHECK(!entered);
      const auto guard = lock.work();
      (lock.*what)();
    };
    if (commits == TableLock::Commits::kEnded) end(&TableLock::end_commit);
    wait_until(&lock, [&] { return lock.is_settling(); });
    end(&TableLock::end_batch);
    end(&TableLock::end_compaction);
    end(&TableLock::end_batch);
    call.join();
    CHECK(!was_staging);
    CHECK(!was_compacting);
    CHECK_EQ(was_committing, commits == TableLock::Commits::kMayRun);
    CHECK(!lock.is_settling());
  }
}

TEST(table_lock_work_enters_while_staging_compaction_and_a_commit_run) {
  TableLock lock("t");
  {
    const auto guard = lock.work();
    lock.begin_batch();
    lock.begin_compaction();
    lock.begin_commit();
  }
  std::thread other([&] {
    (void)lock.work();
    (void)lock.slice();
  });
  other.join();
}

TEST(table_lock_no_commit_starts_while_the_call_with_the_ticket_waits_for_staging) {
  TableLock lock("t");
  {
    const auto guard = lock.work();
    lock.begin_batch();
  }
  bool was_committing = true;
  std::thread call([&] {
    const auto guard = lock.exclusive();
    was_committing = lock.is_committing();
  });
  wait_until(&lock, [&] { return lock.is_settling(); });
  std::atomic<bool> may_end{false};
  std::thread commit([&] {
    {
      auto guard = lock.work();
      lock.wait_for_commit(guard);
      lock.begin_commit();
    }
    while (!may_end) std::this_thread::yield();
    const auto guard = lock.slice();
    lock.end_commit();
  });
  wait_briefly();
  bool is_committing = false;
  {
    const auto guard = lock.work();
    is_committing = lock.is_committing();
    lock.end_batch();
  }
  if (is_committing) may_end = true;
  call.join();
  may_end = true;
  commit.join();
  CHECK(!is_committing);
  CHECK(!was_committing);
}

TEST(table_lock_staging_waits_for_calls_that_wait_for_rows) {
  TableLock lock("t");
  bool has_rows = false, had_rows = false;
  std::thread stager, reader;
  {
    auto guard = lock.work();
    lock.begin_batch();
    const TableLock::WaitsForRows waits(&lock);
    CHECK(lock.is_waited_for());
    stager = std::thread([&] {
      auto own = lock.work();
      lock.wait_until_not_waited_for(own);
      had_rows = has_rows;
    });
    reader = std::thread([&] {
      wait_briefly();  // the stager has the lock meanwhile
      const auto own = lock.work();
      lock.end_batch();
    });
    lock.wait_for_batch(guard);
    has_rows = true;
  }
  stager.join();
  reader.join();
  CHECK(had_rows);
}

TEST(table_lock_waiting_for_a_batch_ends_with_the_next_one) {
  TableLock lock("t");
  std::thread reader;
  auto guard = lock.work();
  lock.begin_batch();
  lock.begin_batch();
  reader = std::thread([&] {
    const auto own = lock.work();
    lock.end_batch();
  });
  lock.wait_for_batch(guard);
  CHECK(lock.is_staging());
  guard.unlock();
  reader.join();
}

TEST(table_lock_waiting_for_compaction_ends_with_it_or_with_the_slice_that_is_enough) {
  for (const bool is_over : {false, true}) {
    TableLock lock("t");
    bool is_enough = false;
    auto guard = lock.work();
    lock.begin_compaction();
    std::thread job([&] {
      {
        const auto slice = lock.slice();
        lock.end_compaction_slice();  // not enough
      }
      const auto slice = lock.slice();
      is_enough = !is_over;
      if (is_over) lock.end_compaction();
      lock.end_compaction_slice();
    });
    lock.wait_for_compaction(guard, [&] { return is_enough; });
    CHECK_EQ(lock.is_compacting(), !is_over);
    CHECK_EQ(is_enough, !is_over);
    guard.unlock();
    job.join();
  }
}

TEST(table_lock_a_slice_enters_after_the_calls_that_waited_before_it) {
  for (int round = 0; round < kRounds; ++round) {
    TableLock lock("t");
    std::vector<char> order;
    auto guard = lock.work();
    std::atomic<int> coming{0};
    std::vector<std::thread> threads;
    for (int call = 0; call < 3; ++call) {
      threads.emplace_back([&] {
        ++coming;
        const auto own = lock.work();
        order.push_back('c');
      });
    }
    while (coming < 3 || lock.calls_waiting() < 3) std::this_thread::yield();
    threads.emplace_back([&] {
      const auto own = lock.slice();
      order.push_back('s');
    });
    std::this_thread::yield();
    guard.unlock();
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(std::string(order.begin(), order.end()), std::string("cccs"));
  }
}

TEST(table_lock_calls_do_not_starve_slices_nor_slices_calls) {
  TableLock lock("t");
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int way = 0; way < 4; ++way) {
    threads.emplace_back([&, way] {
      while (!is_over) (void)(way < 3 ? lock.work() : lock.slice());
    });
  }
  for (int committer = 0; committer < 2; ++committer) {
    threads.emplace_back([&] {
      while (!is_over) {
        {
          auto guard = lock.work();
          lock.wait_for_commit(guard);
          lock.begin_commit();
        }
        const auto guard = lock.slice();
        lock.end_commit();
      }
    });
  }
  for (int round = 0; round < kRounds; ++round) {
    (void)lock.slice();
    (void)lock.work();
    (void)lock.exclusive();
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
}

// A wait releases the lock for slices, too, even for one that waited before the call.
TEST(table_lock_a_slice_enters_while_a_call_waits_for_the_commit) {
  for (int round = 0; round < 20; ++round) {
    TableLock lock("t");
    auto guard = lock.work();
    lock.begin_commit();
    std::thread commit([&] {
      const auto own = lock.slice();
      lock.end_commit();
    });
    wait_briefly();
    std::thread call([&] {
      auto own = lock.work();
      lock.wait_for_commit(own);
    });
    while (lock.calls_waiting() == 0) std::this_thread::yield();
    guard.unlock();
    call.join();
    commit.join();
    CHECK(!lock.is_committing());
  }
}

TEST(table_lock_a_pause_of_a_commit_ends_by_time_or_when_a_call_waits_for_the_commit) {
  using std::chrono::milliseconds;
  TableLock lock("t");
  auto guard = lock.work();
  lock.begin_commit();
  guard.unlock();
  std::thread call;
  bool was_committing = true;
  std::chrono::steady_clock::duration paused{};
  {
    auto slice = lock.slice();
    const auto start = std::chrono::steady_clock::now();
    lock.pause_commit(slice, milliseconds(20));
    CHECK(std::chrono::steady_clock::now() - start >= milliseconds(20));
    call = std::thread([&] {
      auto own = lock.work();
      lock.wait_for_commit(own);
      was_committing = lock.is_committing();
    });
    const auto again = std::chrono::steady_clock::now();
    lock.pause_commit(slice, std::chrono::minutes(1));  // the call starts to wait
    lock.pause_commit(slice, std::chrono::minutes(1));  // it waits
    paused = std::chrono::steady_clock::now() - again;
    lock.end_commit();
  }
  call.join();
  CHECK(!was_committing);
  CHECK(paused < std::chrono::minutes(1));
}

TEST(table_lock_of_a_parent_is_refused_in_a_child_which_destroys_it_without_waiting) {
  auto lock = std::make_unique<TableLock>("orders");
  {
    const auto guard = lock->work();
    lock->begin_commit();
  }
  std::thread call([&] { (void)lock->exclusive(); });
  std::this_thread::sleep_for(
      std::chrono::milliseconds(20));  // usually the call waits by then; the test holds either way
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      (void)lock->work();
    } catch (const Error& error) {
      const bool says_it =
          std::string(error.what()).find("'orders' was opened before this process was forked") != std::string::npos;
      status = error.kind() == ErrorKind::kClosed && says_it ? 0 : 2;
    }
    lock.reset();  // while a thread of the parent waits on it
    ::_exit(status);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  {
    const auto guard = lock->work();
    lock->end_commit();
  }
  call.join();
}
