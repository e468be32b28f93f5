// Index snapshots: a table opened with one equals the table that its segments alone give.
#include <chrono>
#include <thread>

#include "base/failpoints.h"
#include "base/fault.h"
#include "directory/checkpoint.h"
#include "jobs/index_snapshots.h"
#include "maintenance/check.h"
#include "maintenance/repair.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

// During its lifetime small tables take index snapshots.
struct SmallOnes {
  explicit SmallOnes(bool in_line) {
    checkpoint_rows = 1;
    checkpoints_in_line = in_line;
  }
  ~SmallOnes() {
    checkpoint_rows = 100'000;
    checkpoints_in_line = false;
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
  if (!in_line) arm_failpoint("checkpoint.part", 0, FailpointAction::kDelay, 0.00001);  // changes come between
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
      for (int wait = 0; !in_line && wait < 400 && table->stats().checkpoint_bytes == 0; ++wait) {
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
      with_one += stats.checkpoint_bytes > 0;
      spared += all - stats.indexed_records;
      check_table_is(table.get(), rows, when);
      for (const std::string& problem : check_table(vfs, path)) fail(__FILE__, __LINE__, when + ": " + problem);
    } else {
      const auto reader = open_table(vfs, path, ram * 2, false);
      check_table_is(reader.get(), committed, when + ", a reader");
    }
  }
  if (with_one <= 3 || spared <= 1000) fail(__FILE__, __LINE__, std::to_string(with_one) + " opened with one, " + std::to_string(spared) + " records spared");
}

std::string checkpoint_of(vfs::Vfs& vfs, const std::string& path) {
  return path + "/" + directory_name(Manifests(vfs, path).load_newest().checkpoints.at(0).file);
}

}  // namespace

TEST(checkpoint_of_a_flat_table) {
  reopens(whole_numbers(1500, 24), 1500, 1, true, 0);
  reopens(whole_numbers(20000, 24), 300, 2, true, 0);  // few of its rows are stored: pairs
}

TEST(checkpoint_of_a_hashed_table) { reopens(whole_numbers(-1, 24), 3000, 3, true, 4u << 20); }

TEST(checkpoint_taken_beside_training) {
  reopens(whole_numbers(-1, 24), 3000, 4, false, 4u << 20);
  reopens(whole_numbers(30000, 24), 30000, 5, false, 0);
}

// A flat directory with much RAM, a hashed one otherwise: each opens the snapshots of the other.
TEST(checkpoint_of_another_form) {
  const SmallOnes small(true);
  const TableSpec spec = whole_numbers(1'200'000, 1);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  std::vector<int64_t> ids(550'000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 2);
  const std::vector<float> ones(ids.size(), 1.0f);
  Rows rows;
  apply(&rows, ids, ones);
  for (const size_t ram : {size_t{32} << 20, size_t{22} << 20}) {
    const bool is_flat = ram > 24u << 20;
    const std::string place = path + (is_flat ? "f" : "h");
    auto table = Table::create(vfs, place, "t", spec, ram);
    update(table.get(), ids, ones);
    table->commit(std::nullopt, "");
    table->commit("{\"names\":1}", "");
    // Five bytes for each row of the table, or thirteen for each stored row.
    CHECK(is_flat == (table->stats().checkpoint_bytes < 6'300'000));
    table.reset();
    for (const size_t other : {size_t{32} << 20, size_t{22} << 20}) {
      const auto reader = open_table(vfs, place, other, false);
      CHECK_EQ(reader->stats().indexed_records, uint64_t{0});
      check_table_is(reader.get(), rows, "opened in another form", false);
    }
  }
}

TEST(checkpoint_that_is_damaged) {
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
  const std::string file = checkpoint_of(vfs, path);
  std::vector<std::byte> good(vfs.open(file, false)->size());
  vfs.open(file, false)->read(good.data(), good.size(), 0);
  const auto put = [&](const std::vector<std::byte>& bytes) {
    vfs.remove(file);
    vfs.create_small(file)->write(bytes.data(), bytes.size(), 0);
  };
  for (const size_t at : {size_t{0}, size_t{13}, size_t{40}, size_t{50}, size_t{4096}, size_t{4100}, size_t{4200}, good.size() - 1,
                          good.size(), good.size() + 1}) {
    std::vector<std::byte> bad = good;
    if (at < good.size()) {
      bad[at] ^= std::byte{1};
    } else {
      bad.resize(at == good.size() ? at - 4096 : at + 4096);
    }
    put(bad);
    const std::string what = "byte " + std::to_string(at);
    if (at == good.size() + 1) vfs.remove(file);
    CHECK_THROWS(open_table(vfs, path, 4u << 20), ErrorKind::kCorruption, at == good.size() + 1 ? "is missing" : "check --repair");
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
TEST(checkpoint_newer_than_its_log) {
  const SmallOnes small(true);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  auto table = Table::create(vfs, path, "t", whole_numbers(500, 8), 4u << 20);
  std::vector<int64_t> ids(400);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  const std::vector<float> ones(ids.size(), 1.0f);
  set_fault("checkpoint_too_new");
  for (int round = 0; round < 3; ++round) {
    update(table.get(), ids, ones);
    table->commit(std::nullopt, "");
  }
  table.reset();
  CHECK_THROWS(open_table(vfs, path, 4u << 20), ErrorKind::kCorruption, "");
}
