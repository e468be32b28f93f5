// A scan reads ahead. Its rows and errors must not depend on when, or whether, these reads end.
#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "tests/check.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"
#include "vfs/fault.h"

using namespace bunkbed;
using namespace bunkbed::test;
using vfs::Fault;

namespace {

constexpr int64_t kRows = 3000;
constexpr uint32_t kDim = 64;

// Rows that were written several times, in a log of many chunks with some dead records.
Rows write_rows(FaultVfs& vfs, const std::string& path, size_t more_ram = 0) {
  const TableSpec spec = whole_numbers(kRows, kDim);
  const auto table = Table::create(vfs, path, "t", spec, minimum_ram(spec, 0, true) + more_ram);
  Sampler sampler(9);
  Rows rows;
  for (int step = 0; step < 40; ++step) {
    std::vector<int64_t> ids(250);
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % kRows);
    const std::vector<float> grads(ids.size(), 1.0f);
    update(table.get(), ids, grads);
    apply(&rows, ids, grads);
  }
  table->commit(std::nullopt, "");
  return rows;
}

struct Met {
  std::vector<int64_t> ids;
  std::vector<float> values;
};

Met scan_all(Table* table, size_t at_once) {
  Scan scan(table, {0});
  Met met;
  std::vector<int64_t> ids(at_once);
  std::vector<float> values(at_once * kDim);
  float* const out[] = {values.data()};
  while (const size_t n = scan.next(at_once, ids.data(), out)) {
    met.ids.insert(met.ids.end(), ids.begin(), ids.begin() + static_cast<ptrdiff_t>(n));
    met.values.insert(met.values.end(), values.begin(), values.begin() + static_cast<ptrdiff_t>(n * kDim));
  }
  return met;
}

size_t reader_ram() { return minimum_ram(whole_numbers(kRows, kDim), kRows, true) + (256u << 10); }

}  // namespace

TEST(scan_is_the_same_however_long_its_reads_take) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const Rows rows = write_rows(vfs, sandbox / "t");
  const auto table = open_table(vfs, sandbox / "t", reader_ram(), false);
  const Met first = scan_all(table.get(), 100);
  CHECK_EQ(first.ids.size(), rows.size());
  check_values(rows, first.ids, first.values, kDim, "undisturbed");
  vfs.set_delay(0.003);
  for (const uint64_t every : {2, 3, 5}) {
    vfs.set_fault(every, Fault::kDelay);
    vfs.repeat_every(every);
    for (const size_t at_once : {7, 1000}) {
      const Met met = scan_all(table.get(), at_once);
      CHECK(met.ids == first.ids);
      CHECK(met.values == first.values);
    }
  }
  vfs.heal();
}

// The scan repeats a failed read itself: it returns every row or reports the error.
TEST(scan_meets_every_row_or_fails_whichever_read_fails) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const Rows rows = write_rows(vfs, sandbox / "t");
  const auto table = open_table(vfs, sandbox / "t", reader_ram(), false);
  const Met first = scan_all(table.get(), 500);
  vfs.fail_at(0, 0, false);  // count again from 0
  scan_all(table.get(), 500);
  const uint64_t reads = vfs.count();
  CHECK(reads > 10);
  for (uint64_t at = 1; at <= reads; ++at) {
    vfs.fail_at(at, EIO, false);
    try {
      const Met met = scan_all(table.get(), 500);
      CHECK(met.ids == first.ids);
      CHECK(met.values == first.values);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kSystem);
    }
    vfs.fail_at(at, EIO, true);
    CHECK_THROWS(scan_all(table.get(), 500), ErrorKind::kSystem, "");
  }
  vfs.heal();
  CHECK(scan_all(table.get(), 500).ids == first.ids);
}

// A scan is destroyed while reads are under way: it waits for these reads, and no file stays open.
TEST(scan_may_be_dropped_half_way) {
  const Sandbox sandbox;
  FaultVfs vfs;
  write_rows(vfs, sandbox / "t");
  std::vector<int64_t> ids(10);
  std::vector<float> values(10 * kDim);
  float* const out[] = {values.data()};
  auto table = open_table(vfs, sandbox / "t", reader_ram(), false);
  vfs.set_delay(0.05);
  {
    Scan scan(table.get(), {0});
    CHECK_EQ(scan.next(10, ids.data(), out), size_t{10});
    vfs.set_fault(1, Fault::kDelay);  // reads that start from now on: chunks that the scan does not reach
    vfs.repeat_every(1);
    for (int i = 0; i < 12; ++i) CHECK_EQ(scan.next(10, ids.data(), out), size_t{10});
    table->close();
    CHECK_THROWS(scan.next(10, ids.data(), out), ErrorKind::kClosed, "");
  }
  table.reset();
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code is_gone;
    const std::string path = std::filesystem::read_symlink(entry.path(), is_gone).string();
    CHECK(path.find(sandbox / "t") == std::string::npos);
  }
}

