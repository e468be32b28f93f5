// Rows that are stored by the n-th step that names them, compared with a map of rows and counts: while rows are
// evicted, deleted, swept, committed, compacted, gone back from and read again.
#include <map>

#include "base/fault.h"
#include "directory/count_rows.h"
#include "maintenance/check.h"
#include "table/counted_ids.h"
#include "tests/jobs/life.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr uint32_t kFrom = 4;

struct Count {
  uint32_t steps = 0;
  int64_t time = 0;
  bool operator==(const Count&) const = default;
};
using CountMap = std::map<int64_t, Count>;

Retention rules_of(uint64_t seed) { return {.expire = seed % 2 == 0 ? 40 : 0, .admit_from = kFrom}; }

// What the files of the newest commit say, read without a table.
CountMap counts_on_disk(const std::string& path) {
  const Manifest manifest = newest_commit(path);
  Log log(vfs::posix(), path, manifest.uuid, manifest.payload_bytes, manifest.slots_per_segment, LogMemory());
  log.adopt(manifest.segments);
  CountMap found;
  constexpr uint64_t kParts = 3;
  for (uint64_t part = 0; part < kParts; ++part) {
    for (const auto& [id, entry] :
         counts_in(&log, -1, manifest.next_version, {.since = manifest.counts_since}, part, kParts)) {
      found[id] = {count_of(entry), time_of_count(entry)};
    }
  }
  CHECK_EQ(found.size(), manifest.counted_ids);
  return found;
}

struct CountingLife : Life {
  CountingLife(uint64_t seed, size_t ram_bytes, uint64_t disk_bytes, bool on_disk)
      : Life(seed, -1, ram_bytes, disk_bytes, on_disk, rules_of(seed)) {}

  // Most ids come rarely.
  void step(size_t most) {
    std::vector<int64_t> ids = some_ids(most);
    for (int64_t& id : ids)
      id = sampler.bits() % 3 == 0 ? id % 300 : id * 1000 + static_cast<int64_t>(sampler.bits() % 3);
    const std::vector<float> grads = update_in_some_way(ids);
    std::set<int64_t> refused;
    for (const int64_t id : std::set<int64_t>(ids.begin(), ids.end())) {
      if (rows.contains(id)) continue;
      Count& count = counts[id];
      if (count.steps + 1 < kFrom) {
        count = {count.steps + 1, table->step()};
        refused.insert(id);
      } else {
        counts.erase(id);
        ++num_admitted;
      }
    }
    num_refused += refused.size();
    for (size_t i = 0; i < ids.size(); ++i) {
      if (!refused.contains(ids[i])) rows[ids[i]] -= grads[i];
    }
  }

  // Deletes stored rows, counted ids and others.
  void drop_some(size_t most) {
    std::vector<int64_t> ids;
    for (const auto& [id, count] : counts) {
      if (ids.size() < most && sampler.bits() % 5 == 0) ids.push_back(id);
    }
    for (const auto& [id, value] : rows) {
      if (ids.size() < 2 * most && sampler.bits() % 4 == 0) ids.push_back(id);
    }
    ids.push_back(int64_t{1} << 50);
    uint64_t expected = 0;
    for (const int64_t id : ids) {
      expected += rows.erase(id);
      counts.erase(id);
    }
    CHECK_EQ(erase(table.get(), ids), expected);
  }

  void forget() {
    const int64_t before = table->step() - static_cast<int64_t>(sampler.bits() % 30);
    uint64_t expected = 0;
    if (before > since) expected = std::erase_if(counts, [&](const auto& one) { return one.second.time < before; });
    since = std::max(since, before);
    CHECK_EQ(CountedIds(table.get()).forget(before), expected);
    num_forgotten += expected;
  }

  void save(bool in_background, const std::string& keep = "") {
    if (in_background) {
      const auto pending = table->begin_commit(std::nullopt, keep);
      committed = rows, committed_counts = counts, committed_since = since;
      step(300);
      drop_some(20);
      table->compact();
      pending->wait();
    } else {
      table->commit(std::nullopt, keep);
      committed = rows, committed_counts = counts, committed_since = since;
    }
    index_snapshots += !newest_commit(sandbox / "t").index_snapshots.empty();
    if (sampler.bits() % 4 == 0 || getenv("ALL")) CHECK(counts_on_disk(sandbox / "t") == committed_counts);
  }

