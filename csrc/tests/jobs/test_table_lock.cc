// The three ways to take a table's lock: who waits for whom, and that nobody waits for ever.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "jobs/table_lock.h"
#include "tests/check.h"

using namespace bunkbed;

namespace {

constexpr int kRounds = 300;

// Until `claim` holds with the lock.
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

}  // namespace

TEST(table_lock_is_had_by_one_at_a_time) {
  TableLock lock("t");
  int inside = 0, most = 0, total = 0;  // plain: the thread sanitizer sees who has the lock
  std::vector<std::thread> threads;
  for (int way = 0; way < 6; ++way) {
    threads.emplace_back([&, way] {
      for (int round = 0; round < kRounds; ++round) {
        const auto guard = way % 3 == 0 ? lock.work() : way % 3 == 1 ? lock.alone() : lock.slice();
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

TEST(table_lock_of_a_guard_that_was_moved_is_given_up_once) {
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

TEST(table_lock_alone_waits_for_staging_compaction_and_a_commit) {
  for (const auto beside : {TableLock::Beside::kNothing, TableLock::Beside::kCommit}) {
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
      const auto guard = lock.alone(beside);
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
    if (beside == TableLock::Beside::kNothing) end(&TableLock::end_commit);
    wait_until(&lock, [&] { return lock.should_rest(); });  // so that compaction ends, and no batch begins
    end(&TableLock::end_batch);
    end(&TableLock::end_compaction);
    end(&TableLock::end_batch);
    call.join();
    CHECK(!was_staging);
    CHECK(!was_compacting);
    CHECK_EQ(was_committing, beside == TableLock::Beside::kCommit);
    CHECK(!lock.should_rest());
  }
}

TEST(table_lock_work_goes_on_beside_staging_compaction_and_a_commit) {
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

TEST(table_lock_no_commit_begins_while_a_call_whose_turn_it_is_waits_for_staging) {
  TableLock lock("t");
  {
    const auto guard = lock.work();
    lock.begin_batch();
  }
  bool was_committing = true;
  std::thread call([&] {
    const auto guard = lock.alone();
    was_committing = lock.is_committing();
  });
  wait_until(&lock, [&] { return lock.should_rest(); });
  std::thread commit([&] {
    {
      auto guard = lock.work();
      lock.wait_for_commit(guard);
      lock.begin_commit();
    }
    const auto guard = lock.slice();
    lock.end_commit();
  });
  {
    const auto guard = lock.work();
    lock.end_batch();
  }
  call.join();
  commit.join();
  CHECK(!was_committing);
}

TEST(table_lock_who_stages_waits_for_who_waits_for_rows) {
  TableLock lock("t");
  bool is_over = false;
  std::thread stager;
  {
    const auto guard = lock.work();
    const TableLock::WaitsForRows waits(&lock);
    CHECK(lock.is_waited_for());
    stager = std::thread([&] {
      auto own = lock.work();
      lock.wait_for_the_waiting(own);
      CHECK(is_over);
    });
    is_over = true;
  }
  stager.join();
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

TEST(table_lock_a_slice_goes_after_the_calls_that_wait_when_it_comes) {
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

TEST(table_lock_slices_end_beside_calls_without_end_and_calls_beside_slices) {
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
    (void)lock.alone();
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
}

// What waits with the lock lets go of it, for slices too.
TEST(table_lock_a_slice_enters_while_a_call_waits_for_what_it_will_end) {
  TableLock lock("t");
  {
    const auto guard = lock.work();
    lock.begin_commit();
  }
  std::thread commit;
  {
    auto guard = lock.work();
    commit = std::thread([&] {
      const auto own = lock.slice();
      lock.end_commit();
    });
    lock.wait_for_commit(guard);
    CHECK(!lock.is_committing());
  }
  commit.join();
}

TEST(table_lock_of_a_parent_is_refused_in_a_child_and_destroyed_there_at_once) {
  auto lock = std::make_unique<TableLock>("orders");
  {
    const auto guard = lock->work();
    lock->begin_commit();
  }
  std::thread call([&] { (void)lock->alone(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that it waits; the child's part is the same if not
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      (void)lock->work();
    } catch (const Error& error) {
      const bool says_it = std::string(error.what()).find("'orders' was opened before this process was forked") != std::string::npos;
      status = error.kind() == ErrorKind::kClosed && says_it ? 0 : 2;
    }
    lock.reset();  // with a thread of the parent's waiting
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
