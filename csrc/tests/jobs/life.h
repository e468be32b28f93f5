// A table and the map that says what it must have, through random calls: rows come, go and come again.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "jobs/index_snapshots.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/no_compaction_slack.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

namespace bunkbed::test {

struct SmallIndexSnapshots {
  SmallIndexSnapshots() {
    index_snapshot_rows = 50;
    index_snapshots_in_line = true;
  }
  ~SmallIndexSnapshots() {
    index_snapshot_rows = before;
    index_snapshots_in_line = false;
  }
  const uint64_t before = index_snapshot_rows;
};

inline uint64_t erase(Table* table, const std::vector<int64_t>& ids) {
  return table->erase(ids.data(), ids.size()).rows;
}

inline Manifest newest_commit(const std::string& path) { return Manifests(vfs::posix(), path).load_newest(); }

struct Seen {
  uint64_t evictions = 0, compactions = 0, purges = 0, index_snapshots = 0, deleted = 0, stored_again = 0;
};

// Random calls on a table and on the map that says what it must have.
struct Life {
  Life(uint64_t seed, int64_t num_rows, size_t ram_bytes, uint64_t disk_bytes, bool on_disk = true,
       const Retention& retention = {})
      : sampler(seed), ram(ram_bytes), disk(disk_bytes) {
    TableSpec spec = whole_numbers(num_rows, kDim);
    spec.retention = retention;
    table = Table::create(vfs, on_disk ? sandbox / "t" : "", "t", spec, ram, disk);
  }

  std::vector<int64_t> some_ids(size_t most) {
    std::vector<int64_t> ids(1 + sampler.bits() % most);
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % kIds);
    return ids;
  }

  std::vector<int64_t> train(size_t most) {
    const std::vector<int64_t> ids = some_ids(most);
    std::vector<float> grads(ids.size());
    for (float& grad : grads) grad = static_cast<float>(sampler.bits() % 5);
    update(table.get(), ids, grads);
    for (const int64_t id : ids) seen.stored_again += was_deleted.contains(id) && !rows.contains(id);
    apply(&rows, ids, grads);
    return ids;
  }

  // One step through a call with ids, or with a batch that was looked up or not. Returns the gradients, none of them 0.
  std::vector<float> update_in_some_way(const std::vector<int64_t>& ids) {
    std::vector<float> grads(ids.size());
    for (float& grad : grads) grad = static_cast<float>(1 + sampler.bits() % 5);
    const uint64_t way = sampler.bits() % 3;
    if (way == 0) {
      update(table.get(), ids, grads);
    } else {
      const Batch batch = table->batch(ids.data(), ids.size());
      if (way == 1) {
        std::vector<float> out(ids.size() * kDim);
        table->lookup(batch, true, out.data());
      }
      table->check_change(batch, true, std::nullopt, std::nullopt);
      update(table.get(), batch, grads);
    }
    return grads;
  }

  std::vector<int64_t> remove(size_t most) {
    const std::vector<int64_t> ids = some_ids(most);
    uint64_t expected = 0;
    for (const int64_t id : ids) expected += rows.erase(id);
    was_deleted.insert(ids.begin(), ids.end());
    CHECK_EQ(erase(table.get(), ids), expected);
    seen.deleted += expected;
    return ids;
  }

  void commit(bool in_background) {
    if (in_background) {
      const auto pending = table->begin_commit(std::nullopt, "");
      committed = rows;
      train(40);
      remove(40);
      pending->wait();
    } else {
      table->commit(std::nullopt, "");
      committed = rows;
    }
    seen.index_snapshots += !newest_commit(sandbox / "t").index_snapshots.empty();
  }

  void follow(const std::string& when) {
    if (reader == nullptr) {
      reader = open_table(vfs, sandbox / "t", std::max<size_t>(ram, 4 << 20), false);
    } else {
      reader->refresh();
    }
    check_table_is(reader.get(), committed, when + ", reader");
  }

  void count() {
    const TableStats stats = table->stats();
    seen.evictions += stats.store.evictions;
    seen.compactions += stats.compactions;
    seen.purges += newest_commit(sandbox / "t").deletions_from > 1;
  }

  void reopen() {
    count();
    table->close();
    rows = committed;
    OpenOptions options;
    options.ram_bytes = ram;
    options.disk_bytes = disk;
    table = Table::open(vfs, sandbox / "t", "t", options);
  }

  static constexpr int64_t kIds = 3000;
  static constexpr uint32_t kDim = 40;
  const Sandbox sandbox;
  FaultVfs vfs;
  Sampler sampler;
  size_t ram;
  uint64_t disk;
  std::unique_ptr<Table> table, reader;
  Rows rows, committed;
  std::set<int64_t> was_deleted;
  Seen seen;
};

}  // namespace bunkbed::test
