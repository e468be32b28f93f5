// Deleted rows: in RAM and on disk, through commits, compaction, purges of tombstones, readers and reopening.
#include "base/fault.h"
#include "commit/cursors.h"
#include "maintenance/check.h"
#include "tests/jobs/life.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

Seen live(uint64_t seed, int64_t num_rows, size_t ram, uint64_t disk, int calls) {
  const NoCompactionSlack no_slack;
  const SmallIndexSnapshots small_snapshots;
  Life life(seed, num_rows, ram, disk);
  life.commit(false);
  for (int call = 0; call < calls; ++call) {
    const std::string when = "call " + std::to_string(call);
    const uint64_t choice = life.sampler.bits() % 100;
    const bool is_dying = call / 50 % 2 == 1;
    if (choice < (is_dying ? 10 : 45)) {
      life.train(300);
    } else if (choice < 75) {
      life.remove(choice < 60 ? 3 : 400);
    } else if (choice < 85) {
      life.commit(choice % 2 == 0);
    } else if (choice < 89) {
      life.follow(when);
    } else if (choice < 91) {
      life.table->compact();
    } else if (choice < 93) {
      life.reopen();
    } else if (choice < 94) {
      life.table->commit(std::nullopt, "kept");
      const Rows kept = life.committed = life.rows;
      life.train(300);
      life.remove(400);
      life.commit(false);
      life.table->rewind("kept", std::nullopt);
      life.table->drop("kept");
      life.rows = life.committed = kept;
    } else {
      check_table_is(life.table.get(), life.rows, when);
    }
  }
  life.commit(false);
  check_table_is(life.table.get(), life.rows, "at the end");
  life.reopen();
  check_table_is(life.table.get(), life.rows, "reopened");
  life.follow("at the end");
  life.table->close();
  for (const std::string& problem : check_table(life.vfs, life.sandbox / "t")) fail(__FILE__, __LINE__, problem);
  return life.seen;
}

constexpr int64_t kForms[] = {-1, Life::kIds, int64_t{1} << 30};  // hashed, flat, and bounded directories

}  // namespace

TEST(erase_is_the_initial_row_again) {
  for (const bool on_disk : {false, true}) {
    Life life(1, -1, 1 << 20, 0, on_disk);
    life.train(300);
    CHECK(life.table->is_changed());
    life.table->commit(std::nullopt, "");
    CHECK_EQ(erase(life.table.get(), {int64_t{1} << 40}), uint64_t{0});
    CHECK(!life.table->is_changed());
    const uint64_t before = life.table->stats().stored_rows;
    life.remove(2000);
    CHECK(life.table->is_changed());
    CHECK(life.table->stats().stored_rows < before);
    check_table_is(life.table.get(), life.rows, "deleted");
    life.train(2000);
    check_table_is(life.table.get(), life.rows, "stored again");
  }
}

TEST(erase_survives_everything_in_every_directory) {
  Seen all;
  for (const int64_t num_rows : kForms) {
    for (const uint64_t seed : {1, 2}) {
      const size_t ram = minimum_ram(whole_numbers(num_rows, Life::kDim), Life::kIds, true) + (64 << 10);
      const Seen seen = live(seed, num_rows, seed == 1 ? ram : 64 << 20, 0, 400);
      all.evictions += seen.evictions;
      all.compactions += seen.compactions;
      all.purges += seen.purges;
      all.index_snapshots += seen.index_snapshots;
      all.deleted += seen.deleted;
      all.stored_again += seen.stored_again;
    }
  }
  CHECK(all.deleted > 1000);
  CHECK(all.stored_again > 1000);
  CHECK(all.compactions > 20);
  CHECK(all.purges > 3);
  CHECK(all.index_snapshots > 10);
}

