// Index snapshots: a table that is opened with one is the table that its segments alone would give.
#include "jobs/index_snapshots.h"

#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "base/failpoints.h"
#include "base/fault.h"
#include "directory/index_snapshot_file.h"
#include "maintenance/check.h"
#include "maintenance/repair.h"
#include "tests/check.h"
#include "tests/gated.h"
#include "tests/model.h"
#include "tests/parts.h"
#include "tests/sample.h"
#include "tests/sandbox.h"
#include "tests/some_rows.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

// During its lifetime small tables take index snapshots.
struct SmallOnes {
  explicit SmallOnes(bool in_line) {
    index_snapshot_rows = 1;
    index_snapshots_in_line = in_line;
  }
  ~SmallOnes() {
    index_snapshot_rows = 100'000;
    index_snapshots_in_line = false;
    set_fault(nullptr);
    disarm_failpoints();
  }
};

uint64_t records_of(vfs::Vfs& vfs, const std::string& path) {
  const Manifest newest = Manifests(vfs, path).load_newest();
  LogMemory memory;
  memory.num_read_slices = 1;
  Log log(vfs, path, newest.uuid, newest.payload_bytes, newest.slots_per_segment, memory);
  log.adopt(newest.segments);
  uint64_t records = 0;
  for (const auto& [id, segment] : log.segments()) {
    for (const ChunkTrailer& chunk : log.reader().chunks(*segment)) records += chunk.count;
  }
  return records;
}

// Random commits, compaction, snapshots and rewinds. The table is sometimes reopened with more or less RAM.
void reopens(const TableSpec& spec, int64_t range, uint64_t seed, bool in_line, size_t other_ram) {
  const SmallOnes small(in_line);
  if (!in_line) arm_failpoint("index_snapshot.part", 0, FailpointAction::kDelay, 0.00001);  // changes come between
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, static_cast<uint64_t>(range), true);
  auto table = Table::create(vfs, path, "t", spec, ram);
  Sampler sampler(seed);
  Rows rows, committed;
  std::map<std::string, Rows> kept;
  uint64_t with_one = 0, spared = 0;
  const auto train = [&] {
    std::vector<int64_t> ids(1 + sampler.bits() % 200);
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % static_cast<uint64_t>(range));
    std::vector<float> grads(ids.size());
    for (float& grad : grads) grad = static_cast<float>(static_cast<int>(sampler.bits() % 3) - 1);
    update(table.get(), ids, grads);
    apply(&rows, ids, grads);
  };
  for (int round = 0; round < 160; ++round) {
    const std::string when = "round " + std::to_string(round);
    const uint64_t what = sampler.bits() % 16;
    if (what < 6) {
      train();
    } else if (what < 10) {
      const std::string name = sampler.bits() % 4 == 0 ? "s" + std::to_string(sampler.bits() % 2) : "";
      const auto pending = table->begin_commit(std::nullopt, name);
      committed = rows;
      if (!name.empty()) kept[name] = rows;
      for (int step = 0; step < 3; ++step) train();
      pending->wait();
    } else if (what == 10) {
      (void)table->compact();
    } else if (what == 11 && !kept.empty()) {
      const auto& [name, then] = *kept.begin();
      table->rewind(name, std::nullopt);
      rows = committed = then;
    } else if (what < 14) {
      for (int wait = 0; !in_line && wait < 400 && table->stats().index_snapshot_bytes == 0; ++wait) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        if (wait % 4 != 0) continue;
        table->commit("{\"wait\":" + std::to_string(wait) + "}", "");
        committed = rows;
        train();
      }
      if (sampler.bits() % 2 == 0) table->close();
      table.reset();
      rows = committed;
      const uint64_t all = records_of(vfs, path);
      table = open_table(vfs, path, sampler.bits() % 2 == 0 ? ram : std::max(ram, other_ram));
      const TableStats stats = table->stats();
      CHECK(stats.indexed_records <= all);
      with_one += stats.index_snapshot_bytes > 0;
      spared += all - stats.indexed_records;
      check_table_is(table.get(), rows, when);
      for (const std::string& problem : check_table(vfs, path)) fail(__FILE__, __LINE__, when + ": " + problem);
    } else {
      const auto reader = open_table(vfs, path, ram * 2, false);
      check_table_is(reader.get(), committed, when + ", a reader");
    }
  }
  if (with_one <= 3 || spared <= 1000) {
    const std::string counts = std::to_string(with_one) + " opened with one, " + std::to_string(spared) + " records";
    fail(__FILE__, __LINE__, counts + " spared");
  }
}

