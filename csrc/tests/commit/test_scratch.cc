// Scratch tables (scratch.h): nothing is kept, and segments have no names.
#include <algorithm>
#include <filesystem>
#include <functional>
#include <utility>

#include "tests/check.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

TableSpec scratch_spec() {
  TableSpec spec = whole_numbers(40'000, 16);
  spec.is_scratch = true;
  return spec;
}

size_t count_files(const std::string& path) {
  const auto entries = std::filesystem::directory_iterator(path);
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

// Runs an action of another process just before this process gets the lock.
class RacingVfs final : public FaultVfs {
 public:
  std::function<void()> before_lock;
  std::unique_ptr<vfs::Lock> lock(const std::string& path) override {
    if (const auto act = std::exchange(before_lock, nullptr)) act();
    return FaultVfs::lock(path);
  }
};

}  // namespace

TEST(scratch_rows_overflow_into_files_without_names) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;
  const TableSpec spec = scratch_spec();
  auto table = Table::create(vfs, path, "t", spec, minimum_ram(spec, 0, true));
  vfs.fail_all(Op::kSync, EIO);  // nothing is synced from here on
  Rows rows;
  Sampler sampler(1);
  for (int step = 0; step < 300; ++step) {
    std::vector<int64_t> ids(400);
    std::vector<float> grads(ids.size(), 1.0f);
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % 40'000);
    if (step % 3 == 0) table->stage(ids.data(), ids.size());
    update(table.get(), ids, grads);
    apply(&rows, ids, grads);
    if (step % 50 == 49) {
      const uint64_t epoch =
          step % 100 == 49 ? table->commit(std::nullopt, "") : table->begin_commit(std::nullopt, "")->wait();
      CHECK_EQ(epoch, static_cast<uint64_t>(step + 1) / 50);
    }
  }
  const TableStats stats = table->stats();
  CHECK(stats.compactions > 3);
  CHECK(stats.store.evictions > 10'000);
  CHECK_EQ(count_files(path), size_t{2});  // the mark and the lock
  check_table_is(table.get(), rows, "trained");
  table.reset();
  vfs.heal();
  CHECK_THROWS(open_table(vfs, path, 1u << 20), ErrorKind::kFormat, "scratch table");
  table = Table::create(vfs, path, "t", spec, minimum_ram(spec, 0, true));
  check_table_is(table.get(), {}, "made again");
}

// Any operation fails while one table replaces another: the next create() succeeds, and no table opens before.
TEST(scratch_left_half_made_is_made_anew) {
  const TableSpec spec = scratch_spec();
  const size_t ram = minimum_ram(spec, 0, true);
  for (uint64_t at = 1;; ++at) {
    const Sandbox sandbox;
    const std::string path = sandbox / "t";
    FaultVfs vfs;
    Table::create(vfs, path, "t", spec, ram).reset();
    (void)vfs.create_small(path + "/segment-0000000000000003");  // left by a process that died
    vfs.fail_at(at, EIO, true);
    try {
      Table::create(vfs, path, "t", spec, ram).reset();
    } catch (const Error&) {
    }
    const bool was_reached = vfs.count() >= at;
    vfs.heal();
    if (!was_reached) break;
    const auto table = Table::create(vfs, path, "t", spec, ram);
    check_table_is(table.get(), {}, "after operation " + std::to_string(at));
    CHECK_EQ(count_files(path), size_t{2});
  }
}

// Two processes create a table in one directory, and the other one ends first: its table stays, with its rows.
TEST(create_leaves_the_table_of_one_that_was_faster) {
  for (const bool is_scratch_left : {false, true}) {
    for (const bool wants_scratch : {false, true}) {
      const Sandbox sandbox;
      const std::string path = sandbox / "t";
      RacingVfs vfs;
      FaultVfs theirs;
      const TableSpec spec = whole_numbers(40'000, 16);
      const size_t ram = minimum_ram(spec, 0, true);
      if (is_scratch_left) Table::create(vfs, path, "t", scratch_spec(), ram).reset();
      Rows rows;
      vfs.before_lock = [&] {
        const auto other = Table::create(theirs, path, "t", spec, ram);
        update(other.get(), {1, 2, 3}, {1.0f, 2.0f, 3.0f});
        apply(&rows, {1, 2, 3}, {1.0f, 2.0f, 3.0f});
        other->commit(std::nullopt, "");
      };
      CHECK_THROWS(Table::create(vfs, path, "t", wants_scratch ? scratch_spec() : spec, ram), ErrorKind::kExists,
                   "exists already");
      check_table_is(open_table(theirs, path, ram).get(), rows, "of the faster one");
    }
  }
}
