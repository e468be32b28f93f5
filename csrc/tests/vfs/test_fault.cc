// Fails every operation in turn. After any error, acknowledged changes are there bit for bit, and a failed call has
// changed nothing.
#include <algorithm>
#include <optional>

#include "maintenance/check.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr int64_t kRows = 64;
constexpr uint32_t kDim = 1100;  // records above 4 KiB: few records fill chunks and segments

TableSpec spec() { return whole_numbers(kRows, kDim); }
size_t smallest_ram() { return minimum_ram(spec(), 0, true); }

// Updates with evictions, commits, a snapshot, compaction, a rewind. Each step may fail. `now` and `commits` have the
// expected rows.
class Scenario {
 public:
  Scenario(vfs::Vfs& vfs, const std::string& path) : vfs_(vfs), path_(path) {}

  static constexpr int kSteps = 27;
  static bool is_drop(int step) { return kinds()[step] == 'd'; }

  void run(int step) {
    switch (kinds()[step]) {
      case 'n':
        table_ = Table::create(vfs_, path_, "t", spec(), smallest_ram());
        break;
      case 'u': {
        std::vector<int64_t> ids;
        std::vector<float> grads;
        for (int64_t i = 0; i < 14; ++i) {
          ids.push_back((step * 11 + i * 3) % kRows);
          grads.push_back(static_cast<float>(step + 1 + i));
        }
        update(table_.get(), ids, grads);
        apply(&now_, ids, grads);
        break;
      }
      case 'c':
      case 'k':
        in_flight_ = now_;
        table_->commit(std::nullopt, kinds()[step] == 'k' ? "a" : "");
        acknowledge();
        if (kinds()[step] == 'k') kept_ = last_;
        break;
      case 'm':
        table_->compact();
        break;
      case 'w':
        table_->write_dirty();
        break;
      case 'r':
        in_flight_ = kept_;
        table_->rewind("a", std::nullopt);
        now_ = kept_;
        acknowledge();
        break;
      case 'd':
        in_flight_ = last_;
        table_->drop("a");
        in_flight_.reset();
        break;
    }
  }

  // Whether the failed step was a rewind that took effect.
  bool is_rewound(int step) {
    if (kinds()[step] != 'r') return false;
    try {
      check_table_is(table_.get(), *in_flight_, "", false);
    } catch (const std::exception&) {
      return false;
    }
    now_ = kept_;
    acknowledge();
    return true;
  }

  Table* table() { return table_.get(); }
  void close() { table_.reset(); }
  void reopen() { table_ = open_table(vfs_, path_, smallest_ram()); }
  const Rows& now() const { return now_; }
  const Rows& last() const { return last_; }
  const std::optional<Rows>& in_flight() const { return in_flight_; }
  // After a reopening the rows are those of `rows`.
  void went_back_to(const Rows& rows) {
    now_ = last_ = rows;
    in_flight_.reset();
  }
  void acknowledge() {
    last_ = now_;
    in_flight_.reset();
  }

 private:
  static const char* kinds() { return "nuuucuwuukuwuumuucuwumruwud"; }

  vfs::Vfs& vfs_;
  std::string path_;
  std::unique_ptr<Table> table_;
  Rows now_, last_, kept_;
  std::optional<Rows> in_flight_;
};

// Opens the table as a new process would. Returns which of the two states it has.
Rows check_recovered(const std::string& path, const Rows& last, const std::optional<Rows>& in_flight,
                     const std::string& when) {
  const auto problems = check_table(vfs::posix(), path);
  if (!problems.empty()) fail(__FILE__, __LINE__, when + ": " + problems.front());
  const auto table = open_table(vfs::posix(), path, smallest_ram());
  try {
    check_table_is(table.get(), last, when);
    return last;
  } catch (const Failure&) {
    if (!in_flight.has_value()) throw;
  }
  check_table_is(table.get(), *in_flight, when + " (the commit in flight)");
  return *in_flight;
}

uint64_t operations(bool count_reads) {
  const Sandbox sandbox;
  FaultVfs vfs;
  vfs.count_reads(count_reads);
  Scenario scenario(vfs, sandbox / "t");
  uint64_t evictions = 0, compactions = 0;  // sums over the parts between rewinds, which reset the counts
  for (int step = 0; step < Scenario::kSteps; ++step) {
    scenario.run(step);
    evictions = std::max(evictions, scenario.table()->stats().store.evictions);
    compactions = std::max(compactions, scenario.table()->stats().compactions);
  }
  const uint64_t count = vfs.count();
  check_table_is(scenario.table(), scenario.now(), "without a failure");
  CHECK(evictions > 100);
  CHECK(compactions > 0);
  return count;
}

void die_at(uint64_t k, bool count_reads) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;
  vfs.count_reads(count_reads);
  vfs.fail_at(k, EIO, true);
  Scenario scenario(vfs, path);
  const std::string when = "dead from operation " + std::to_string(k) + " on";
  for (int step = 0; step < Scenario::kSteps; ++step) {
    try {
      scenario.run(step);
    } catch (const Error&) {
      if (step == 0) return;  // no table was made, and create() reported that
      break;
    }
  }
  scenario.close();
  check_recovered(path, scenario.last(), scenario.in_flight(), when);
}