std::string index_snapshot_of(vfs::Vfs& vfs, const std::string& path) {
  return path + "/" + directory_name(Manifests(vfs, path).load_newest().index_snapshots.at(0).file);
}

}  // namespace

TEST(index_snapshot_of_a_flat_table) {
  reopens(whole_numbers(1500, 24), 1500, 1, true, 0);
  reopens(whole_numbers(20000, 24), 300, 2, true, 0);  // few of its rows are stored: pairs
}

TEST(index_snapshot_of_a_hashed_table) { reopens(whole_numbers(-1, 24), 3000, 3, true, 4u << 20); }

TEST(index_snapshot_taken_beside_training) {
  reopens(whole_numbers(-1, 24), 3000, 4, false, 4u << 20);
  reopens(whole_numbers(30000, 24), 30000, 5, false, 0);
}

// A flat directory with much RAM, a hashed one otherwise: each opens the snapshots of the other.
TEST(index_snapshot_of_another_form) {
  const SmallOnes small(true);
  const TableSpec spec = whole_numbers(1'200'000, 1);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  // Flat from the start, and flat only where many rows are stored.
  const std::vector<size_t> budgets = {size_t{32} << 20, size_t{22} << 20, size_t{10} << 20};
  for (const bool is_dense : {true, false}) {
    std::vector<int64_t> ids(is_dense ? 550'000 : 200'000);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 2);
    const std::vector<float> ones(ids.size(), 1.0f);
    Rows rows;
    apply(&rows, ids, ones);
    for (const size_t ram : budgets) {
      const std::string place = path + (is_dense ? "d" : "p") + std::to_string(ram >> 20);
      auto table = Table::create(vfs, place, "t", spec, ram);
      update(table.get(), ids, ones);
      const size_t directory = table->stats().directory_bytes;
      CHECK_EQ(directory == flat_directory_bytes(1'200'000), ram == budgets[0]);
      CHECK(is_dense || ram == budgets[0] || directory < 2'600'000);
      table->commit(std::nullopt, "");
      table->commit("{\"names\":1}", "");
      // Five bytes for each row of the table, or thirteen for each stored row.
      const uint64_t bytes = table->stats().index_snapshot_bytes;
      CHECK(is_dense ? bytes > 6'000'000 && bytes < 6'300'000 : bytes > 2'600'000 && bytes < 2'900'000);
      table.reset();
      for (const size_t other : budgets) {
        const auto reader = open_table(vfs, place, other, false);
        CHECK_EQ(reader->stats().indexed_records, uint64_t{0});
        check_table_is(reader.get(), rows, "opened in another form", false);
      }
    }
  }
}