namespace {

// A twentieth of some old rows is deleted, so their segments stay. Then new rows come and go. Returns the most
// tombstones there were after a commit.
uint64_t come_and_go(int64_t num_rows) {
  const NoCompactionSlack no_slack;
  Life life(3, num_rows, 64 << 20, 0);
  std::vector<int64_t> ids(500);
  std::vector<float> grads(ids.size(), 1.0f);
  const auto take = [&](int64_t first, int64_t step) {
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = first + static_cast<int64_t>(i) * step;
  };
  for (int64_t first = 0; first < 10000; first += 500) {
    take(first, 1);
    update(life.table.get(), ids, grads);
    apply(&life.rows, ids, grads);
  }
  life.commit(false);
  take(0, 20);
  CHECK_EQ(erase(life.table.get(), ids), ids.size());
  for (const int64_t id : ids) life.rows.erase(id);
  uint64_t most = 0;
  for (int64_t day = 0; day < 120; ++day) {
    take(20000 + day * 500, 1);
    update(life.table.get(), ids, grads);
    life.table->commit(std::nullopt, "");
    CHECK_EQ(erase(life.table.get(), ids), ids.size());
    life.commit(false);
    if (day % 8 == 0) life.follow("day " + std::to_string(day));
    most = std::max(most, life.table->stats().tombstones);
  }
  CHECK(newest_commit(life.sandbox / "t").deletions_from > 1);
  life.reopen();
  check_table_is(life.table.get(), life.rows, "reopened");
  life.follow("at the end");
  return most;
}

}  // namespace

