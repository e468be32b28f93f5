// Many small commits: the number of segments and files, and the cost of keeping it low (compactor.h).
#include <filesystem>

#include "tests/check.h"
#include "tests/descriptors.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr int64_t kRows = 3000;
constexpr size_t kMostSegments = 16 + 2;  // four for each of four tiers, and two of the commit under way

size_t files_in(const std::string& path) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path), {}));
}

struct Peaks {
  size_t segments = 0;
  size_t files = 0;
  void look(Table* table, const std::string& path) {
    segments = std::max(segments, static_cast<size_t>(table->stats().segments));
    files = std::max(files, files_in(path));
  }
};

void commit_row(Table* table, Rows* rows, int64_t row) {
  update(table, {row}, {1.0f});
  apply(rows, {row}, {1.0f});
  table->commit(std::nullopt, "");
}

}  // namespace

TEST(small_commits_leave_few_segments) {
  const TableSpec spec = whole_numbers(kRows, 8);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, kRows, true) * 2;
  Rows rows;
  Peaks peaks;
  {
    auto table = Table::create(vfs, path, "t", spec, ram);
    for (int64_t row = 0; row < kRows; ++row) {
      commit_row(table.get(), &rows, row);
      if (row % 10 == 0) peaks.look(table.get(), path);
    }
    const TableStats stats = table->stats();
    // A record is moved at most once in each of four tiers, and a few more times in the first tier of 4 KiB blocks.
    CHECK(stats.compacted_records < 20 * kRows);
    CHECK(stats.log.written_bytes < 4 * kRows * 8192);
    check_table_is(table.get(), rows, "in the end");
  }
  CHECK(peaks.segments <= kMostSegments);
  CHECK(peaks.files <= 3 * kMostSegments);
  auto again = open_table(vfs, path, ram);
  CHECK(again->stats().segments <= kMostSegments);
  check_table_is(again.get(), rows, "opened again");
}

TEST(small_commits_of_snapshots_and_rewrites_leave_few_segments) {
  const TableSpec spec = whole_numbers(kRows, 8);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, kRows, true) * 2;
  Rows rows;
  Peaks peaks;
  auto table = Table::create(vfs, path, "t", spec, ram);
  Sampler sampler(3);
  for (int64_t step = 0; step < 1500; ++step) {
    const auto row = static_cast<int64_t>(sampler.bits() % 400);
    update(table.get(), {row}, {1.0f});
    apply(&rows, {row}, {1.0f});
    const std::string name = step % 50 == 0 ? "kept" : "";  // a new commit takes the name, so one is kept at a time
    table->commit(std::nullopt, name);
    if (step % 10 == 0) peaks.look(table.get(), path);
  }
  check_table_is(table.get(), rows, "in the end");
  CHECK(peaks.segments <= kMostSegments);
  CHECK(peaks.files <= 4 * kMostSegments);
  table->drop("kept");
  CHECK(table->snapshots().empty());
}

// The merge after a commit is lost when the table closes before the next commit.
TEST(small_commits_of_many_sessions_leave_few_segments) {
  const TableSpec spec = whole_numbers(kRows, 8);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, kRows, true) * 2;
  Rows rows;
  Peaks peaks;
  Table::create(vfs, path, "t", spec, ram).reset();
  for (int64_t row = 0; row < 200; ++row) {
    auto table = open_table(vfs, path, ram);
    peaks.look(table.get(), path);
    commit_row(table.get(), &rows, row);
  }
  CHECK(peaks.segments <= kMostSegments);
  CHECK(peaks.files <= 3 * kMostSegments);
  // Opening alone makes no durable change.
  for (int i = 0; i < 3; ++i) check_table_is(open_table(vfs, path, ram).get(), rows, "opened again");
}