  void open_again() {
    const TableStats stats = table->stats();
    evictions += stats.store.evictions;
    compactions += stats.compactions;
    reopen();
    counts = committed_counts;
    since = committed_since;
    num_refused = num_admitted = 0;
    CHECK_EQ(table->spec().retention.admit_from, kFrom);
  }

  void check(const std::string& when) {
    check_table_is(table.get(), rows, when);
    const TableStats stats = table->stats();
    CHECK_EQ(stats.counted_ids, counts.size());
    CHECK_EQ(stats.store.refused_rows, num_refused);
    CHECK_EQ(stats.store.admitted_rows, num_admitted);
    CHECK_EQ(stats.store.hits + stats.store.misses + stats.store.first_touches, stats.store.unique_rows);
  }

  CountMap counts, committed_counts;
  int64_t since = 0, committed_since = 0;
  uint64_t num_refused = 0, num_admitted = 0, num_forgotten = 0, index_snapshots = 0, evictions = 0, compactions = 0;
};

void live(CountingLife& life, int calls) {
  life.save(false);
  for (int call = 0; call < calls; ++call) {
    const std::string when = "call " + std::to_string(call);
    const uint64_t choice = life.sampler.bits() % 100;
    if (choice < 50) {
      life.step(choice < 5 ? 3000 : 300);
    } else if (choice < 60) {
      life.drop_some(choice < 55 ? 5 : 100);
    } else if (choice < 63) {
      life.forget();
    } else if (choice < 76) {
      life.save(choice % 2 == 0);
    } else if (choice < 80) {
      life.follow(when);
      CHECK_EQ(life.reader->stats().counted_ids, life.committed_counts.size());
    } else if (choice < 84) {
      life.table->compact();
    } else if (choice < 88) {
      life.open_again();
      life.check(when + ", opened");
    } else if (choice < 91) {
      life.save(false, "kept");
      const Rows kept = life.rows;
      const CountMap kept_counts = life.counts;
      const int64_t kept_since = life.since;
      for (int i = 0; i < 3; ++i) life.step(400);
      life.drop_some(30);
      life.forget();
      if (choice % 2 == 0) life.save(false);
      life.step(400);
      life.table->rewind("kept", std::nullopt);
      life.table->drop("kept");
      life.rows = life.committed = kept;
      life.counts = life.committed_counts = kept_counts;
      life.num_refused = life.num_admitted = 0;
      life.since = life.committed_since = kept_since;
      life.check(when + ", gone back");
    } else {
      life.check(when);
    }
  }
  life.save(false);
  life.check("the end");
  CHECK(counts_on_disk(life.sandbox / "t") == life.counts);
  life.open_again();
  life.check("the end, opened");
  life.table->close();
  for (const std::string& problem : check_table(life.vfs, life.sandbox / "t")) fail(__FILE__, __LINE__, problem);
}

bool fails(const char* fault, uint64_t seed, size_t ram, int calls) {
  set_fault(fault);
  bool failed = false;
  try {
    CountingLife life(seed, ram, 0, true);
    live(life, calls);
  } catch (const std::exception&) {
    failed = true;
  }
  set_fault(nullptr);
  return failed;
}

size_t little_ram() { return minimum_ram(whole_numbers(-1, Life::kDim), 3 * Life::kIds, true) + (64 << 10); }

}  // namespace

TEST(counts_of_a_table_in_ram) {
  for (const uint64_t seed : {1, 2}) {
    CountingLife life(seed, 0, 0, false);
    for (int round = 0; round < 60; ++round) {
      for (int i = 0; i < 3; ++i) life.step(round % 10 == 9 ? 2000 : 300);
      if (round % 4 == 1) life.drop_some(30);
      if (round % 7 == 3) life.forget();
      life.check("round " + std::to_string(round));
      if (round % 10 != 5) continue;
      life.table->commit(std::nullopt, "kept");
      const Rows rows = life.rows;
      const CountMap counts = life.counts;
      for (int i = 0; i < 3; ++i) life.step(500);
      life.table->rewind("kept", std::nullopt);
      life.rows = rows;
      life.counts = counts;
      life.num_refused = life.num_admitted = 0;
    }
    CHECK(life.num_refused > 500 && life.num_admitted > 50);
    CHECK(life.num_forgotten > 100);
  }
}

TEST(counts_survive_everything) {
  const NoCompactionSlack no_slack;
  const SmallIndexSnapshots small;
  for (const uint64_t seed : {3, 4, 5, 6}) {
    CountingLife life(seed, seed < 5 ? little_ram() : 16 << 20, 0, true);
    live(life, 300);
    CHECK(life.index_snapshots > 3 && life.compactions > 10 && life.num_forgotten > 100);
    CHECK(seed >= 5 || life.evictions > 100);
  }
}