TEST(erase_forgets_tombstones) {
  // A purge begins when they take an eighth of the records' bytes: 9,500 records of 184 bytes, 16 for a tombstone.
  for (const int64_t num_rows : {int64_t{-1}, int64_t{100'000}, int64_t{1} << 30}) {
    CHECK(come_and_go(num_rows) < 3 * 9500 * 184 / 16 / 8);
  }
}

TEST(erase_finds_seeded_bugs) {
  for (const char* bug : {"lost_tombstone", "purge_too_early"}) {
    set_fault(bug);
    bool is_found = false;
    try {
      come_and_go(-1);
    } catch (const std::exception&) {
      is_found = true;
    }
    set_fault(nullptr);
    if (!is_found) fail(__FILE__, __LINE__, std::string("not found: ") + bug);
  }
}

TEST(erase_refuses_bad_ids_and_readers) {
  Life life(1, Life::kIds, 1 << 20, 0);
  life.train(300);
  life.commit(false);
  CHECK_THROWS(erase(life.table.get(), {1, Life::kIds}), ErrorKind::kIndex, "position 1");
  CHECK_THROWS(erase(life.table.get(), {-1}), ErrorKind::kIndex, "-1");
  check_table_is(life.table.get(), life.rows, "refused");
  life.follow("reader");
  CHECK_THROWS(erase(life.reader.get(), {1}), ErrorKind::kReadOnly, "");
}

TEST(erase_frees_disk_and_directory) {
  const NoCompactionSlack no_slack;
  const Sandbox sandbox;
  FaultVfs vfs;
  const TableSpec spec = whole_numbers(-1, 64);
  auto table = Table::create(vfs, sandbox / "t", "t", spec, 64 << 20);
  constexpr int64_t kRows = 40000;
  std::vector<int64_t> ids(1000);
  std::vector<float> grads(ids.size(), 1.0f);
  for (int64_t first = 0; first < kRows; first += 1000) {
    for (int64_t i = 0; i < 1000; ++i) ids[static_cast<size_t>(i)] = first + i;
    update(table.get(), ids, grads);
  }
  table->commit(std::nullopt, "");
  table->commit("{}", "");
  const TableStats before = table->stats();
  for (int64_t first = 0; first < kRows * 3 / 4; first += 1000) {
    for (int64_t i = 0; i < 1000; ++i) ids[static_cast<size_t>(i)] = first + i;
    CHECK_EQ(erase(table.get(), ids), uint64_t{1000});
  }
  for (int i = 0; i < 3; ++i) table->commit("{\"n\":" + std::to_string(i) + "}", "");
  const TableStats after = table->stats();
  CHECK_EQ(after.stored_rows, static_cast<uint64_t>(kRows / 4));
  CHECK(after.disk_bytes < before.disk_bytes / 2);
  CHECK(after.directory_bytes < before.directory_bytes / 2);
}

// A sixth of the log is dead when half of the rows go. As much of it may be dead afterwards, not as many bytes.
TEST(erase_leaves_the_same_part_of_the_log_dead) {
  const NoCompactionSlack no_slack;
  const Sandbox sandbox;
  FaultVfs vfs;
  constexpr int64_t kRows = 80000;
  auto table = Table::create(vfs, sandbox / "t", "t", whole_numbers(kRows, 64), 64 << 20);
  std::vector<int64_t> ids(1000);
  const std::vector<float> grads(ids.size(), 1.0f);
  const auto each = [&](int64_t begin, int64_t end, int64_t step, auto call) {
    for (int64_t first = begin; first < end; first += 1000 * step) {
      for (int64_t i = 0; i < 1000; ++i) ids[static_cast<size_t>(i)] = first + i * step;
      call();
    }
    for (int i = 0; i < 4; ++i) table->commit("{\"commit\":" + std::to_string(begin + i) + "}", "");
  };
  each(0, kRows, 1, [&] { update(table.get(), ids, grads); });
  each(kRows / 2, kRows, 5, [&] { update(table.get(), ids, grads); });
  each(kRows / 2 + 1, kRows, 5, [&] { update(table.get(), ids, grads); });
  constexpr double kRecordBytes = 64 * 4 + 16;
  const auto part = [&] {
    const TableStats stats = table->stats();
    const double live =
        kRecordBytes * static_cast<double>(stats.stored_rows) + 16 * static_cast<double>(stats.tombstones);
    return live / static_cast<double>(stats.disk_bytes);
  };
  const double before = part();
  CHECK(before > 0.78 && before < 0.86);
  each(0, kRows / 2, 1, [&] { CHECK_EQ(erase(table.get(), ids), uint64_t{1000}); });
  CHECK_EQ(table->stats().stored_rows, static_cast<uint64_t>(kRows / 2));
  CHECK(part() > before - 0.03);
}

// An update or a delete that finds no room fails.
TEST(erase_keeps_to_a_disk_limit) {
  for (const uint64_t seed : {1, 2, 3}) {
    const Seen seen = live(seed, Life::kIds, 2 << 20, 24 << 20, 300);
    CHECK(seen.deleted > 1000);
  }
}

// Refused updates append nothing, so they must make compaction drop the tombstones.
TEST(erase_makes_room_for_new_rows_within_a_disk_limit) {
  const Sandbox sandbox;
  FaultVfs vfs;
  auto table = Table::create(vfs, sandbox / "t", "t", whole_numbers(-1, 2), 16 << 20, 240 << 20);
  std::vector<int64_t> ids(20000);
  const std::vector<float> grads(ids.size(), 1.0f);
  const auto take = [&](int64_t day) {
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = day * 20000 + static_cast<int64_t>(i);
  };
  for (int64_t day = 0; day < 80; ++day) {
    if (day == 1) {  // a consumer that came once keeps every tombstone for a while
      const Bytes bytes = encode_cursor(table->uuid(), {1, newest_commit(sandbox / "t").next_version});
      vfs.create_small(sandbox / "t/cursor-old")->write(bytes.data(), bytes.size(), 0);
    }
    if (day == 30) vfs.remove(sandbox / "t/cursor-old");
    take(day);
    update(table.get(), ids, grads);
    if (day >= 3) {
      take(day - 3);
      CHECK_EQ(erase(table.get(), ids), ids.size());
    }
    table->commit(std::nullopt, "");
    if (day == 29) CHECK(table->stats().tombstones > 400000);
  }
  CHECK(table->stats().tombstones < 200000);
}
