// Batches that are kept while other operations move rows: a batch must not use an outdated placement.
#include <algorithm>

#include "base/workers.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

struct Kept {
  std::vector<int64_t> ids;
  Batch batch;
};

// `sized_for`: the stored rows that the smallest budget is for. `range`: the number of rows of the table.
void random_batches(const TableSpec& spec, uint64_t seed, size_t frames, size_t most_ids, uint64_t sized_for,
                    uint64_t range) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, sized_for, true) + frames * 200;
  auto table = Table::create(vfs, path, "t", spec, ram);
  Sampler sampler(seed);
  Rows rows, kept_rows;
  bool has_kept = false;
  std::vector<Kept> batches(4);
  const auto make = [&](Kept* kept) {
    kept->ids.resize(1 + sampler.bits() % most_ids);
    for (int64_t& id : kept->ids) id = static_cast<int64_t>(sampler.bits() % range);
    kept->batch = table->batch(kept->ids.data(), kept->ids.size());
  };
  for (Kept& kept : batches) make(&kept);
  uint64_t evictions = 0;
  for (int round = 0; round < 600; ++round) {
    Kept& kept = batches[sampler.bits() % batches.size()];
    const uint64_t what = sampler.bits() % 32;
    if (what < 12) {
      std::vector<float> values(kept.ids.size() * spec.dim);
      table->lookup(kept.batch, what % 2 == 0, values.data());
      check_values(rows, kept.ids, values, spec.dim, "round " + std::to_string(round));
    } else if (what < 22) {
      std::vector<float> grads(kept.ids.size());
      for (float& grad : grads) grad = static_cast<float>(static_cast<int>(sampler.bits() % 3) - 1);
      update(table.get(), kept.batch, grads);
      apply(&rows, kept.ids, grads);
    } else if (what < 26) {
      make(&kept);
    } else if (what == 26) {
      has_kept = true;
      kept_rows = rows;
      evictions += table->stats().store.evictions;
      table->set_ram(std::max(ram, minimum_ram(spec, rows.size(), true)));
      table->commit(std::nullopt, "kept" + std::to_string(round));
      table->rewind("kept" + std::to_string(round), std::nullopt);  // only the places change
    } else if (what == 27) {
      table->set_ram(std::max(ram + sampler.bits() % (frames * 200), minimum_ram(spec, rows.size(), true)));
    } else if (what == 28) {
      table->stage(kept.ids.data(), kept.ids.size());
    } else if (what == 29 && has_kept) {
      evictions += table->stats().store.evictions;
      table.reset();  // without a commit
      rows = kept_rows;
      table = open_table(vfs, path, std::max(ram, minimum_ram(spec, rows.size(), true)));
    }
    const TableStats stats = table->stats();
    CHECK_EQ(stats.store.hits + stats.store.misses + stats.store.first_touches, stats.store.unique_rows);
  }
  CHECK(evictions + table->stats().store.evictions > 50);
  check_table_is(table.get(), rows, "the end");
}

}  // namespace

TEST(table_batches_kept_while_rows_move_flat) { random_batches(whole_numbers(900, 24), 11, 20, 30, 900, 900); }
TEST(table_batches_kept_while_rows_move_hashed) { random_batches(whole_numbers(-1, 24), 12, 8, 300, 0, 20000); }
TEST(table_batches_kept_while_rows_move_bounded) { random_batches(whole_numbers(2'000'000, 24), 14, 8, 300, 0, 16000); }
TEST(table_batches_larger_than_the_cache) { random_batches(whole_numbers(900, 24), 13, 8, 300, 900, 900); }

