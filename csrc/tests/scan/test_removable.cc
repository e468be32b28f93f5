// Which rows go, compared with a map of the steps that named each row, while the table lives: rows are evicted, moved,
// committed, read again and deleted. A row's usage must follow it.
#include "scan/removable.h"

#include <algorithm>
#include <set>

#include "format/record.h"
#include "maintenance/check.h"
#include "tests/jobs/life.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

using Usages = std::map<int64_t, Usage>;

struct LifeWithUsage {
  LifeWithUsage(uint64_t seed, size_t ram, const Retention& rules, bool on_disk = true)
      : retention(rules), life(seed, -1, ram, 0, on_disk, rules) {}

  void train(size_t most) {
    const std::vector<int64_t> ids = life.train(most);
    for (const int64_t id : std::set<int64_t>(ids.begin(), ids.end())) {
      usages[id].last_step = life.table->clock();
      ++usages[id].count;
    }
  }

  void remove(size_t most) {
    for (const int64_t id : life.remove(most)) usages.erase(id);
  }

  void commit() {
    life.commit(false);
    committed = usages;
  }

  void reopen() {
    life.reopen();
    usages = committed;
  }

  uint64_t key_of(int64_t id, bool is_expired) const {
    const Usage& usage = usages.at(id);
    if (is_expired) return static_cast<uint64_t>(usage.last_step);
    double norm = 0.0;
    for (size_t d = 0; d < Life::kDim; ++d) {
      const double value = element(life.rows.at(id), d);
      norm += value * value;
    }
    const uint64_t keys[] = {static_cast<uint64_t>(usage.last_step), usage.count, std::bit_cast<uint64_t>(norm)};
    return keys[static_cast<size_t>(retention.evict)] | uint64_t{1} << 63;
  }

