// When compaction works and how much: in proportion to the appends of others, not to its own.
#include "store/compaction_scheduler.h"

#include <utility>

#include "tests/check.h"
#include "tests/no_compaction_slack.h"
#include "tests/store/log_parts.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr uint64_t kPace = 4;      // records looked at for an appended one
constexpr uint64_t kSlice = 512;   // records that one take() looks at
constexpr int64_t kRows = 24'000;  // fifteen segments

// In the first segments one record of four is live, so compaction is needed, and it moves a fourth of the records that
// it looks at.
struct MostlyDead : LogParts {
  explicit MostlyDead(uint64_t slots = kSlots, size_t ram_bytes = 1) : LogParts(slots, ram_bytes) {
    append(0, kRows);
    log.rotate();
    for (int64_t row = 0; row < kRows; ++row) {
      if (row % 4 != 0) append(row);
    }
    log.rotate();
    scheduler.forgive();
    CHECK(compactor.is_needed());
  }

  uint64_t moved() const { return compactor.records_moved(); }
  // Appends records of new rows: no record dies.
  void append_new(int64_t n) {
    append(next_new, next_new + n);
    next_new += n;
  }
  // One part of a background job; false when it is over.
  bool job_goes_on() {
    Compactor::Read read;
    if (!scheduler.plan(&read)) return false;
    compactor.execute(&read);
    scheduler.take(std::move(read));
    return true;
  }
  // Runs the job to its end, and returns how many records it moved.
  uint64_t run_job() {
    const uint64_t before = moved();
    for (int part = 0; job_goes_on(); ++part) CHECK(part < 10'000);
    scheduler.end();
    return moved() - before;
  }

  const NoCompactionSlack no_slack;
  CompactionScheduler scheduler{&log, &compactor, &plan};
  int64_t next_new = 1'000'000;
};

void check_about(uint64_t moved, uint64_t looked, const std::string& when) {
  if (moved + 2 >= looked / 4 && moved <= looked / 4 + 2) return;
  fail(__FILE__, __LINE__, when + ": moved " + std::to_string(moved) + " of " + std::to_string(looked) + " records");
}

}  // namespace

TEST(compaction_without_debt_moves_nothing) {
  MostlyDead log;
  for (int time = 0; time < 3; ++time) log.scheduler.compact_some();
  CHECK_EQ(log.moved(), uint64_t{0});
  CHECK(!log.scheduler.begin());
  CHECK_EQ(log.compactor.segments_compacted(), uint64_t{0});
}

TEST(compaction_is_in_proportion_to_appends) {
  MostlyDead log;
  for (const int64_t appended : {10, 1, 40, 150, 7}) {
    const uint64_t before = log.moved();
    log.append_new(appended);
    log.scheduler.compact_some();
    check_about(log.moved() - before, kPace * static_cast<uint64_t>(appended), std::to_string(appended) + " records");
  }
  log.check_rows();
}

// Several appends count together.
TEST(compaction_debt_adds_up) {
  MostlyDead log;
  for (int time = 0; time < 5; ++time) log.append_new(20);
  log.scheduler.compact_some();
  check_about(log.moved(), kPace * 100, "five times 20 records");
}

// The compactor's own appends create no debt. Otherwise compaction would go on while it is needed.
TEST(compaction_of_its_own_appends_ends) {
  MostlyDead log;
  log.append_new(100);
  log.scheduler.compact_some();
  const uint64_t moved = log.moved();
  CHECK(moved >= 100);
  for (int time = 0; time < 10; ++time) log.scheduler.compact_some();
  CHECK_EQ(log.moved(), moved);
  CHECK(!log.scheduler.begin());

  log.append_new(1000);
  CHECK(log.scheduler.begin());
  const uint64_t by_job = log.run_job();
  check_about(by_job, kPace * 1000, "a job for 1000 records");
  CHECK(!log.scheduler.begin());
  CHECK(log.compactor.is_needed());
}

TEST(compaction_takes_slices_while_other_calls_run) {
  MostlyDead log(8 * LogParts::kSlots, 10u << 20);
  CHECK(log.plan.log.chunk_bytes / log.log.record_disk_bytes() > 2 * kSlice);
  log.append_new(1000);
  CHECK(log.scheduler.begin());
  uint64_t before = 0;
  for (int part = 0; log.job_goes_on(); ++part) {
    CHECK(part < 1000);
    CHECK(log.moved() - before <= kSlice / 4 + 1);  // not a chunk at once
    before = log.moved();
    if (part % 3 == 0) log.check_rows();
  }
  log.scheduler.end();
  check_about(before, kPace * 1000, "all slices");
}