// Only the first collection lists the directory. Later ones remove the same files without a listing.
TEST(small_commits_leave_no_file_behind) {
  const TableSpec spec = whole_numbers(kRows, 8);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, kRows, true) * 2;
  Rows rows;
  auto table = Table::create(vfs, path, "t", spec, ram);
  for (int64_t row = 0; row < 40; ++row) commit_row(table.get(), &rows, row);
  for (int i = 0; i < 200; ++i) {
    update(table.get(), {i}, {1.0f});
    apply(&rows, {i}, {1.0f});
    table->commit(std::nullopt, "k" + std::to_string(i));
  }
  CHECK_EQ(table->snapshots().size(), size_t{200});
  for (int i = 0; i < 200; ++i) table->drop("k" + std::to_string((i * 7) % 200));
  CHECK_THROWS(table->drop("k3"), ErrorKind::kInvalid, "has no snapshot 'k3'; it has none");
  // A commit that fails, with or without its names on the disk, and commits after it.
  for (int i = 0; i < 20; ++i) {
    vfs.fail_all(i % 2 == 0 ? Op::kCreate : Op::kLink, EIO);
    update(table.get(), {i}, {1.0f});
    apply(&rows, {i}, {1.0f});
    CHECK_THROWS(table->commit(std::nullopt, ""), ErrorKind::kSystem, "injected");
    vfs.heal();
    commit_row(table.get(), &rows, i);
  }
  for (int64_t row = 0; row < 100; ++row) commit_row(table.get(), &rows, row);
  const size_t before = files_in(path);
  CHECK(before <= 2 * kMostSegments + 4);
  table.reset();
  const auto again = open_table(vfs, path, ram);
  check_table_is(again.get(), rows, "opened again");
  CHECK(files_in(path) + kMostSegments >= before);
}

// Neither a commit nor a drop reads the manifests of other commits.
TEST(small_commits_cost_the_same_with_many_snapshots) {
  const TableSpec spec = whole_numbers(kRows, 8);
  const Sandbox sandbox;
  FaultVfs vfs;
  const size_t ram = minimum_ram(spec, kRows, true) * 2;
  auto table = Table::create(vfs, sandbox / "t", "t", spec, ram);
  Rows rows;
  // The most operations of one commit, and of one drop, among the next ten.
  const auto most = [&](int first) {
    uint64_t commit = 0, drop = 0;
    for (int i = first; i < first + 10; ++i) {
      update(table.get(), {i}, {1.0f});
      apply(&rows, {i}, {1.0f});
      vfs.set_fault(0, vfs::Fault::kError);
      table->commit(std::nullopt, "k" + std::to_string(i));
      commit = std::max(commit, vfs.count());
    }
    for (int i = first; i < first + 5; ++i) {
      vfs.set_fault(0, vfs::Fault::kError);
      table->drop("k" + std::to_string(i));
      drop = std::max(drop, vfs.count());
    }
    return std::pair{commit, drop};
  };
  (void)most(0);
  const auto few = most(10);
  for (int i = 20; i < 300; i += 10) (void)most(i);
  const auto many = most(300);
  CHECK(table->snapshots().size() > 150);
  // One of the ten may include a merge. Reading the other manifests would take more than 300 operations.
  CHECK(many.first <= few.first + 120);
  CHECK(many.second <= few.second + 120);
  check_table_is(table.get(), rows, "in the end");
}

// More tables and readers than there are descriptors for all their segments.
TEST(small_commits_of_many_tables_share_few_descriptors) {
  constexpr size_t kTables = 6, kMostOpen = 40;
  const TableSpec spec = whole_numbers(kRows, 30);
  const Sandbox sandbox;
  const size_t ram = minimum_ram(spec, kRows, true);
  const FewDescriptors few(kMostOpen);
  FaultVfs vfs;
  std::vector<std::unique_ptr<Table>> tables;
  std::vector<Rows> rows(kTables);
  for (size_t i = 0; i < kTables; ++i)
    tables.push_back(Table::create(vfs, sandbox / std::to_string(i), "t", spec, ram));
  auto reader = open_table(vfs, sandbox / "0", ram, false);
  Sampler sampler(9);
  size_t most_segments = 0;
  for (int step = 0; step < 600; ++step) {
    const size_t i = sampler.bits() % kTables;
    std::vector<int64_t> ids;
    std::vector<float> grads;
    for (int n = 0; n < 40; ++n) {
      ids.push_back(static_cast<int64_t>(sampler.bits() % kRows));
      grads.push_back(1.0f);
    }
    update(tables[i].get(), ids, grads);
    apply(&rows[i], ids, grads);
    tables[i]->commit(std::nullopt, "");
    if (step % 40 == 0) {
      tables[0]->commit(std::nullopt, "");
      reader->refresh();
      check_table_is(reader.get(), rows[0], "the reader at step " + std::to_string(step));
    }
    size_t segments = 0, open = 0;
    for (const auto& table : tables) {
      segments += table->stats().segments;
      open += table->stats().open_files;
    }
    most_segments = std::max(most_segments, segments);
    CHECK(open <= kMostOpen);
    CHECK_EQ(reader->stats().open_files, reader->stats().segments);
  }
  CHECK(most_segments > kMostOpen);
  for (size_t i = 0; i < kTables; ++i) check_table_is(tables[i].get(), rows[i], "table " + std::to_string(i));
}
