// The limit of a log's files, without a table: admitted rows can be written, and no more are admitted than the rule
// says.
#include "store/disk_budget.h"

#include <cerrno>
#include <set>

#include "tests/check.h"
#include "tests/sample.h"
#include "tests/store/log_parts.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr uint64_t kNoRows = ~uint64_t{0};

struct Files : LogParts {
  DiskBudget budget{&log, directory.get(), &cache, &compactor, &plan, &unwritten};

  // ---- Inequality (1) of disk_budget.cc, from the sizes of the format.
  uint64_t segment_overhead() const {
    return kSegmentHeaderBytes + vfs::kBlockBytes + kChunkTrailerBytes + log.stride();
  }
  uint64_t to_write(uint64_t rows) const {
    const uint64_t records = rows * log.record_disk_bytes();
    const uint64_t segments = rows == 0 ? 0 : 1 + records / log.segment_bytes();
    return records + segments * segment_overhead();
  }
  uint64_t slack_in_use(uint64_t commits, uint64_t meta_bytes) const {
    const uint64_t slack = 3 * log.segment_bytes() + (plan.log.num_chunks + 2) * plan.log.chunk_bytes + (128u << 10);
    return slack + (commits + 1) * meta_bytes - (commits + 1) * segment_overhead();
  }

  // The most new rows that have room now.
  uint64_t most_admitted() {
    uint64_t none = 1u << 20;
    CHECK(!budget.has_room_for_any(none));
    if (!budget.has_room_for_any(0)) return 0;
    for (uint64_t some = 0; none - some > 1;) {
      const uint64_t rows = (some + none) / 2;
      (budget.has_room_for_any(rows) ? some : none) = rows;
    }
    budget.forget_admitted();
    return none - 1;
  }
  bool has_room_for(const std::vector<int64_t>& rows) { return budget.has_room_for(rows.data(), rows.size()); }
  uint64_t rows_beyond(const std::vector<int64_t>& rows, size_t above = 0, uint64_t most = kNoRows) const {
    return budget.rows_beyond(rows.data(), rows.size(), above, most);
  }

  // Names every segment that has a live record, as a commit does, and removes files that no commit names.
  void commit(std::set<uint64_t> kept = {}) {
    budget.forget_admitted();
    (void)budget.shrink_for_commit(
        !kept.empty());  // where it cannot, the commit goes on, and the next one packs the rest
    write_back_all();
    log.rotate();
    Manifests::Held held;
    for (const auto& [id, segment] : log.segments()) {
      if (segment->live > 0) held.segments[id] = segment->bytes;
    }
    for (const uint64_t id : committed) {
      if (!held.segments.contains(id) && log.find_segment(id) == nullptr) vfs.remove(path + "/" + segment_name(id));
    }
    committed.clear();
    for (const auto& [id, bytes] : held.segments) committed.insert(id);
    held.other_bytes = 4096;
    held.kept = std::move(kept);
    budget.set_held(std::move(held));
  }
  std::set<uint64_t> committed;  // segments
};

// Random steps and evictions, with commits in between. The files stay within a limit that is just enough for the rows,
// and no step is refused.
void trains(size_t commits, int64_t num_rows, uint64_t seed) {
  Files files;
  DiskBudget& budget = files.budget;
  budget.set_limit(1, commits, kNoRows);
  const uint64_t limit = budget.needed(static_cast<uint64_t>(num_rows));
  budget.set_limit(limit, commits, kNoRows);
  Sampler sampler(seed);
  uint64_t waits = 0, most = 0;
  for (int step = 0; step < 1500; ++step) {
    std::vector<int64_t> rows(1 + sampler.bits() % 300);
    for (int64_t& row : rows) row = static_cast<int64_t>(sampler.bits() % static_cast<uint64_t>(num_rows));
    CHECK_EQ(files.rows_beyond(rows), uint64_t{0});
    if (!files.has_room_for(rows)) {
      ++waits;
      CHECK(budget.make_room());
      CHECK(files.has_room_for(rows));
    }
    for (const int64_t row : rows) files.make_dirty(row);
    if (sampler.bits() % 2 == 0) {
      for (const int64_t row : rows) {
        if (is_frame(files.directory->find(row)) && sampler.bits() % 4 != 0)
          files.write_back(row, sampler.bits() % 2 == 0);
      }
    }
    if (commits > 0 && sampler.bits() % 100 == 0) files.commit();
    most = std::max(most, files.bytes_of_files());
    CHECK(files.bytes_of_files() <= limit);
    CHECK(files.bytes_of_files() <= budget.used_bytes());
  }
  if (waits <= 5 || most <= limit / 3)
    fail(__FILE__, __LINE__,
         std::to_string(waits) + " waits, " + std::to_string(most) + " of " + std::to_string(limit) + " bytes");
  files.check_rows();
  files.write_back_all();
  files.check_rows();
}

}  // namespace

