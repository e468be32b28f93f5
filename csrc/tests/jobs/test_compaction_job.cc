// Compaction next to calls: when the job starts and ends, and which call waits for it.
#include "jobs/compaction_job.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/gated.h"
#include "tests/model.h"
#include "tests/no_compaction_slack.h"
#include "tests/parts.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr int64_t kRows = 16'000;  // four segments of 1 MiB

// A table with all rows in RAM. In the first segments of its log one record of four is live.
struct Written {
  Written() {
    table->add_one(ids);
    store().flush();
    append(3 * kRows / 4);
    store().log()->rotate();
    store().compaction().forgive();
    CHECK(store().compactor().is_needed());
  }
  Store& store() { return *table->state.store; }
  TableLock& lock() { return table->state.lock; }
  uint64_t moved() { return store().compactor().records_moved(); }
  // Appends the records of `rows` rows again, as if the rows had changed. Requires the lock.
  void append(int64_t rows) {
    std::vector<uint32_t> frames;
    for (int64_t id = 0; rows > 0; ++id) {
      if (id % 4 == 0) continue;
      frames.push_back(frame_of(store().directory().find(id)));
      --rows;
    }
    store().mark_dirty(frames.data(), frames.size());
    store().flush();
  }
  void append_until_behind() {
    while (!store().compaction().is_behind()) append(3 * kRows / 4);
  }
  void start() {
    auto guard = lock().work();
    table->compaction.start(guard);
  }
  void wait_for_the_end() {
    auto guard = lock().work();
    lock().wait_for_compaction(guard, [] { return false; });
  }
  bool is_running() {
    const auto guard = lock().work();
    return lock().is_compacting();
  }
  void check_rows() {
    std::vector<float> values(ids.size() * spec.dim);
    table->reader.lookup(ids.data(), ids.size(), true, values.data());
    for (const float value : values) CHECK_EQ(value, 1.0f);
  }

  const NoCompactionSlack no_slack;
  const TableSpec spec = whole_numbers(kRows, 60);
  const std::vector<int64_t> ids = range(0, kRows);
  const Sandbox sandbox;
  GatedVfs vfs;
  const std::unique_ptr<Parts> table = new_parts(vfs, sandbox / "t", spec, Parts::with_ram(size_t{24} << 20));
  const GatedVfs::Release release{vfs};  // before the table ends
};

}  // namespace

TEST(compaction_job_starts_only_where_something_was_appended) {
  Written log;
  log.start();
  CHECK(!log.is_running());
  log.table->compaction.run_after_commit();
  CHECK_EQ(log.moved(), uint64_t{0});
}

TEST(compaction_job_runs_next_to_calls_and_ends) {
  Written log;
  {
    auto guard = log.lock().work();
    log.append(500);
    log.table->compaction.start(guard);
    CHECK(log.lock().is_compacting());  // it needs the lock, which this call has
    CHECK_EQ(log.moved(), uint64_t{0});
    CHECK(!log.store().compaction().begin());  // there is one job
  }
  log.check_rows();
  log.wait_for_the_end();
  const uint64_t moved = log.moved();
  CHECK(moved >= 490 && moved <= 500);  // a fourth of four times 500
  CHECK(!log.is_running());
  log.check_rows();
  log.start();  // all debt is paid
  CHECK(!log.is_running());
  CHECK_EQ(log.moved(), moved);
}

TEST(compaction_job_reads_without_the_lock) {
  Written log;
  log.vfs.hold(Op::kRead);
  {
    const auto guard = log.lock().work();
    log.append(3000);
  }
  log.start();
  log.vfs.wait_until_waiting();
  log.check_rows();  // calls go on
  CHECK(log.is_running());
  log.start();  // the one that runs is enough
  CHECK(log.is_running());
  CHECK_EQ(log.moved(), uint64_t{0});
  log.vfs.release();
  log.wait_for_the_end();
  log.check_rows();
}