TEST(table_batches_count_a_row_once_a_step) {
  FaultVfs vfs;
  const auto table = Table::create(vfs, "", "t", whole_numbers(100, 4), 0);
  const std::vector<float> ones{1, 1, 1};
  const auto counted = [&] { return table->stats().store.unique_rows; };
  Kept kept{{5, 9, 5}, {}};
  kept.batch = table->batch(kept.ids.data(), kept.ids.size());
  update(table.get(), kept.batch, ones);
  CHECK_EQ(counted(), 2u);
  std::vector<float> values(3 * 4);
  for (const bool touch : {true, false}) {
    const uint64_t before = counted();
    table->lookup(kept.batch, touch, values.data());
    table->lookup(kept.batch, touch, values.data());
    CHECK_EQ(counted(), before + (touch ? 2 : 0));
    update(table.get(), kept.batch, ones);
    CHECK_EQ(counted(), before + 2);
  }
}

// Without a log the first batch of a step is counted without touching its frames. The others share rows with it.
TEST(table_lookups_of_one_step_count_a_shared_row_once) {
  FaultVfs vfs;
  const auto table = Table::create(vfs, "", "t", whole_numbers(100, 4), 0);
  const std::vector<int64_t> first{1, 2, 3}, second{3, 4, 3};
  const std::vector<float> ones{1, 1, 1};
  std::vector<float> values(3 * 4);
  const auto counted = [&] { return table->stats().store.hits; };
  for (const auto& ids : {first, second}) update(table.get(), ids, ones);
  const Batch a = table->batch(first.data(), 3), b = table->batch(second.data(), 3);
  uint64_t before = counted();
  table->lookup(a, true, values.data());
  CHECK_EQ(counted(), before + 3);
  table->lookup(b, true, values.data());
  CHECK_EQ(counted(), before + 4);
  table->lookup(first.data(), 3, true, values.data());
  table->lookup(a, true, values.data());
  CHECK_EQ(counted(), before + 4);
  update(table.get(), a, ones);
  CHECK_EQ(counted(), before + 4);
  before = counted();
  table->lookup(a, true, values.data());
  table->lookup(second.data(), 3, true, values.data());  // a lookup by ids, without a Batch
  CHECK_EQ(counted(), before + 4);
  update(table.get(), second, ones);
  CHECK_EQ(counted(), before + 4);
}

// A staged row is counted when it is staged, even if the cache has every row.
TEST(table_batches_count_a_staged_row_once) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const std::vector<int64_t> ids{1, 2, 3};
  const TableSpec spec = whole_numbers(100, 4);
  auto table = Table::create(vfs, path, "t", spec, size_t{32} << 20);
  update(table.get(), ids, {1, 1, 1});
  table->commit(std::nullopt, "");
  table.reset();
  table = open_table(vfs, path, size_t{32} << 20);
  table->stage(ids.data(), ids.size());
  std::vector<float> values(3 * 4);
  const Batch batch = table->batch(ids.data(), ids.size());
  table->lookup(batch, true, values.data());
  const TableStats stats = table->stats();
  CHECK_EQ(stats.store.unique_rows, 3u);
  CHECK_EQ(stats.store.misses, 3u);
}

// Waking a thread takes longer than the whole work.
TEST(batch_of_64_ids_wakes_no_thread) {
  FaultVfs vfs;
  const size_t threads = num_threads();
  set_num_threads(4);
  const auto table = Table::create(vfs, "", "t", whole_numbers(1000, 64), 0);
  std::vector<int64_t> ids(64);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 7 % 60);
  const std::vector<float> ones(ids.size(), 1.0f);
  std::vector<float> values(ids.size() * 64);
  const size_t before = loops_shared();
  for (int step = 0; step < 3; ++step) {
    const Batch batch = table->batch(ids.data(), ids.size());
    table->lookup(batch, true, values.data());
    update(table.get(), batch, ones);
    table->lookup(ids.data(), ids.size(), true, values.data());
    update(table.get(), ids, ones);
  }
  CHECK_EQ(loops_shared(), before);
  std::vector<int64_t> many(65'536);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int64_t>(i % 1000);
  table->batch(many.data(), many.size());
  CHECK(loops_shared() > before);
  set_num_threads(threads);
}