TEST(counts_with_a_limit_of_the_disk) {
  const SmallIndexSnapshots small;
  CountingLife life(7, 8 << 20, 400 << 20, true);
  live(life, 150);
}

TEST(counts_find_seeded_bugs) {
  const NoCompactionSlack no_slack;
  const SmallIndexSnapshots small;
  CHECK(!fails(nullptr, 4, little_ram(), 300));
  for (const char* const fault : {"lost_count", "count_survives_delete", "old_counts_stay", "counts_not_moved",
                                  "counts_outrank", "index_snapshot_without_counts"}) {
    if (!fails(fault, 4, little_ram(), 300)) fail(__FILE__, __LINE__, std::string(fault) + " was not found");
  }
}

TEST(counts_times) {
  Sampler sampler(1);
  uint64_t last = 0;
  for (int64_t time : {int64_t{0}, int64_t{1}, (int64_t{1} << 26) - 1, int64_t{1} << 26, (int64_t{1} << 26) + 1,
                       int64_t{1} << 40, std::numeric_limits<int64_t>::max()}) {
    CHECK(code_of_time(time) >= last);
    last = code_of_time(time);
    CHECK(is_sound_count(entry_of_count(127, time)) && count_of(entry_of_count(127, time)) == 127);
  }
  for (int i = 0; i < 100'000; ++i) {
    const auto time = static_cast<int64_t>(sampler.bits() >> (1 + sampler.bits() % 63));
    const auto steps = static_cast<uint32_t>(1 + sampler.bits() % 127);
    const Entry entry = entry_of_count(steps, time);
    CHECK(is_count(entry) && !is_frame(entry) && !is_position(entry) && !is_stored(entry) && is_sound_count(entry));
    CHECK_EQ(count_of(entry), steps);
    const int64_t latest = time_of_count(entry);
    CHECK(latest >= time && latest - time <= time >> 25);
    if (time < int64_t{1} << 26) CHECK_EQ(latest, time);
    CHECK_EQ(code_of_time(latest), code_of_time(time));
    if (latest < std::numeric_limits<int64_t>::max()) CHECK(code_of_time(latest + 1) > code_of_time(time));
    const auto other = static_cast<int64_t>(sampler.bits() >> (1 + sampler.bits() % 63));
    if (steps < 127) CHECK(raised_count(entry, other) == entry_of_count(steps + 1, std::max(time, other)));
  }
  CHECK(!is_sound_count(entry_of_count(0, 5)) &&
        !is_sound_count(kCountBase + (uint64_t{1} << 31) + (uint64_t{39} << 25)));
  CHECK(is_position(entry_of_position(kMaxPosition)) && !is_count(entry_of_position(kMaxPosition)) &&
        is_count(kFrameBase - 1));
}