// Without this wait the log would grow faster than compaction shrinks it.
TEST(compaction_job_that_is_behind_is_waited_for) {
  Written log;
  log.vfs.hold(Op::kRead);
  {
    const auto guard = log.lock().work();
    log.append(1000);
  }
  log.start();
  log.vfs.wait_until_waiting();
  {
    const auto guard = log.lock().work();
    CHECK(!log.store().compaction().is_behind());
    log.append_until_behind();
  }
  std::atomic<bool> has_lock{false};
  bool was_behind = true;
  std::thread call([&] {
    auto guard = log.lock().work();
    has_lock = true;
    log.table->compaction.start(guard);
    was_behind = log.store().compaction().is_behind();
  });
  while (!has_lock) std::this_thread::yield();
  log.vfs.release();
  call.join();
  CHECK(!was_behind);
  log.check_rows();
}

// An exclusive call ends the job at its next slice. The next job pays the rest of the debt.
TEST(compaction_job_ends_early_for_an_exclusive_call_unless_it_is_behind) {
  for (const bool is_behind : {false, true}) {
    Written log;
    log.vfs.hold(Op::kRead);
    {
      const auto guard = log.lock().work();
      log.append(7000);
    }
    log.start();
    log.vfs.wait_until_waiting();
    if (is_behind) {
      const auto guard = log.lock().work();
      log.append_until_behind();
    }
    uint64_t moved = 0;
    bool is_still_behind = false, is_left = false;
    std::thread call([&] {
      const auto guard = log.lock().exclusive();
      moved = log.moved();
      is_still_behind = log.store().compaction().is_behind();
      is_left = log.store().compaction().begin();
      log.store().compaction().end();
    });
    for (bool is_settling = false; !is_settling;) {
      const auto guard = log.lock().work();
      is_settling = log.lock().is_settling();
    }
    log.vfs.release();
    call.join();
    CHECK(!is_still_behind);
    if (!is_behind) {
      CHECK(moved <= 512);  // of a slice
      CHECK(is_left);
    }
    log.start();
    log.wait_for_the_end();
    log.check_rows();
  }
}

TEST(compaction_job_after_a_commit_pays_for_what_the_commit_appended) {
  Written log;
  {
    const auto guard = log.lock().work();
    Store& store = log.store();
    std::vector<uint32_t> frames;
    for (int64_t id = 1; id < kRows; id += 2) frames.push_back(frame_of(store.directory().find(id)));
    store.mark_dirty(frames.data(), frames.size());
    store.freeze();
    while (store.write_frozen(1u << 20)) {
    }
    store.log()->finish_ending();
    CHECK(!store.compaction().begin());  // it is no debt yet
  }
  log.table->compaction.run_after_commit();
  CHECK(!log.is_running());
  CHECK(log.store().compactor().segments_compacted() > 0);
  log.check_rows();
}

// A running job takes over the commit's debt. The commit's thread does not wait for it.
TEST(compaction_job_after_a_commit_leaves_the_work_to_one_that_runs) {
  Written log;
  log.vfs.hold(Op::kRead);
  {
    const auto guard = log.lock().work();
    log.append(500);
  }
  log.start();
  log.vfs.wait_until_waiting();
  {
    const auto guard = log.lock().work();
    log.store().compaction().add_commit_debt(400);
  }
  log.table->compaction.run_after_commit();  // returns although no read does
  CHECK(log.is_running());
  log.vfs.release();
  log.wait_for_the_end();
  const auto guard = log.lock().work();
  log.store().compaction().count_commit_debt();
  CHECK(!log.store().compaction().begin());  // the debt of the commit was counted, and is paid
}

// The job skips a segment that it cannot read. The next call reports a failed append.
TEST(compaction_job_that_fails_loses_nothing) {
  for (const Op op : {Op::kRead, Op::kWrite}) {
    Written log;
    {
      const auto guard = log.lock().work();
      log.append(3000);
      log.store().log()->drain();
    }
    log.vfs.fail_all(op, EIO);
    log.start();
    log.wait_for_the_end();
    log.vfs.heal();
    CHECK(!log.is_running());
    log.check_rows();
    {
      const auto guard = log.lock().work();
      log.store().flush();
      log.store().log()->drain();
    }
    log.check_rows();
    log.table->committer.commit(std::nullopt, "");
    log.check_rows();
  }
}
