// Repairs that stop after each of their operations in turn. The table then opens as before or as repaired, and a
// repeated repair succeeds.
#include <filesystem>
#include <fstream>

#include "format/format.h"
#include "maintenance/check.h"
#include "maintenance/repair.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/sandbox.h"

namespace bunkbed::test {

namespace {

void spoil(const std::string& path, uint64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(offset));
  file.put('?');
}

struct Kept {
  Rows first, second;
};

// Commit 1, kept as "first", commit 2, commit 3, which cannot be read, and files that a crashed session left.
Kept make_damaged(const std::string& path, const TableSpec& spec, size_t ram) {
  Kept kept;
  auto table = Table::create(vfs::posix(), path, "t", spec, ram);
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < 40; ++id) ids.push_back(id);
  const std::vector<float> ones(ids.size(), 1.0f);
  Rows rows;
  for (int commit = 1; commit <= 3; ++commit) {
    update(table.get(), ids, ones);
    apply(&rows, ids, ones);
    table->commit(std::nullopt, commit == 1 ? "first" : "");
    if (commit == 1) kept.first = rows;
    if (commit == 2) kept.second = rows;
  }
  table.reset();
  std::filesystem::copy_file(path + "/" + segment_name(1), path + "/" + segment_name(90));
  std::ofstream(path + "/new-manifest-x") << "half";
  std::ofstream(path + "/" + segment_name(2), std::ios::app) << "a torn end";
  spoil(path + "/" + manifest_name(3), 70);
  return kept;
}

}  // namespace

TEST(repair_may_stop_anywhere) {
  const TableSpec spec = whole_numbers(64, 30);
  const size_t ram = minimum_ram(spec, 64, true);
  RepairOptions options;
  options.fall_back_to = 2;
  uint64_t operations = 0;
  for (uint64_t at = 1; operations == 0 || at <= operations; ++at) {
    const Sandbox sandbox;
    const std::string path = sandbox / "t";
    const Kept kept = make_damaged(path, spec, ram);
    FaultVfs vfs;
    vfs.count_reads(false);
    if (at == 1) {  // the number of operations
      vfs.fail_at(0, EIO, false);
      const RepairedTable repaired = repair_table(vfs, path, options, nullptr);
      CHECK_EQ(repaired.table.problems.size(), 0u);
      operations = vfs.count();
      if (operations < 8) fail(__FILE__, __LINE__, "a repair of everything takes more operations");
    } else {
      vfs.fail_at(at, EIO, true);
      bool has_failed = false;
      try {
        repair_table(vfs, path, options, nullptr);
      } catch (const Error&) {
        has_failed = true;
      }
      vfs.heal();
      // Either opening reports the damage, as before, or the table is repaired.
      const CheckedTable between = inspect_table(vfs::posix(), path);
      const bool has_newest = !between.sound.empty() && between.sound.back() == between.epochs.back();
      if (!has_newest) {
        CHECK_EQ(between.sound.back(), 2u);
        CHECK_THROWS(open_table(vfs::posix(), path, ram), ErrorKind::kCorruption, "fall-back-to");
        CHECK_EQ(has_failed, true);
        CHECK_EQ(repair_table(vfs::posix(), path, options, nullptr).table.problems.size(), 0u);
      } else {
        CHECK_EQ(repair_table(vfs::posix(), path, {}, nullptr).table.problems.size(), 0u);
      }
    }
    const std::string when = "operation " + std::to_string(at) + " of " + std::to_string(operations);
    const CheckedTable after = inspect_table(vfs::posix(), path);
    CHECK_EQ(after.problems.size(), 0u);
    CHECK_EQ(after.leftovers.size(), 0u);
    auto table = open_table(vfs::posix(), path, ram);
    CHECK_EQ(table->epoch(), 4u);
    check_table_is(table.get(), kept.second, when);
    table->rewind("first", std::nullopt);
    check_table_is(table.get(), kept.first, when);
  }
}

TEST(repair_of_a_commit_whose_rows_are_gone_guesses_nothing) {
  const TableSpec spec = whole_numbers(64, 30);
  const size_t ram = minimum_ram(spec, 64, true);
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  make_damaged(path, spec, ram);
  spoil(path + "/" + segment_name(2), 5000);  // commit 2's own
  const RepairedTable repaired = repair_table(vfs::posix(), path, {}, nullptr);
  CHECK_EQ(repaired.table.sound.size(), 1u);
  CHECK_EQ(repaired.table.epochs.size(), 3u);
  for (const std::string& line : repaired.done) {
    if (line.find("manifest-0") != std::string::npos || line.find("removed segment") != std::string::npos) {
      fail(__FILE__, __LINE__, "it removed something of a commit that cannot be read: " + line);
    }
  }
  RepairOptions options;
  options.fall_back_to = 2;
  CHECK_THROWS(repair_table(vfs::posix(), path, options, nullptr), ErrorKind::kInvalid,
               "damaged itself; sound ones: 1");
}

}  // namespace bunkbed::test