// One failure: afterwards the table works, or reports that it must be reopened and then has a commit.
void stumble_at(uint64_t k, int error_number, bool count_reads) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;
  vfs.count_reads(count_reads);
  vfs.fail_at(k, error_number, false);
  Scenario scenario(vfs, path);
  const std::string when = "after failure of operation " + std::to_string(k);
  for (int step = 0; step < Scenario::kSteps; ++step) {
    for (int attempt = 0;; ++attempt) {
      if (attempt == 3) fail(__FILE__, __LINE__, when + ": step " + std::to_string(step) + " fails again and again");
      try {
        scenario.run(step);
        break;
      } catch (const Error& error) {
        if (step == 0) {
          if (error.kind() == ErrorKind::kExists) {
            scenario.reopen();  // create() failed after the table was made
            break;
          }
          continue;
        }
        if (error.kind() == ErrorKind::kInvalid && scenario.is_drop(step)) break;  // the failed drop had taken effect
        // Either only the clean-up after a completed rewind failed, or nothing was changed.
        if (scenario.is_rewound(step)) break;
        if (error.kind() != ErrorKind::kReadOnly && error.kind() != ErrorKind::kBroken) {
          try {
            check_table_is(scenario.table(), scenario.now(), when, false);
            continue;  // nothing was changed; try again
          } catch (const Error& second) {
            if (second.kind() != ErrorKind::kReadOnly && second.kind() != ErrorKind::kBroken) throw;
          }
        }
        scenario.close();
        scenario.went_back_to(check_recovered(path, scenario.last(), scenario.in_flight(), when));
        scenario.reopen();
        // Repeating the step is right in both cases.
      }
    }
  }
  vfs.heal();  // the number of operations of background compaction varies, so the failure may still be due
  check_table_is(scenario.table(), scenario.now(), when + ", at the end");
  scenario.table()->commit("{\"end\":1}", "");
  scenario.close();
  check_recovered(path, scenario.now(), std::nullopt, when + ", reopened");
}

}  // namespace

TEST(fault_death_at_every_operation) {
  const uint64_t changes = operations(false);
  for (uint64_t k = 1; k <= changes; ++k) die_at(k, false);
}

TEST(fault_one_failure_of_every_change) {
  const uint64_t changes = operations(false);
  for (uint64_t k = 1; k <= changes; ++k) stumble_at(k, k % 2 == 0 ? ENOSPC : EIO, false);
}

TEST(fault_one_failure_among_reads) {
  const uint64_t all = operations(true);
  for (uint64_t k = 1; k <= all; k += 29) stumble_at(k, EIO, true);
}

TEST(fault_full_disk_changes_no_value) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const auto table = Table::create(vfs, sandbox / "t", "t", spec(), smallest_ram());
  Rows rows;
  std::vector<int64_t> ids;
  std::vector<float> grads;
  for (int64_t id = 0; id < kRows; ++id) {
    ids.push_back(id);
    grads.push_back(static_cast<float>(id + 1));
  }
  update(table.get(), ids, grads);
  apply(&rows, ids, grads);
  table->commit(std::nullopt, "");
  int failures = 0;
  for (int round = 0; round < 6; ++round) {
    vfs.fail_all(Op::kWrite, ENOSPC);
    for (int step = 0; step < 20; ++step) {
      const std::vector<int64_t> some = {(step * 7) % kRows, (step * 7 + 1) % kRows, (step * 7 + 2) % kRows};
      const std::vector<float> some_grads = {1, 2, 3};
      const int64_t before = table->step();
      try {
        update(table.get(), some, some_grads);
        apply(&rows, some, some_grads);
      } catch (const Error& error) {
        ++failures;
        CHECK_EQ(error.error_number(), ENOSPC);
        CHECK_EQ(table->step(), before);
      }
    }
    vfs.heal();
    check_table_is(table.get(), rows, "when space is back", round % 2 == 0);
  }
  CHECK(failures > 10);
  table->commit(std::nullopt, "");
  table->close();
  check_recovered(sandbox / "t", rows, std::nullopt, "after a full disk");
}

TEST(fault_failed_sync_makes_the_table_read_only) {
  for (const Op op : {Op::kSync, Op::kSyncDirectory}) {
    const Sandbox sandbox;
    FaultVfs vfs;
    auto table = Table::create(vfs, sandbox / "t", "t", spec(), smallest_ram());
    Rows rows;
    update(table.get(), {1, 2}, {5, 6});
    apply(&rows, {1, 2}, {5, 6});
    table->commit(std::nullopt, "");
    const Rows committed = rows;
    update(table.get(), {2, 3}, {1, 1});
    apply(&rows, {2, 3}, {1, 1});
    vfs.fail_all(op, EIO);
    CHECK_THROWS(table->commit(std::nullopt, ""), ErrorKind::kSync, "injected");
    vfs.heal();
    CHECK_THROWS(update(table.get(), {1}, {1}), ErrorKind::kReadOnly, "read-only until reopened");
    CHECK_THROWS(table->commit(std::nullopt, ""), ErrorKind::kReadOnly, "read-only until reopened");
    std::vector<float> values(2 * kDim);
    const std::vector<int64_t> ids = {2, 3};
    table->lookup(ids.data(), 2, true, values.data());
    check_values(rows, ids, values, kDim, "read-only");
    table.reset();
    check_recovered(sandbox / "t", committed, rows, "after a failed sync");
  }
}