TEST(index_snapshot_that_is_damaged) {
  const SmallOnes small(true);
  const TableSpec spec = whole_numbers(1000, 8);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  auto table = Table::create(vfs, path, "t", spec, 4u << 20);
  std::vector<int64_t> ids(1000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  const std::vector<float> ones(ids.size(), 1.0f);
  Rows rows;
  update(table.get(), ids, ones);
  apply(&rows, ids, ones);
  table->commit(std::nullopt, "");
  table->commit("{\"names\":1}", "kept");
  table.reset();
  const std::string file = index_snapshot_of(vfs, path);
  std::vector<std::byte> good(vfs.open(file, false)->size());
  vfs.open(file, false)->read(good.data(), good.size(), 0);
  const auto put = [&](const std::vector<std::byte>& bytes) {
    vfs.remove(file);
    vfs.create_small(file)->write(bytes.data(), bytes.size(), 0);
  };
  for (const size_t at : {size_t{0}, size_t{13}, size_t{40}, size_t{50}, size_t{4096}, size_t{4100}, size_t{4200},
                          good.size() - 1, good.size(), good.size() + 1}) {
    std::vector<std::byte> bad = good;
    if (at < good.size()) {
      bad[at] ^= std::byte{1};
    } else {
      bad.resize(at == good.size() ? at - 4096 : at + 4096);
    }
    put(bad);
    const std::string what = "byte " + std::to_string(at);
    if (at == good.size() + 1) vfs.remove(file);
    CHECK_THROWS(open_table(vfs, path, 4u << 20), ErrorKind::kCorruption,
                 at == good.size() + 1 ? "is missing" : "check --repair");
    const CheckedTable found = inspect_table(vfs, path);
    CHECK_EQ(found.problems.size(), size_t{1});
    CHECK_EQ(found.problems.at(0).kind, std::string("directory"));
    const RepairedTable repaired = repair_table(vfs, path, {}, nullptr);
    CHECK(repaired.table.problems.empty());
    CHECK(!repaired.done.empty());
    CHECK(check_table(vfs, path).empty());
    check_table_is(open_table(vfs, path, 4u << 20, false).get(), rows, what);
    OpenOptions options;
    options.ram_bytes = 4u << 20;
    options.writable = false;
    options.snapshot = "kept";
    check_table_is(Table::open(vfs, path, "t", options).get(), rows, what + ", the snapshot");
  }
  put(good);
  const auto reader = open_table(vfs, path, 4u << 20, false);
  CHECK_EQ(reader->stats().indexed_records, uint64_t{0});
  check_table_is(reader.get(), rows, "as it was");
}

// The seeded bug of the torture tests is detected.
TEST(index_snapshot_newer_than_its_log) {
  const SmallOnes small(true);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  auto table = Table::create(vfs, path, "t", whole_numbers(500, 8), 4u << 20);
  std::vector<int64_t> ids(400);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  const std::vector<float> ones(ids.size(), 1.0f);
  set_fault("index_snapshot_too_new");
  for (int round = 0; round < 3; ++round) {
    update(table.get(), ids, ones);
    table->commit(std::nullopt, "");
  }
  table.reset();
  CHECK_THROWS(open_table(vfs, path, 4u << 20), ErrorKind::kCorruption, "");
}

// ---- Index snapshots without commits

namespace {

constexpr int64_t kRows = 1000;

// A table whose rows are all in the log, without an index snapshot.
struct Indexed {
  explicit Indexed(bool belongs_to_run = false) {
    TableSpec spec = whole_numbers(kRows, 8);
    spec.belongs_to_run = belongs_to_run;
    OpenOptions options = Parts::with_ram(4u << 20);
    options.through_run = belongs_to_run;
    table = new_parts(vfs, sandbox / "t", spec, options);
    table->add_one(range(0, kRows));
    index_snapshot_rows = kRows + 1;  // none yet
    table->committer.commit(std::nullopt, "");
    index_snapshot_rows = 1;
    CHECK(!table->index.ready().has_value());
  }
  IndexSnapshots& index() { return table->index; }
  // Numbers of index files on disk.
  std::set<uint64_t> files() {
    std::set<uint64_t> numbers;
    for (const std::string& name : vfs.list(sandbox / "t")) {
      uint64_t number;
      if (parse_name(name, "directory-", &number)) numbers.insert(number);
    }
    return numbers;
  }
  void collect() {
    const auto guard = table->state.lock.exclusive();
    table->collector.collect();
  }

  const SmallOnes small{true};
  const Sandbox sandbox;
  GatedVfs vfs;
  std::unique_ptr<Parts> table;
  const GatedVfs::Release release{vfs};  // before the table ends
};

using Numbers = std::set<uint64_t>;

}  // namespace

TEST(index_snapshot_is_taken_when_due_and_named_by_the_next_commit) {
  Indexed rows;
  const uint64_t used = rows.table->state.store->disk().used_bytes();
  index_snapshot_rows = kRows + 1;
  rows.index().consider();  // a table of few rows takes none
  CHECK(!rows.index().ready().has_value() && rows.files().empty());
  index_snapshot_rows = kRows;
  rows.index().consider();
  CHECK(rows.index().ready().has_value());
  const IndexSnapshotEntry ready = *rows.index().ready();
  CHECK(rows.files() == Numbers{ready.file});
  CHECK(rows.index().numbers_in_use() == Numbers{ready.file});
  CHECK_EQ(rows.index().next_number(), ready.file + 1);
  CHECK_EQ(rows.table->state.store->disk().used_bytes(), used + ready.bytes);
  rows.index().consider();  // one is ready
  CHECK(rows.files() == Numbers{ready.file});
  rows.collect();  // leaves it alone
  CHECK(rows.files() == Numbers{ready.file});
  rows.table->add_one({1});
  rows.table->committer.commit(std::nullopt, "");
  CHECK_EQ(rows.table->state.committed.index_snapshots.at(0).file, ready.file);
  CHECK(!rows.index().ready().has_value());
  CHECK(rows.index().numbers_in_use() == Numbers{ready.file});
  // Few records were appended since then: none is due.
  rows.index().consider();
  CHECK(!rows.index().ready().has_value());
  rows.table->add_one(range(0, kRows));
  rows.table->committer.commit(std::nullopt, "");  // takes another
  CHECK(rows.index().ready().has_value());
  CHECK(rows.index().numbers_in_use() == Numbers({ready.file, rows.index().ready()->file}));
}

// Large records: due when an eighth of the rows must be replayed.
TEST(index_snapshot_is_due_by_the_records_to_replay) {
  const SmallOnes small(true);
  const Sandbox sandbox;
  FaultVfs vfs;
  const TableSpec spec = whole_numbers(kRows, 250);
  const auto table = new_parts(vfs, sandbox / "t", spec, Parts::with_ram(16u << 20));
  table->add_one(range(0, kRows));
  table->committer.commit(std::nullopt, "");
  table->committer.commit("{\"names\":1}", "");
  CHECK_EQ(table->state.committed.index_snapshots.size(), size_t{1});
  table->add_one(range(0, kRows / 8 - 1));
  table->committer.commit(std::nullopt, "");
  CHECK(!table->index.ready().has_value());
  table->add_one({kRows - 1});
  table->committer.commit(std::nullopt, "");
  CHECK(table->index.ready().has_value());
}

TEST(index_snapshot_of_a_store_that_is_replaced_is_not_used) {
  Indexed rows;
  rows.index().consider();
  CHECK(rows.index().ready().has_value());
  {
    const auto guard = rows.table->state.lock.exclusive();
    rows.index().forget_store();
  }
  CHECK(!rows.index().ready().has_value());
}

// The store is replaced while the file is written, or during its last sync.
TEST(index_snapshot_under_way_is_not_used_when_the_store_is_replaced) {
  for (const Op op : {Op::kWrite, Op::kSync}) {
    Indexed rows;
    index_snapshots_in_line = false;
    rows.vfs.hold(op);
    rows.index().consider();
    rows.vfs.wait_until_waiting();
    {
      const auto guard = rows.table->state.lock.work();
      CHECK(rows.index().numbers_in_use() == Numbers{1});
      CHECK(rows.table->state.store->disk().used_bytes() > DiskBudget::index_snapshot_estimate(kRows));
      rows.index().forget_store();
    }
    const uint64_t next = rows.index().next_number();
    rows.index().consider();  // there is one at a time
    CHECK_EQ(rows.index().next_number(), next);
    rows.vfs.release();
    rows.index().prepare_to_close(false);
    CHECK(!rows.index().ready().has_value() && rows.index().numbers_in_use().empty());
  }
}

TEST(index_snapshot_that_fails_costs_nothing_else) {
  for (const Op op : {Op::kCreate, Op::kWrite, Op::kSync}) {
    Indexed rows;
    rows.vfs.fail_all(op, EIO);
    rows.index().consider();
    rows.vfs.heal();
    CHECK(!rows.index().ready().has_value());
    CHECK(rows.index().numbers_in_use().empty());
    rows.table->add_one({1});
    rows.index().consider();  // tries again
    CHECK(rows.index().ready().has_value());
    CHECK_EQ(rows.index().ready()->file, uint64_t{2});
    rows.collect();
    CHECK(rows.files() == Numbers{2});
    CHECK_EQ(rows.table->value(1), 2.0f);
  }
}

// None is taken when it does not fit the disk limit.
TEST(index_snapshot_is_not_taken_without_room_on_disk) {
  Indexed rows;
  DiskBudget& disk = rows.table->state.store->disk();
  uint64_t limit = disk.used_bytes();
  const auto has_room = [&] {
    disk.set_limit(limit, 1, kRows);
    return disk.has_bytes(DiskBudget::index_snapshot_estimate(kRows));
  };
  while (!has_room()) ++limit;
  disk.set_limit(limit - 1, 1, kRows);
  rows.index().consider();
  CHECK(!rows.index().ready().has_value());
  disk.set_limit(limit, 1, kRows);
  rows.index().consider();
  CHECK(rows.index().ready().has_value());
}

TEST(index_snapshot_is_taken_by_close_where_an_opening_would_be_slow) {
  for (const bool may_take : {true, false}) {
    Indexed rows;
    index_snapshot_rows = kRows / 20;  // ten times as many records are worth it
    CHECK_EQ(rows.index().prepare_to_close(may_take), may_take);
    CHECK_EQ(rows.index().ready().has_value(), may_take);
    {
      const auto guard = rows.table->state.lock.exclusive();
      rows.index().forget_store();
    }
    const uint64_t next = rows.index().next_number();
    rows.index().consider();  // the table is closing
    CHECK_EQ(rows.index().next_number(), next);
  }
}

TEST(index_snapshot_is_not_taken_by_close_where_it_is_not_worth_it) {
  const auto check = [](const std::string& when, const std::function<void(Indexed*)>& change, bool of_run = false) {
    Indexed rows(of_run);
    index_snapshot_rows = kRows / 20;
    change(&rows);
    if (rows.index().prepare_to_close(true)) fail(__FILE__, __LINE__, when);
    CHECK(!rows.index().ready().has_value());
  };
  const auto state = [](const std::function<void(TableState*)>& change) {
    return [change](Indexed* rows) { change(&rows->table->state); };
  };
  check("few records", [](Indexed*) { index_snapshot_rows = kRows; });
  check("changed rows", [](Indexed* rows) { rows->table->add_one({1}); });
  check("another optimizer", state([](TableState* table) { table->spec.optimizer.lr = 0.5; }));
  check("a snapshot is the newest commit", state([](TableState* table) { table->committed.keep = "kept"; }));
  check("a copy", state([](TableState* table) { table->committed.writer_flags |= kWriterFlagCopy; }));
  check("a reader", state([](TableState* table) { table->options.writable = false; }));
  check("a broken table", state([](TableState* table) { table->broken = "half a step"; }));
  check("a read-only table", state([](TableState* table) { table->read_only_reason = "a sync failed"; }));
  check("rows on a device", [](Indexed* rows) {
    const auto cache = std::make_shared<SomeRows>();
    cache->held = {1};
    rows->table->device.attach(cache, nullptr);
  });
  check("a commit under way", state([](TableState* table) { table->is_durable = false; }));
  check("a closed table", state([](TableState* table) { table->is_closed = true; }));
  check("a table of a run", [](Indexed*) {}, true);
}