TEST(scan_of_several_fields_has_them_side_by_side) {
  TableSpec spec = whole_numbers(kRows, 5);
  spec.optimizer = {};
  spec.optimizer.kind = OptimizerKind::kAdam;
  const Sandbox sandbox;
  FaultVfs vfs;
  const auto table = Table::create(vfs, sandbox / "t", "t", spec, minimum_ram(spec, kRows, true));
  Sampler sampler(4);
  for (int step = 0; step < 5; ++step) {
    std::vector<int64_t> ids(200);
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % kRows);
    update(table.get(), ids, std::vector<float>(ids.size(), 1.0f));
  }
  Scan scan(table.get(), {2, 0});
  std::vector<int64_t> ids(64);
  std::vector<float> squares(64 * 5), weights(64 * 5), expected(64 * 5);
  float* const out[] = {squares.data(), weights.data()};
  size_t met = 0;
  while (const size_t n = scan.next(64, ids.data(), out)) {
    table->get(ids.data(), n, 2, expected.data());
    CHECK(std::equal(squares.begin(), squares.begin() + static_cast<ptrdiff_t>(n * 5), expected.begin()));
    table->get(ids.data(), n, 0, expected.data());
    CHECK(std::equal(weights.begin(), weights.begin() + static_cast<ptrdiff_t>(n * 5), expected.begin()));
    met += n;
  }
  CHECK_EQ(met, static_cast<size_t>(table->stats().stored_rows));
}

// Order and bits are those of the log, in RAM or not.
TEST(scan_of_rows_in_ram_reads_no_records) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const Rows rows = write_rows(vfs, sandbox / "t", 16u << 20);
  std::vector<int64_t> every(kRows);
  for (int64_t id = 0; id < kRows; ++id) every[static_cast<size_t>(id)] = id;
  std::vector<float> values(every.size() * kDim);
  for (const bool writable : {true, false}) {
    const auto table = open_table(vfs, sandbox / "t", 16u << 20, writable);
    const uint64_t before = table->stats().log.read_bytes;
    const Met cold = scan_all(table.get(), 500);
    const uint64_t cold_bytes = table->stats().log.read_bytes - before;
    table->lookup(every.data(), every.size(), true, values.data());
    const uint64_t warm = table->stats().log.read_bytes;
    for (const size_t at_once : {7, 500}) {
      const Met met = scan_all(table.get(), at_once);
      CHECK(met.ids == cold.ids);
      CHECK(met.values == cold.values);
    }
    check_values(rows, cold.ids, cold.values, kDim, "from RAM");
    CHECK((table->stats().log.read_bytes - warm) / 2 < cold_bytes / 4);
    // Records that are not read cannot fail the scan. An index that cannot be read ends it.
    vfs.fail_at(1, EIO, true);
    CHECK_THROWS(scan_all(table.get(), 500), ErrorKind::kSystem, "");
    vfs.heal();
    CHECK(scan_all(table.get(), 500).values == cold.values);
  }
}

TEST(scan_meets_rows_once_that_leave_ram_meanwhile) {
  const Sandbox sandbox;
  FaultVfs vfs;
  write_rows(vfs, sandbox / "t");
  const size_t least = minimum_ram(whole_numbers(kRows, kDim), kRows, true) + (512u << 10);
  std::vector<int64_t> every(kRows);
  for (int64_t id = 0; id < kRows; ++id) every[static_cast<size_t>(id)] = id;
  std::vector<float> values(every.size() * kDim), some(50 * kDim);
  std::vector<int64_t> ids(50);
  float* const out[] = {some.data()};
  for (const bool writable : {true, false}) {
    const auto table = open_table(vfs, sandbox / "t", 16u << 20, writable);
    const Met whole = scan_all(table.get(), 500);
    table->lookup(every.data(), every.size(), true, values.data());
    Met met;
    Scan scan(table.get(), {0});
    for (size_t call = 0; const size_t n = scan.next(ids.size(), ids.data(), out); ++call) {
      met.ids.insert(met.ids.end(), ids.begin(), ids.begin() + static_cast<ptrdiff_t>(n));
      met.values.insert(met.values.end(), some.begin(), some.begin() + static_cast<ptrdiff_t>(n * kDim));
      if (call == 5) table->set_ram(least);
      if (call > 5) table->lookup(&every[call * 97 % (kRows - 40)], 40, true, values.data());  // these rows are evicted
    }
    CHECK(table->stats().store.evictions > 0);
    CHECK(met.ids == whole.ids);
    CHECK(met.values == whole.values);
  }
}

// A reader's frames have weights alone: other fields come from the log.
TEST(scan_of_a_readers_state_comes_from_the_log) {
  TableSpec spec = whole_numbers(kRows, 5);
  spec.optimizer = {};
  spec.optimizer.kind = OptimizerKind::kAdam;
  const Sandbox sandbox;
  FaultVfs vfs;
  std::vector<int64_t> ids(kRows);
  for (int64_t id = 0; id < kRows; ++id) ids[static_cast<size_t>(id)] = id;
  {
    const auto table = Table::create(vfs, sandbox / "t", "t", spec, 8u << 20);
    update(table.get(), ids, std::vector<float>(ids.size(), 1.0f));
    table->commit(std::nullopt, "");
  }
  const auto table = open_table(vfs, sandbox / "t", 8u << 20, false);
  std::vector<float> weights(kRows * 5), expected(kRows * 5), squares(kRows * 5);
  table->lookup(ids.data(), ids.size(), true, weights.data());
  table->get(ids.data(), ids.size(), 2, expected.data());
  for (const std::vector<size_t>& fields : {std::vector<size_t>{2}, std::vector<size_t>{0, 2}}) {
    Scan scan(table.get(), fields);
    std::vector<int64_t> met(kRows);
    std::vector<float> first(kRows * 5);
    std::vector<float*> out = {first.data()};
    if (fields.size() == 2) out.push_back(squares.data());
    float* const last = out.back();
    const size_t n = scan.next(kRows, met.data(), out);
    CHECK(n > 0);
    for (size_t i = 0; i < n; ++i) {
      CHECK(std::equal(last + i * 5, last + i * 5 + 5, &expected[static_cast<size_t>(met[i]) * 5]));
    }
  }
}