// A job also pays for records that are appended while it runs.
TEST(compaction_job_pays_for_appends_that_come_meanwhile) {
  MostlyDead log;
  log.append_new(300);
  CHECK(log.scheduler.begin());
  CHECK(log.job_goes_on());
  log.append_new(200);
  log.run_job();
  check_about(log.moved(), kPace * 500, "300 records and 200 more");
}

TEST(compaction_of_a_commits_records_waits_for_its_end) {
  for (const bool by_job : {true, false}) {
    MostlyDead log;
    constexpr uint64_t kCommitted = 200;
    log.log.begin_next_epoch(kCommitted);
    for (uint64_t i = 0; i < kCommitted; ++i) {  // as Store does for frozen records
      const int64_t row = log.next_new++;
      const std::array<std::byte, LogParts::kPayload> record{};
      log.directory->reserve(log.directory->new_rows(&row, 1));
      log.directory->set(row, entry_of_position(log.log.append_ending(row, record.data())));
    }
    log.scheduler.add_commit_debt(kCommitted);
    log.log.finish_ending();
    log.scheduler.compact_some();
    CHECK(!log.scheduler.begin());
    CHECK_EQ(log.moved(), uint64_t{0});
    log.append_new(10);  // to the next epoch: this counts at once
    log.scheduler.compact_some();
    check_about(log.moved(), kPace * 10, "10 records during a commit");
    const uint64_t before = log.moved();
    log.scheduler.count_commit_debt();
    if (by_job) {
      CHECK(log.scheduler.begin());
      log.run_job();
    } else {
      for (int step = 0; step < 2; ++step) log.scheduler.compact_some();
    }
    check_about(log.moved() - before, kPace * kCommitted, "the commit's records");
    log.scheduler.count_commit_debt();  // once only
    CHECK(!log.scheduler.begin());
  }
}

TEST(compaction_forgives_all_debt) {
  MostlyDead log;
  log.append_new(100);
  log.scheduler.add_commit_debt(0);
  log.log.begin_next_epoch(0);
  log.log.finish_ending();
  log.scheduler.forgive();
  log.scheduler.count_commit_debt();
  log.scheduler.compact_some();
  CHECK(!log.scheduler.begin());
  CHECK_EQ(log.moved(), uint64_t{0});
  // A commit's debt too.
  log.append_new(100);
  log.scheduler.add_commit_debt(100);
  log.scheduler.forgive();
  log.scheduler.count_commit_debt();
  log.scheduler.compact_some();
  CHECK_EQ(log.moved(), uint64_t{0});
  log.append_new(1);
  log.scheduler.compact_some();
  check_about(log.moved(), kPace, "one record");
}

TEST(compaction_has_one_job_and_leaves_it_alone) {
  MostlyDead log;
  log.append_new(50);
  CHECK(log.scheduler.begin());
  CHECK(!log.scheduler.begin());
  log.append_new(50);
  log.scheduler.compact_some();
  CHECK_EQ(log.moved(), uint64_t{0});
  Compactor::Read read;
  CHECK(log.scheduler.plan(&read));
  log.scheduler.compact_some();  // the job has the compactor's buffer
  CHECK_EQ(log.moved(), uint64_t{0});
  log.compactor.execute(&read);
  log.scheduler.take(std::move(read));
  log.scheduler.end();  // it was stopped
  log.scheduler.compact_some();
  check_about(log.moved(), kPace * 100, "what the job left");
}

TEST(compaction_job_does_not_begin_where_nothing_is_worth_it) {
  const NoCompactionSlack no_slack;
  LogParts parts;
  CompactionScheduler scheduler(&parts.log, &parts.compactor, &parts.plan);
  parts.append(0, 3000);  // all live
  CHECK(!parts.compactor.is_needed());
  CHECK(!scheduler.begin());
  scheduler.compact_some();
  CHECK_EQ(parts.compactor.records_moved(), uint64_t{0});
  // begin() dropped that debt: only later appends count.
  parts.log.rotate();
  const uint64_t before = parts.log.stats().written_records;
  for (int64_t row = 0; row < 3000; row += 2) parts.append(row);
  parts.log.rotate();
  CHECK(scheduler.begin());
  const uint64_t debt = kPace * (parts.log.stats().written_records - before);
  for (int part = 0; part < 1000; ++part) {
    Compactor::Read read;
    if (!scheduler.plan(&read)) break;
    parts.compactor.execute(&read);
    scheduler.take(std::move(read));
  }
  scheduler.end();
  CHECK(parts.compactor.records_moved() > 0);
  CHECK(parts.compactor.records_moved() <= debt);
  parts.check_rows();
}