TEST(disk_budget_without_a_limit_admits_everything) {
  Files files;
  files.append(0, 3000);
  for (const uint64_t limit : {uint64_t{0}, uint64_t{1}}) {
    files.budget.set_limit(limit, 1, kNoRows);
    CHECK_EQ(files.budget.is_limited(), limit != 0);
    CHECK_EQ(files.has_room_for({1, 2, 5000}), limit == 0);
    CHECK_EQ(files.budget.has_room_for_any(1u << 20), limit == 0);
    CHECK_EQ(files.budget.has_bytes(1u << 30), limit == 0);
    CHECK_EQ(files.rows_beyond({5000}), limit == 0 ? 0u : 3001u);
  }
}

// A table in RAM only has no files: it ignores the limit.
TEST(disk_budget_without_a_log_has_no_limit) {
  const auto directory = make_hashed_directory();
  Cache cache(8, 16);
  Compactor compactor(directory.get(), &cache, nullptr);
  const MemoryPlan plan = plan_memory(0, 8, 1, 512, false);
  UnwrittenRows unwritten{3, 0};
  DiskBudget budget(nullptr, directory.get(), &cache, &compactor, &plan, &unwritten);
  budget.set_limit(1000, 1, kNoRows);
  budget.reserve_held(100);
  CHECK(!budget.is_limited());
  CHECK_EQ(budget.used_bytes(), uint64_t{0});
  CHECK_EQ(budget.snapshot_bytes(), uint64_t{0});
  const int64_t row = 5;
  CHECK(budget.has_room_for(&row, 1) && budget.has_room_for_any(1000) && budget.has_bytes(1u << 30));
  CHECK_EQ(budget.rows_beyond(&row, 1), uint64_t{0});
  CHECK(budget.shrink_for_commit(true));
}

