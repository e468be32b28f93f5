// Whole records that a scan returns and that are appended to another table's log: bit for bit, whatever the rows were
// before; and the commit under way keeps the rows of its moment.
#include <cerrno>
#include <cstddef>
#include <vector>

#include "tests/check.h"
#include "tests/gated.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;
using vfs::Op;

namespace {

constexpr int64_t kRows = 3000;
constexpr uint32_t kDim = 24;

struct Records {
  std::vector<int64_t> ids;
  std::vector<std::byte> bytes;
  Rows rows;  // their weights
};

// The whole records of some rows that were trained, in the order of a scan.
Records some_records(size_t n, uint64_t seed) {
  const auto table = Table::create(vfs::posix(), "", "source", whole_numbers(kRows, kDim), 0);
  Sampler sampler(seed);
  Records records;
  for (int step = 0; step < 3; ++step) {
    std::vector<int64_t> ids(n);
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % kRows);
    const std::vector<float> grads(n, static_cast<float>(1 + step));
    update(table.get(), ids, grads);
    apply(&records.rows, ids, grads);
  }
  const size_t bytes = table->payload_bytes();
  Scan scan(table.get(), {});
  std::vector<int64_t> ids(100);
  std::vector<std::byte> one(100 * bytes);
  while (const size_t found = scan.next_records(100, ids.data(), one.data())) {
    records.ids.insert(records.ids.end(), ids.begin(), ids.begin() + static_cast<ptrdiff_t>(found));
    records.bytes.insert(records.bytes.end(), one.begin(), one.begin() + static_cast<ptrdiff_t>(found * bytes));
  }
  CHECK_EQ(records.ids.size(), records.rows.size());
  return records;
}

void append(Table* table, const Records& records) {
  table->append_records(records.ids.data(), records.ids.size(), records.bytes.data());
}

void put(const Records& records, Rows* rows) {
  for (const auto& [id, value] : records.rows) (*rows)[id] = value;
}

}  // namespace

TEST(appended_records_replace_rows_in_ram_on_disk_and_none) {
  for (const size_t more_ram : {size_t{0}, size_t{8} << 20}) {  // most rows on disk; all in RAM
    const Sandbox sandbox;
    const TableSpec spec = whole_numbers(kRows, kDim);
    const size_t ram = minimum_ram(spec, kRows, true) + more_ram;
    auto table = Table::create(vfs::posix(), sandbox / "t", "t", spec, ram);
    Rows rows;
    std::vector<int64_t> ids;
    for (int64_t id = 0; id < kRows; id += 2) ids.push_back(id);
    const std::vector<float> grads(ids.size(), 7.0f);
    update(table.get(), ids, grads);
    apply(&rows, ids, grads);
    for (const uint64_t seed : {1, 2, 3}) {  // new rows, rows that were appended, changed and evicted
      const Records records = some_records(900, seed);
      append(table.get(), records);
      put(records, &rows);
      check_table_is(table.get(), rows, "appended");
      update(table.get(), ids, grads);
      apply(&rows, ids, grads);
      if (seed == 2) table->commit(std::nullopt, "");
    }
    check_table_is(table.get(), rows, "trained");
    table->commit(std::nullopt, "");
    table.reset();
    table = open_table(vfs::posix(), sandbox / "t", ram, false);
    check_table_is(table.get(), rows, "opened again");
  }
}

TEST(appended_records_are_compacted) {
  const Sandbox sandbox;
  const TableSpec spec = whole_numbers(kRows, kDim);
  const auto table = Table::create(vfs::posix(), sandbox / "t", "t", spec, minimum_ram(spec, kRows, true));
  const Records records = some_records(900, 1);
  for (int round = 0; round < 60; ++round) append(table.get(), records);
  const TableStats stats = table->stats();
  CHECK(stats.compactions > 0);
  CHECK(stats.disk_bytes < 12 * records.ids.size() * record_stride(table->payload_bytes()));
  check_table_is(table.get(), records.rows, "appended again and again");
}

// The records of frozen frames are written before they are replaced.
TEST(appended_records_are_not_in_the_commit_under_way) {
  const Sandbox sandbox;
  const TableSpec spec = whole_numbers(kRows, kDim);
  GatedVfs vfs;
  auto table = Table::create(vfs, sandbox / "t", "t", spec, 16u << 20);
  const GatedVfs::Release release{vfs};  // before the table ends
  Rows before;
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < kRows; ++id) ids.push_back(id);
  const std::vector<float> grads(ids.size(), 5.0f);
  update(table.get(), ids, grads);
  apply(&before, ids, grads);
  vfs.hold(Op::kSync);
  const auto commit = table->begin_commit(std::nullopt, "");
  const Records records = some_records(900, 4);
  append(table.get(), records);
  vfs.release();
  commit->wait();
  {
    const auto reader = open_table(vfs, sandbox / "t", 16u << 20, false);
    check_table_is(reader.get(), before, "the commit");
  }
  put(records, &before);
  check_table_is(table.get(), before, "after the commit");
}

TEST(append_records_refuses_bad_ids_and_tables_in_ram_and_breaks_on_a_full_disk) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const TableSpec spec = whole_numbers(kRows, kDim);
  const Records records = some_records(900, 1);
  const auto in_ram = Table::create(vfs, "", "r", spec, 0);
  CHECK_THROWS(append(in_ram.get(), records), ErrorKind::kInvalid, "a table in RAM only has no log");
  const auto table = Table::create(vfs, sandbox / "t", "t", spec, minimum_ram(spec, kRows, true));
  const int64_t twice[] = {1, 2, 1}, outside[] = {1, kRows};
  CHECK_THROWS(table->append_records(twice, 3, records.bytes.data()), ErrorKind::kInvalid, "name an id twice: 1");
  CHECK_THROWS(table->append_records(outside, 2, records.bytes.data()), ErrorKind::kIndex, "3000");
  check_table_is(table.get(), {}, "nothing was changed");
  table->append_records(nullptr, 0, nullptr);
  CHECK(!table->is_changed());
  Scan scan(table.get(), {0});
  int64_t id;
  std::byte record[1];
  CHECK_THROWS(scan.next_records(1, &id, record), ErrorKind::kInvalid, "no whole records");
  vfs.fail_at(1, ENOSPC, true);  // a segment cannot be made: nothing was changed
  CHECK_THROWS(append(table.get(), records), ErrorKind::kSystem, "");
  vfs.heal();
  check_table_is(table.get(), {}, "no segment");
  append(table.get(), records);
  vfs.fail_at(1, ENOSPC, true);
  bool has_failed = false;
  for (int round = 0; round < 20 && !has_failed; ++round) {
    try {
      append(table.get(), records);
    } catch (const Error& error) {
      has_failed = true;
      CHECK_EQ(error.error_number(), ENOSPC);
    }
  }
  CHECK(has_failed);
  vfs.heal();
  CHECK_THROWS(append(table.get(), records), ErrorKind::kBroken, "a write of records");
}