TEST(compaction_is_behind_when_appends_are_four_segments_ahead) {
  MostlyDead log;
  const auto bound = static_cast<int64_t>(4 * log.log.segment_bytes() / log.log.stride());
  CHECK(!log.scheduler.is_behind());
  log.append_new(bound);
  CHECK(!log.scheduler.is_behind());
  log.append_new(1);
  CHECK(log.scheduler.is_behind());
  CHECK(log.scheduler.begin());
  CHECK(log.scheduler.is_behind());
  for (int part = 0; part < 5; ++part) CHECK(log.job_goes_on());
  CHECK(!log.scheduler.is_behind());
  log.scheduler.end();
  log.scheduler.forgive();
  CHECK(!log.scheduler.is_behind());
}

// Deleted rows of many segments: they are debt, but no call waits until it is paid, and a step pays a slice of it.
TEST(compaction_is_not_behind_because_of_tombstones) {
  constexpr size_t kSlice = 512;
  MostlyDead log;
  const auto bound = static_cast<int64_t>(4 * log.log.segment_bytes() / log.log.stride());
  const std::vector<int64_t> gone(static_cast<size_t>(2 * bound), int64_t{1} << 40);
  log.log.append_others(gone.data(), nullptr, nullptr, gone.size());
  CHECK(!log.scheduler.is_behind());
  log.append_new(1);
  CHECK(!log.scheduler.is_behind());
  log.scheduler.compact_some();
  CHECK(log.moved() > 0);
  check_about(log.moved(), kPace + kSlice, "what a step pays");
  log.append_new(bound + 1);
  CHECK(log.scheduler.is_behind());
  CHECK(log.scheduler.begin());
  for (int part = 0; log.scheduler.is_behind() && part < 1000; ++part) CHECK(log.job_goes_on());
  CHECK(!log.scheduler.is_behind());
  CHECK(log.job_goes_on());  // with the debt of the tombstones
  log.scheduler.end();
}

// A call that needs the table alone stops a job. The next step pays a slice of what is left, not all of it.
TEST(compaction_of_what_a_job_left_takes_no_step_long) {
  MostlyDead log;
  log.append_new(1000);
  CHECK(log.scheduler.begin());
  log.scheduler.end();  // it was stopped
  log.append_new(10);
  log.scheduler.compact_some();
  check_about(log.moved(), kPace * 10 + 512, "what the first step pays");
  CHECK(log.scheduler.begin());
  check_about(log.moved() + log.run_job(), kPace * 1010, "what the next job pays");
}

TEST(compaction_of_all_returns_what_it_moved) {
  MostlyDead log;
  const uint64_t bytes = log.compactor.total_bytes();
  const uint64_t moved = log.scheduler.compact_all();
  CHECK(moved > 0);
  CHECK_EQ(moved, log.moved());
  CHECK(!log.compactor.is_needed());
  CHECK(log.compactor.total_bytes() < bytes);
  CHECK_EQ(log.scheduler.compact_all(), uint64_t{0});
  log.check_rows();
  log.append(0, kRows);
  const uint64_t more = log.scheduler.compact_all();
  CHECK_EQ(moved + more, log.moved());
  log.check_rows();
}

TEST(compaction_merges_small_segments_and_owes_nothing_for_it) {
  const NoCompactionSlack no_slack;
  LogParts parts;
  CompactionScheduler scheduler(&parts.log, &parts.compactor, &parts.plan);
  for (int64_t row = 0; row < 100; ++row) {
    parts.append(row);
    parts.log.rotate();
  }
  CHECK_EQ(parts.log.segments().size(), size_t{100});
  scheduler.merge_segments();
  CHECK(parts.log.segments().size() <=
        Compactor::most_segments(parts.compactor.total_bytes(), parts.log.segment_bytes()));
  CHECK(parts.compactor.records_moved() > 0);
  const uint64_t moved = parts.compactor.records_moved();
  scheduler.compact_some();
  CHECK(!scheduler.begin());
  CHECK_EQ(parts.compactor.records_moved(), moved);
  parts.check_rows();
  MostlyDead log;
  log.append_new(100);
  log.scheduler.merge_segments();
  log.scheduler.compact_some();
  CHECK_EQ(log.moved(), uint64_t{0});
}

TEST(compaction_without_a_log_does_nothing) {
  const auto directory = make_hashed_directory();
  Cache cache(8, 16);
  Compactor compactor(directory.get(), &cache, nullptr);
  const MemoryPlan plan = plan_memory(0, 8, 1, 512, false);
  CompactionScheduler scheduler(nullptr, &compactor, &plan);
  scheduler.compact_some();
  scheduler.merge_segments();
  scheduler.forgive();
  scheduler.count_commit_debt();
  CHECK(!scheduler.begin());
  Compactor::Read read;
  CHECK(!scheduler.plan(&read));
  CHECK_EQ(scheduler.compact_all(), uint64_t{0});
}