TEST(disk_budget_admits_what_the_inequality_allows_and_not_a_row_more) {
  constexpr uint64_t kLimit = 4u << 20;
  for (const size_t commits : {size_t{0}, size_t{1}, size_t{3}}) {
    Files files;
    DiskBudget& budget = files.budget;
    budget.set_limit(kLimit, commits, kNoRows);
    uint64_t meta_bytes = 0, before = ~uint64_t{0};
    const auto check = [&](uint64_t held, const std::string& when) {
      const uint64_t taken = files.unwritten.total() + held;
      const auto fits = [&](uint64_t rows) {
        return budget.used_bytes() + files.to_write(taken + rows) + files.slack_in_use(commits, meta_bytes) <= kLimit;
      };
      const uint64_t most = files.most_admitted();
      if (!fits(most) || fits(most + 1))
        fail(__FILE__, __LINE__, when + ": " + std::to_string(most) + " rows are admitted");
      if (most >= before) fail(__FILE__, __LINE__, when + " takes nothing of the limit");
      before = most;
    };
    check(0, "no file");
    files.append(0, 5000);
    check(0, "records");
    files.make_dirty(100);
    for (int64_t row = 6000; row < 6300; ++row) files.make_dirty(row);
    check(0, "dirty rows");
    files.unwritten.frozen += 200;
    check(0, "frozen rows");
    budget.reserve_held(500);
    check(500, "a device cache");
    budget.set_meta_bytes(meta_bytes = 50'000);
    check(500, "large meta");
    budget.set_index_snapshot_bytes(70'000);
    check(500, "an index snapshot");
    Manifests::Held held;
    held.segments[77] = 60'000;  // of a commit alone
    held.other_bytes = 9000;
    budget.set_held(std::move(held));
    check(500, "a commit");
  }
}

TEST(disk_budget_admits_rows_up_to_the_last_byte_of_the_limit) {
  Files files;
  files.append(0, 3000);
  for (const uint64_t rows : {uint64_t{1}, uint64_t{100}, uint64_t{5000}}) {
    const uint64_t limit = files.budget.used_bytes() + files.to_write(rows) + files.slack_in_use(1, 0);
    files.budget.set_limit(limit, 1, kNoRows);
    CHECK_EQ(files.most_admitted(), rows);
    files.budget.set_limit(limit - 1, 1, kNoRows);
    CHECK_EQ(files.most_admitted(), rows - 1);
  }
}

// Bytes of files, and what open chunks may add.
TEST(disk_budget_counts_the_bytes_of_files) {
  Files files;
  files.append(0, 5000);
  const uint64_t chunk = files.plan.log.chunk_bytes;
  CHECK_EQ(files.log.open_bytes(), chunk);
  CHECK(files.bytes_of_files() <= files.budget.used_bytes());
  files.log.rotate();
  CHECK_EQ(files.budget.used_bytes(), files.bytes_of_files());
  files.budget.set_index_snapshot_bytes(123);
  CHECK_EQ(files.budget.used_bytes(), files.bytes_of_files() + 123);
  files.append(0);
  CHECK_EQ(files.budget.used_bytes(), files.bytes_of_files() + 123 + chunk);
}

TEST(disk_budget_counts_a_row_once_and_dirty_rows_not_at_all) {
  Files files;
  files.append(0, 4000);
  for (int64_t row = 1000; row < 1200; ++row) files.hold(row);
  for (int64_t row = 2000; row < 2300; ++row) files.make_dirty(row);
  files.budget.set_limit(2u << 20, 1, kNoRows);
  const auto most = static_cast<int64_t>(files.most_admitted());
  CHECK(most > 1000);
  const auto with = [](std::vector<int64_t> rows, const std::vector<int64_t>& more) {
    rows.insert(rows.end(), more.begin(), more.end());
    return rows;
  };
  // Rows in the log, clean rows in frames and new rows all become dirty.
  for (const int64_t first : {int64_t{0}, int64_t{900}, int64_t{50'000}}) {
    const int64_t end = first == 50'000 ? first + most : std::min<int64_t>(2000, first + most);
    const std::vector<int64_t> some = range(first, end);
    const std::vector<int64_t> rows = with(some, range(60'000, 60'000 + most - static_cast<int64_t>(some.size())));
    CHECK_EQ(rows.size(), static_cast<size_t>(most));
    CHECK(files.has_room_for(rows));
    CHECK(files.has_room_for(with(rows, rows)));
    CHECK(files.has_room_for(with(rows, range(2000, 2300))));
    CHECK(!files.has_room_for(with(rows, {99'999})));
    CHECK(!files.has_room_for(with(rows, {2300})));
  }
  // A frozen record is written once for the commit, and once more after a change.
  files.unwritten.frozen = files.cache.freeze();
  files.unwritten.dirty = 0;
  CHECK_EQ(files.most_admitted(), static_cast<uint64_t>(most));
  CHECK(files.has_room_for(with(range(50'000, 50'000 + most - 300), range(2000, 2300))));
  CHECK(!files.has_room_for(with(range(50'000, 50'001 + most - 300), range(2000, 2300))));
}

TEST(disk_budget_admitted_rows_count_until_they_are_forgotten) {
  Files files;
  files.budget.set_limit(2u << 20, 1, kNoRows);
  uint64_t left = 2u << 20;
  while (!files.budget.has_bytes(left)) --left;
  CHECK(left > 100'000);
  const auto check = [&](uint64_t rows) {
    CHECK(files.budget.has_bytes(left - files.to_write(rows)));
    CHECK(!files.budget.has_bytes(left - files.to_write(rows) + 1));
  };
  CHECK(files.has_room_for(range(0, 1000)));
  check(1000);
  CHECK(files.has_room_for(range(0, 400)));  // another question: its rows count instead
  check(400);
  CHECK(files.budget.has_room_for_any(300));
  check(300);
  files.budget.forget_admitted();
  check(0);
}

TEST(disk_budget_a_change_borrows_a_segment_once_when_compaction_gives_nothing) {
  Files files;
  int64_t full = -1;  // rows of a segment
  while (files.log.segments().size() < 2) files.append(++full);
  Files packed;
  packed.append(0, 4 * full);
  packed.log.rotate();
  CHECK_EQ(packed.log.segments().size(), size_t{4});
  packed.budget.set_limit(packed.budget.used_bytes() + (1u << 20), 0, kNoRows);
  const auto most = static_cast<int64_t>(packed.most_admitted());
  CHECK(most > 500);
  CHECK(packed.has_room_for(range(0, most)));
  CHECK(!packed.has_room_for(range(0, most + 1)));
  for (int time = 0; time < 2; ++time) {
    CHECK(packed.budget.make_room());
    CHECK_EQ(packed.compactor.records_moved(), uint64_t{0});
    CHECK(packed.has_room_for(range(0, most + 1)));
    CHECK(!packed.has_room_for(range(0, most + 1)));
  }
  // No more than a segment's bytes are borrowed.
  const auto segment = static_cast<int64_t>(packed.log.segment_bytes() / packed.log.record_disk_bytes());
  CHECK(!packed.has_room_for(range(0, most + segment + 10)));
  CHECK(!packed.budget.make_room());
  CHECK(!packed.has_room_for(range(0, most + segment + 10)));
}

TEST(disk_budget_makes_room_by_compaction_of_what_no_commit_names) {
  Files files;
  files.append(0, 8000);
  files.log.rotate();
  Manifests::Held held;
  for (const auto& [id, segment] : files.log.segments()) held.segments[id] = segment->bytes;
  const std::map<uint64_t, uint64_t> named = held.segments;
  files.budget.set_held(std::move(held));
  for (int time = 0; time < 5; ++time) files.append(0, 8000);
  files.log.rotate();
  files.budget.set_limit(files.budget.used_bytes() + (600u << 10), 1, kNoRows);
  const uint64_t before = files.budget.used_bytes();
  const std::vector<int64_t> rows = range(0, 6000);
  CHECK(!files.has_room_for(rows));
  CHECK(files.budget.make_room());
  CHECK(files.has_room_for(rows));
  CHECK(files.budget.used_bytes() + files.log.segment_bytes() < before);
  for (const auto& [id, bytes] : named) CHECK(files.vfs.exists(files.path + "/" + segment_name(id)));
  files.check_rows();
}

// Emptying a segment that a commit names frees nothing before the next commit.
TEST(disk_budget_makes_room_without_moving_records_of_a_commit) {
  Files files;
  files.append(0, 8000);
  files.log.rotate();
  Manifests::Held held;
  for (const auto& [id, segment] : files.log.segments()) held.segments[id] = segment->bytes;
  const std::map<uint64_t, uint64_t> named = held.segments;
  files.budget.set_held(std::move(held));
  files.append(10'000, 18'000);
  files.log.rotate();
  for (int64_t row = 0; row < 8000; ++row) {
    if (row % 10 != 0) files.append(row);  // the named segments are the emptiest
  }
  files.append(10'000, 18'000, 2);
  files.log.rotate();
  std::map<uint64_t, uint64_t> live;
  for (const auto& [id, bytes] : named) live[id] = files.log.find_segment(id)->live;
  files.budget.set_limit(files.budget.used_bytes() + (900u << 10), 1, kNoRows);
  CHECK(!files.has_room_for(range(0, 7000)));
  CHECK(files.budget.make_room());
  CHECK(files.compactor.records_moved() > 0);
  for (const auto& [id, bytes] : named) {
    const Segment* const segment = files.log.find_segment(id);
    CHECK(segment != nullptr && segment->live == live[id]);
  }
}

// The records of a segment are written a second time before its file is removed.
TEST(disk_budget_empties_no_segment_that_has_no_room_for_its_copies) {
  Files files;
  files.append(0, 8000);
  files.append(0, 8000, 2);
  files.log.rotate();
  const uint64_t used = files.budget.used_bytes();
  files.budget.set_limit(used + files.log.segment_bytes() / 2, 0, kNoRows);
  CHECK(!files.has_room_for(range(0, 1000)));
  CHECK(!files.budget.make_room());
  CHECK_EQ(files.compactor.records_moved(), uint64_t{0});
  CHECK_EQ(files.budget.used_bytes(), used);
}

TEST(disk_budget_rows_beyond_counts_new_rows_alone) {
  Files files;
  files.append(0, 1000);
  files.budget.set_limit(1500u << 10, 1, kNoRows);
  uint64_t most_stored = 0;
  while (files.budget.needed(most_stored + 1) <= files.budget.limit()) ++most_stored;
  CHECK(most_stored > 1500 && most_stored < 8000);
  const auto most_new = static_cast<int64_t>(most_stored) - 1000;
  CHECK_EQ(files.rows_beyond(range(5000, 5000 + most_new)), uint64_t{0});
  CHECK_EQ(files.rows_beyond(range(5000, 5000 + most_new + 1)), most_stored + 1);
  Sampler sampler(3);
  size_t beyond = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<int64_t> rows(1 + sampler.bits() % 5000);
    std::set<int64_t> fresh;
    const uint64_t spread = 1 + sampler.bits() % 12'000;
    for (int64_t& row : rows) {
      row = static_cast<int64_t>(sampler.bits() % spread);
      if (row >= 1000) fresh.insert(row);
    }
    const size_t above = sampler.bits() % 2 == 0 ? 0 : sampler.bits() % 4000;
    const uint64_t most = sampler.bits() % 2 == 0 ? kNoRows : 1000 + sampler.bits() % 4000;
    uint64_t stored = fresh.empty() ? 0 : std::min<uint64_t>(most, 1000 + fresh.size() + above);
    if (stored <= most_stored) stored = 0;
    CHECK_EQ(files.rows_beyond(rows, above, most), stored);
    beyond += stored > 0;
  }
  if (beyond <= 500 || beyond >= 2500) fail(__FILE__, __LINE__, std::to_string(beyond) + " of 3000 are beyond");
}

TEST(disk_budget_of_a_scratch_table_stays_within_what_its_rows_need) { trains(0, 6000, 1); }
TEST(disk_budget_of_one_commit_stays_within_what_its_rows_need) {
  trains(1, 6000, 2);
  trains(1, 1500, 3);
}

TEST(disk_budget_needed_grows_with_the_rows_and_shrinks_with_the_chunks) {
  Files files;
  files.append(0, 3000);
  files.budget.set_limit(8u << 20, 1, kNoRows);
  for (const uint64_t rows : {uint64_t{0}, uint64_t{1}, uint64_t{3000}, uint64_t{100'000}}) {
    CHECK(files.budget.needed(rows) < files.budget.needed(rows + 1));
    CHECK_EQ(files.budget.needed_with(files.plan.log, rows), files.budget.needed(rows));
    LogMemory larger = files.plan.log;
    larger.chunk_bytes *= 4;
    const uint64_t with_larger = files.budget.needed_with(larger, rows);
    CHECK(rows == 100'000 || with_larger > files.budget.needed(rows));  // records pack more tightly in large chunks
    CHECK(with_larger >= files.budget.needed(rows) - 2 * rows * files.log.record_disk_bytes());
  }
  CHECK(files.budget.needed_now() >= files.budget.needed(3000));
  const uint64_t now = files.budget.needed_now();
  for (int time = 0; time < 4; ++time) files.append(0, 3000);
  CHECK(files.budget.needed_now() > now + 2 * 3000 * 64);  // dead records of a commit stay with it
  // The number of rows that the table can have bounds what they need.
  CHECK(files.budget.needed_for(1u << 20) > files.budget.needed(4000));
  const uint64_t bytes = files.to_write(1u << 20) - files.log.segment_bytes();
  files.budget.set_limit(8u << 20, 1, 4000);
  CHECK_EQ(files.budget.needed_for(1u << 20), files.budget.needed(4000) + bytes);
}

// The limit that opening requires is enough for training, also when the last commit has many dead records.
TEST(disk_budget_needed_now_is_enough_to_go_on) {
  Files files;
  DiskBudget& budget = files.budget;
  budget.set_limit(16u << 20, 1, kNoRows);
  for (int time = 0; time < 3; ++time) files.append(0, 4000);
  files.commit();
  budget.set_limit(budget.needed_now(), 1, kNoRows);
  const uint64_t limit = budget.limit();
  Sampler sampler(5);
  for (int step = 0; step < 200; ++step) {
    std::vector<int64_t> rows(100);
    for (int64_t& row : rows) row = static_cast<int64_t>(sampler.bits() % 4000);
    CHECK_EQ(files.rows_beyond(rows), uint64_t{0});
    if (!files.has_room_for(rows)) {
      CHECK(budget.make_room());
      CHECK(files.has_room_for(rows));
    }
    for (const int64_t row : rows) files.make_dirty(row);
    for (const int64_t row : rows) {
      if (is_frame(files.directory->find(row))) files.write_back(row, true);
    }
    if (step % 50 == 49) files.commit();
    CHECK(files.bytes_of_files() <= limit);
  }
  files.check_rows();
}

// A change of so many rows at once, right after a commit that names everything.
TEST(disk_budget_needed_for_is_enough_for_a_large_change) {
  constexpr int64_t kAtOnce = 9000;
  Files files;
  DiskBudget& budget = files.budget;
  files.append(0, 1000);
  budget.set_limit(1, 1, kNoRows);
  budget.set_limit(budget.needed_for(kAtOnce), 1, kNoRows);
  files.commit();
  for (const int64_t first : {int64_t{500}, int64_t{0}, int64_t{1000}}) {
    const std::vector<int64_t> rows = range(first, first + kAtOnce);
    CHECK_EQ(files.rows_beyond(rows), uint64_t{0});
    if (!files.has_room_for(rows)) {
      CHECK(budget.make_room());
      CHECK(files.has_room_for(rows));
    }
    for (const int64_t row : rows) files.make_dirty(row);
    if (first == 0) files.commit();
    CHECK(files.bytes_of_files() <= budget.limit());
  }
  files.commit();
  CHECK(files.bytes_of_files() <= budget.limit());
  files.check_rows();
}

// Segments of kept commits count against the limit. snapshot_bytes() counts those that the log no longer has.
TEST(disk_budget_of_kept_commits) {
  Files files;
  DiskBudget& budget = files.budget;
  budget.set_limit(8u << 20, 1, kNoRows);
  files.append(0, 4000);
  const uint64_t to_keep = budget.needed_to_keep();
  const uint64_t needed = budget.needed(4000);
  CHECK(to_keep > needed);
  files.log.rotate();
  const uint64_t log_bytes = budget.log_bytes();
  CHECK_EQ(log_bytes, files.bytes_of_files());
  std::set<uint64_t> all;
  for (const auto& [id, segment] : files.log.segments()) all.insert(id);
  files.commit(all);
  CHECK_EQ(budget.snapshot_bytes(), uint64_t{0});
  CHECK_EQ(budget.log_bytes(), uint64_t{0});
  CHECK_EQ(budget.needed(4000), needed + log_bytes);
  CHECK(budget.needed(4000) <= to_keep);
  // All rows are written again: the records in the snapshot's segments are dead.
  files.append(0, 4000);
  files.log.drain();  // files are complete when their writes have ended
  files.compactor.drop_dead_segments();
  CHECK_EQ(budget.snapshot_bytes(), log_bytes);
  for (const uint64_t id : all) CHECK(files.vfs.exists(files.path + "/" + segment_name(id)));
  CHECK_EQ(budget.used_bytes(), files.bytes_of_files() + 4096);
  // No commit names the segments any more. FileCollector removes their files.
  budget.set_held({});
  CHECK_EQ(budget.snapshot_bytes(), uint64_t{0});
  CHECK_EQ(budget.needed(4000), needed);
}

TEST(disk_budget_set_held_drops_dead_segments_and_spares_named_files) {
  Files files;
  DiskBudget& budget = files.budget;
  files.append(0, 1500);
  files.log.rotate();
  files.append(0, 1500);
  files.log.rotate();
  files.append(0, 1500);
  files.log.rotate();
  CHECK_EQ(files.log.segments().size(), size_t{3});
  Manifests::Held held;
  held.segments[1] = files.log.find_segment(1)->bytes;
  budget.set_held(std::move(held));
  CHECK_EQ(files.log.segments().size(), size_t{1});
  CHECK(files.vfs.exists(files.path + "/" + segment_name(1)));
  CHECK(!files.vfs.exists(files.path + "/" + segment_name(2)));
  CHECK_EQ(budget.used_bytes(), files.bytes_of_files());
}

// When a caller does not ask for room, an append fails. The files stay within the limit.
TEST(disk_budget_the_log_refuses_what_exceeds_the_limit) {
  Files files;
  files.budget.set_limit(400u << 10, 1, kNoRows);
  int64_t row = 0;
  try {
    for (; row < 100'000; ++row) files.append(row);
    fail(__FILE__, __LINE__, "the log grows without limit");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kSystem);
    CHECK_EQ(error.error_number(), ENOSPC);
    CHECK(std::string(error.what()).find("limit") != std::string::npos);
  }
  CHECK(row > 2000);
  files.written.erase(row);
  files.check_rows();
  CHECK(files.bytes_of_files() <= 400u << 10);
}