  std::vector<Removal> expected(bool only_expired, uint64_t* expired) const {
    std::vector<Removal> found;
    *expired = 0;
    for (const auto& [id, usage] : usages) {
      const bool is_expired = retention.expire > 0 && life.table->clock() - usage.last_step >= retention.expire;
      *expired += is_expired;
      if (is_expired || !only_expired) found.push_back({key_of(id, is_expired), id});
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  // Compares the whole order, in parts of `most`; then deletes the first rows of it.
  void sweep(size_t most) {
    for (const bool only_expired : {true, false}) {
      uint64_t expired = 0;
      const std::vector<Removal> all = expected(only_expired, &expired);
      Removal after;
      for (size_t from = 0; from <= all.size(); from += most) {
        const Removable found = find_removable(*life.table, retention, life.table->clock(), most, only_expired, after);
        CHECK_EQ(found.rows, usages.size());
        CHECK_EQ(found.expired, expired);
        CHECK_EQ(found.first.size(), std::min(most, all.size() - from));
        CHECK(std::equal(found.first.begin(), found.first.end(), all.begin() + static_cast<ptrdiff_t>(from)));
        if (found.first.empty()) break;
        after = found.first.back();
      }
    }
    const Removable found = find_removable(*life.table, retention, life.table->clock(), 50, false, {});
    std::vector<int64_t> ids;
    for (const Removal& removal : found.first) ids.push_back(removal.id);
    CHECK_THROWS(life.table->erase(ids.data(), ids.size(), found.changes + 1), ErrorKind::kBroken,
                 "sweep it between two steps");
    CHECK_EQ(life.table->erase(ids.data(), ids.size(), found.changes).rows, ids.size());
    for (const int64_t id : ids) {
      usages.erase(id);
      life.rows.erase(id);
    }
    swept += ids.size();
  }

  // The usage is the field after the last one, as bytes in floats.
  void check(const std::string& when) const {
    check_table_is(life.table.get(), life.rows, when);
    std::vector<int64_t> ids;
    for (const auto& [id, usage] : usages) ids.push_back(id);
    std::vector<std::array<float, 3>> bytes(ids.size());
    life.table->get(ids.data(), ids.size(), 1, ids.empty() ? nullptr : bytes.front().data());
    for (size_t i = 0; i < ids.size(); ++i) {
      const Usage found = read_usage(reinterpret_cast<const std::byte*>(&bytes[i]));
      CHECK_EQ(found.last_step, usages.at(ids[i]).last_step);
      CHECK_EQ(found.count, usages.at(ids[i]).count);
    }
  }

  const Retention retention;
  Life life;
  Usages usages, committed;
  uint64_t swept = 0;
};

Seen live(uint64_t seed, size_t ram, const Retention& rules, int calls, bool on_disk) {
  const NoCompactionSlack no_slack;
  const SmallIndexSnapshots small_snapshots;
  LifeWithUsage all(seed, ram, rules, on_disk);
  if (on_disk) all.commit();
  for (int call = 0; call < calls; ++call) {
    const uint64_t choice = all.life.sampler.bits() % 100;
    if (choice < 50) {
      all.train(300);
    } else if (choice < 60) {
      all.remove(20);
    } else if (choice < 70) {
      all.sweep(choice < 65 ? 700 : 5000);
    } else if (choice < 80 && on_disk) {
      all.commit();
    } else if (choice < 82 && on_disk) {
      all.life.table->compact();
    } else if (choice < 85 && on_disk) {
      all.reopen();
    } else if (choice < 88 && on_disk) {
      all.life.table->commit(std::nullopt, "kept");
      const Rows rows = all.life.committed = all.life.rows;
      const Usages usages = all.committed = all.usages;
      all.train(300);
      all.commit();
      all.life.table->rewind("kept", std::nullopt);
      all.life.table->drop("kept");
      all.life.rows = all.life.committed = rows;
      all.usages = all.committed = usages;
    } else {
      all.check("call " + std::to_string(call));
    }
  }
  CHECK(all.swept > 100);
  if (!on_disk) return {};
  all.commit();
  all.life.count();
  const Seen seen = all.life.seen;
  const auto reader = open_table(all.life.vfs, all.life.sandbox / "t", 64 << 20, false);
  uint64_t expired = 0;
  CHECK(find_removable(*reader, rules, reader->clock(), 100'000, false, {}).first == all.expected(false, &expired));
  all.life.table->close();
  for (const std::string& problem : check_table(all.life.vfs, all.life.sandbox / "t"))
    fail(__FILE__, __LINE__, problem);
  return seen;
}

}  // namespace

TEST(removable_rows_are_those_of_the_map) {
  const size_t ram = minimum_ram(whole_numbers(-1, Life::kDim), Life::kIds, true) + (256 << 10);
  uint64_t evictions = 0, compactions = 0;
  for (const EvictFirst evict : {EvictFirst::kOldest, EvictFirst::kRarest, EvictFirst::kSmallest}) {
    const Retention rules{.expire = 4, .max_rows = 100, .evict = evict};
    for (const bool on_disk : {true, false}) {
      const Seen seen = live(static_cast<uint64_t>(evict) + 1, on_disk ? ram : 0, rules, 150, on_disk);
      evictions += seen.evictions;
      compactions += seen.compactions;
    }
  }
  CHECK(evictions > 1000);
  CHECK(compactions > 5);
}

TEST(removable_needs_a_rule_and_an_unchanged_table) {
  Life life(1, -1, 1 << 20, 0);
  CHECK_THROWS(find_removable(*life.table, {.expire = 3}, 0, 10, true, {}), ErrorKind::kInvalid, "has no rule");
  CHECK_THROWS(life.table->set_retention({.expire = 3}), ErrorKind::kInvalid, "cannot change");
  CHECK_THROWS(life.table->set_clock(3), ErrorKind::kInvalid, "its clock is its step");
}

TEST(rows_that_never_go) {
  const Retention rules{.expire = 2, .max_rows = 1, .evict = EvictFirst::kSmallest};
  Life life(1, -1, 1 << 20, 0, true, rules);
  std::array<float, 3> bytes{};
  write_usage({kNeverGoes, 0}, reinterpret_cast<std::byte*>(bytes.data()));
  const int64_t id = 5;
  life.table->set(&id, 1, 1, bytes.data());
  const std::vector<float> zeros(Life::kDim);
  life.table->set(&id, 1, 0, zeros.data());
  for (int step = 0; step < 4; ++step) update(life.table.get(), {step < 1 ? 6 : 7, id}, {1.0f, 0.0f});
  const Removable found = find_removable(*life.table, rules, 4, 10, false, {});
  CHECK_EQ(found.rows, uint64_t{3});
  CHECK_EQ(found.expired, uint64_t{1});
  CHECK_EQ(found.first.size(), size_t{2});
  for (const Removal& removal : found.first) CHECK(removal.id != id);
  life.table->get(&id, 1, 1, bytes.data());
  CHECK_EQ(read_usage(reinterpret_cast<const std::byte*>(bytes.data())).last_step, kNeverGoes);
}

TEST(clock_of_events_must_be_set_first) {
  Life life(1, -1, 1 << 20, 0, true, {.expire = 2, .clock = AgeClock::kEvent});
  CHECK_EQ(life.table->clock(), int64_t{-1});
  CHECK_THROWS(update(life.table.get(), {5}, {1.0f}), ErrorKind::kInvalid,
               "assign table.clock before the first update");
  life.table->set_clock(0);
  update(life.table.get(), {5}, {1.0f});
}

TEST(counts_stay_at_their_largest_value) {
  const Retention rules{.expire = 4};
  Life life(1, -1, 1 << 20, 0, true, rules);
  const int64_t id = 5;
  std::array<float, 3> bytes{};
  write_usage({1, ~uint32_t{0} - 1}, reinterpret_cast<std::byte*>(bytes.data()));
  life.table->set(&id, 1, 1, bytes.data());
  for (int step = 0; step < 3; ++step) update(life.table.get(), {id}, {1.0f});
  life.table->get(&id, 1, 1, bytes.data());
  CHECK_EQ(read_usage(reinterpret_cast<const std::byte*>(bytes.data())).count, ~uint32_t{0});
  CHECK_EQ(read_usage(reinterpret_cast<const std::byte*>(bytes.data())).last_step, int64_t{3});
}