// Ids that come once take a directory entry each. Where these do not fit, an update fails before it changes anything.
TEST(counts_are_part_of_the_budget) {
  const SmallIndexSnapshots small;
  for (const bool on_disk : {false, true}) {
    TableSpec spec = whole_numbers(-1, 4);
    spec.retention.admit_from = 3;
    Sandbox sandbox;
    const size_t ram = minimum_ram(spec, 20'000, on_disk);
    const auto table = Table::create(vfs::posix(), on_disk ? sandbox / "t" : "", "t", spec, ram);
    int64_t next = 0;
    std::vector<int64_t> ids(1000);
    std::string message;
    while (message.empty()) {
      for (int64_t& id : ids) id = next++ * 7;
      try {
        update(table.get(), ids, std::vector<float>(ids.size(), 1.0f));
        CHECK(table->stats().ram_bytes <= ram);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kMemory);
        message = error.what();
      }
    }
    CHECK(message.find("nothing was changed") != std::string::npos);
    const uint64_t counted = table->stats().counted_ids;
    CHECK(counted == static_cast<uint64_t>(table->step()) * ids.size() && counted >= 19'000);
    CHECK_EQ(table->stats().stored_rows, uint64_t{0});
    const double each = static_cast<double>(table->stats().directory_bytes) / static_cast<double>(counted);
    CHECK(each < 20);
    if (!on_disk) continue;
    for (const uint64_t rows : {counted + 100, uint64_t{1}}) {
      index_snapshot_rows = rows;
      index_snapshots_in_line = true;
      update(table.get(), {3}, {1.0f});
      table->commit(std::nullopt, "");
      update(table.get(), {3}, {1.0f});
      table->commit(std::nullopt, "");
      CHECK_EQ(newest_commit(sandbox / "t").index_snapshots.empty(), rows > counted);
      const auto reader = open_table(vfs::posix(), sandbox / "t", 4 << 20, false);
      CHECK_EQ(reader->stats().counted_ids, table->stats().counted_ids);
      CHECK(reader->stats().directory_bytes < 40'000 && table->stats().directory_bytes > 300'000);
      CHECK(CountedIds(reader.get()).find(0, 1).ids.size() == CountedIds(table.get()).find(0, 1).ids.size());
    }
    table->close();
    const auto again = open_table(vfs::posix(), sandbox / "t", ram);
    CHECK_EQ(again->stats().counted_ids, counted);
    CHECK(again->stats().ram_bytes <= ram);
  }
}

TEST(counts_stay_while_another_rule_holds) {
  TableSpec spec = whole_numbers(-1, 4);
  spec.retention.admit_from = 3;
  Sandbox sandbox;
  auto table = Table::create(vfs::posix(), sandbox / "t", "t", spec, 8 << 20);
  const std::vector<int64_t> ids = {1, 2};
  update(table.get(), ids, {1.0f, 1.0f});
  const auto reopen = [&](const Retention& rules) {
    table->set_retention(rules);
    table->commit(std::nullopt, "");
    table->close();
    CHECK_EQ(newest_commit(sandbox / "t").reader_flags & kReaderFlagCounts, kReaderFlagCounts);
    table = open_table(vfs::posix(), sandbox / "t", 8 << 20);
    CHECK(table->spec().retention == rules);
  };
  reopen({});
  CHECK_EQ(table->stats().counted_ids, uint64_t{2});
  update(table.get(), {1, 3}, {1.0f, 1.0f});
  CHECK_EQ(table->stats().stored_rows, uint64_t{2});
  CHECK_EQ(table->stats().counted_ids, uint64_t{1});
  reopen({.admit_from = 3});
  update(table.get(), {2}, {1.0f});
  CHECK_EQ(table->stats().stored_rows, uint64_t{2});
  update(table.get(), {2}, {1.0f});
  CHECK_EQ(table->stats().stored_rows, uint64_t{3});
  CHECK_EQ(table->stats().counted_ids, uint64_t{0});
}

// The rule may be gone again before the first commit that would have it.
TEST(counts_of_a_rule_that_no_commit_has) {
  Sandbox sandbox;
  auto table = Table::create(vfs::posix(), sandbox / "t", "t", whole_numbers(-1, 4), 8 << 20);
  table->set_retention({.admit_from = 3});
  update(table.get(), {1, 2}, {1.0f, 1.0f});
  table->set_retention({});
  table->commit(std::nullopt, "");
  table->close();
  CHECK_EQ(newest_commit(sandbox / "t").counted_ids, uint64_t{2});
  CHECK_EQ(open_table(vfs::posix(), sandbox / "t", 8 << 20)->stats().counted_ids, uint64_t{2});
}

// A tombstone is dropped only where the log has no older count of its row, or that count would be there again.
TEST(counts_go_before_the_tombstones_of_their_rows) {
  const NoCompactionSlack no_slack;
  TableSpec spec = whole_numbers(-1, 40);
  spec.retention.admit_from = 5;
  Sandbox sandbox;
  auto table = Table::create(vfs::posix(), sandbox / "t", "t", spec, 16 << 20);
  std::vector<int64_t> ids(2500);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  update(table.get(), ids, std::vector<float>(ids.size(), 1.0f));
  table->commit(std::nullopt, "");
  ids.resize(500);
  const std::vector<float> values(ids.size() * 40, 1.0f);
  table->set(ids.data(), ids.size(), 0, values.data());
  table->commit(std::nullopt, "");
  CHECK_EQ(erase(table.get(), ids), uint64_t{500});
  for (int i = 0; i < 6; ++i) {
    update(table.get(), {2499}, {1.0f});
    table->commit(std::nullopt, "");
    table->compact();
  }
  table->commit(std::nullopt, "again");
  CHECK_EQ(table->stats().tombstones, uint64_t{0});
  table->close();
  CHECK_EQ(counts_on_disk(sandbox / "t").size(), size_t{1999});
  CHECK_EQ(open_table(vfs::posix(), sandbox / "t", 16 << 20)->stats().counted_ids, uint64_t{1999});
}
