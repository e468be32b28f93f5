// Which rows updates store, compared with a map, while the table lives: rows are admitted, refused, evicted, deleted,
// committed and read again.
#include "format/admission.h"

#include "tests/jobs/life.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr double kProbability = 0.25;

struct AdmittingLife : Life {
  AdmittingLife(uint64_t seed, size_t ram_bytes, uint64_t disk_bytes, bool on_disk)
      : Life(seed, -1, ram_bytes, disk_bytes, on_disk, {.expire = seed % 2 == 0 ? 1000 : 0, .admit = kProbability}) {}

  void step(size_t most) {
    const std::vector<int64_t> ids = some_ids(most);
    const std::vector<float> grads = update_in_some_way(ids);
    const Admission admission(kProbability, table->spec().init.seed, table->step());
    std::set<int64_t> refused;
    for (const int64_t id : ids) {
      if (!rows.contains(id) && !admission.admits(id)) refused.insert(id);
    }
    std::set<int64_t> fresh;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (refused.contains(ids[i])) continue;
      if (!rows.contains(ids[i])) fresh.insert(ids[i]);
      rows[ids[i]] -= grads[i];
    }
    num_refused += refused.size();
    num_admitted += fresh.size();
  }

  void check(const std::string& when) {
    check_table_is(table.get(), rows, when);
    const TableStats stats = table->stats();
    CHECK_EQ(stats.store.refused_rows, num_refused);
    CHECK_EQ(stats.store.admitted_rows, num_admitted);
    CHECK_EQ(stats.store.hits + stats.store.misses + stats.store.first_touches, stats.store.unique_rows);
  }

  uint64_t num_refused = 0, num_admitted = 0;
};

void live(AdmittingLife& life, bool on_disk) {
  for (int round = 0; round < 120; ++round) {
    const std::string when = "round " + std::to_string(round);
    for (int i = 0; i < 3; ++i) life.step(round % 10 == 9 ? 2000 : 200);
    if (round % 4 == 1) life.remove(300);
    if (round % 5 == 2) life.check(when);
    if (!on_disk || round % 6 != 3) continue;
    life.commit(false);
    if (round % 12 != 3) continue;
    life.reopen();
    life.num_refused = life.num_admitted = 0;
    life.check(when + ", opened");
    CHECK_EQ(life.table->spec().retention.admit, kProbability);
  }
  life.check("the end");
  CHECK(life.num_refused > 500 && life.num_admitted > 100 && life.rows.size() > 300);
}

}  // namespace

TEST(admission_of_a_table_in_ram) {
  AdmittingLife life(1, 0, 0, false);
  live(life, false);
}

TEST(admission_while_rows_are_evicted) {
  const SmallIndexSnapshots small;
  for (const uint64_t seed : {2, 3}) {
    const size_t ram = minimum_ram(whole_numbers(-1, Life::kDim), Life::kIds, true) + (64 << 10);
    AdmittingLife life(seed, ram, 0, true);
    live(life, true);
    CHECK(life.table->stats().store.evictions > 500);
  }
}

TEST(admission_with_a_limit_of_the_disk) {
  AdmittingLife life(4, 8 << 20, 400 << 20, true);
  live(life, true);
}

TEST(admission_reserves_for_admitted_rows_alone) {
  TableSpec spec = whole_numbers(-1, 4);
  spec.retention.admit = 0.001;
  Sandbox sandbox;
  const size_t ram = minimum_ram(spec, 5000, true);
  const auto table = Table::create(vfs::posix(), sandbox / "t", "t", spec, ram);
  std::vector<int64_t> ids(400'000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i) * 7;
  update(table.get(), ids, std::vector<float>(ids.size(), 1.0f));  // a directory of all these would not fit
  const uint64_t stored = table->stats().stored_rows;
  CHECK(stored > 300 && stored < 500);
  CHECK_EQ(table->stats().store.refused_rows, ids.size() - stored);
}
