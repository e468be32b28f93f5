// How often a step locates the rows of a batch: once for its lookup and its update.
#include "table/row_reader.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "batch/pieces.h"
#include "tests/check.h"
#include "tests/counting_directory.h"
#include "tests/gated.h"
#include "tests/model.h"
#include "tests/parts.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr size_t kFrames = 400;
constexpr int64_t kStored = 2000;

// A table on disk with a fifth of its rows in RAM, and a directory that counts. A row's value is its number.
struct CountedTable {
  CountedTable() {
    TableState& state = parts->state;
    const MemoryPlan plan = state.store->plan();
    const uint64_t slots = state.committed.slots_per_segment;
    parts->loader.drop_store();
    auto log = std::make_unique<Log>(vfs, state.path, state.uuid, state.payload_bytes, slots, plan.log);
    log->begin_epoch(1, 1, 1);
    auto counting = std::make_unique<CountingDirectory>();
    directory = counting.get();
    state.store = std::make_unique<Store>("t", state.payload_bytes, kFrames, std::move(counting), std::move(log), plan);
    state.store->set_initial_record(
        [&state](int64_t row, size_t bytes, std::byte* record) { state.initial_record(row, bytes, record); });
    const std::vector<int64_t> ids = range(0, kStored);
    std::vector<float> grads;
    for (const int64_t id : ids) grads.insert(grads.end(), state.spec.dim, -static_cast<float>(id));
    parts->writer.update(ids.data(), ids.size(), grads.data(), std::nullopt, std::nullopt);
    state.store->flush();
    state.store->log()->drain();
    (void)directory->take_located();
  }
  Batch batch_of(const std::vector<int64_t>& ids) const {
    Batch batch;
    parts->state.assign_checked(&batch, ids.data(), ids.size());
    return batch;
  }
  // Returns how many rows were located.
  size_t lookup(const Batch& batch, const std::vector<int64_t>& ids, bool touch = true) {
    std::vector<float> values(ids.size() * 4);
    parts->reader.lookup(batch, touch, values.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto expected = static_cast<float>(ids[i] < kStored ? ids[i] : 0);
      for (size_t d = 0; d < 4; ++d) CHECK_EQ(values[i * 4 + d], expected);
    }
    return directory->take_located();
  }
  size_t update(const Batch& batch) {
    const std::vector<float> sums(batch.num_unique() * 4, 0.0f);
    parts->writer.update(batch, sums.data(), std::nullopt, std::nullopt);
    return directory->take_located();
  }

  const Sandbox sandbox;
  GatedVfs vfs;
  const std::unique_ptr<Parts> parts =
      new_parts(vfs, sandbox / "t", whole_numbers(-1, 4), Parts::with_ram(size_t{64} << 20));
  const GatedVfs::Release release{vfs};  // before the parts end
  CountingDirectory* directory;
};

// Ids that repeat, from `from` on, some of which were never stored.
std::vector<int64_t> some_ids(int64_t from, size_t n) {
  std::vector<int64_t> ids;
  for (size_t i = 0; i < n; ++i) {
    const auto place = static_cast<int64_t>(i);
    ids.push_back(i % 20 == 7 ? 1'000'000 + place : from + place * 3 / 2 % 250);
  }
  return ids;
}

}  // namespace

TEST(lookup_of_a_batch_locates_each_row_once) {
  CountedTable table;
  for (const int64_t from : {int64_t{0}, int64_t{700}, int64_t{1700}}) {
    const std::vector<int64_t> ids = some_ids(from, 300);
    const Batch batch = table.batch_of(ids);
    const uint64_t misses = table.parts->state.store->stats().misses;
    CHECK_EQ(table.lookup(batch, ids), batch.num_unique());
    CHECK(table.parts->state.store->stats().misses > misses + 20 || from == 1700);
  }
}

TEST(update_of_a_placed_batch_locates_no_row) {
  CountedTable table;
  std::vector<int64_t> ids = some_ids(700, 300);
  ids.erase(std::remove_if(ids.begin(), ids.end(), [](int64_t id) { return id >= kStored; }), ids.end());
  const Batch batch = table.batch_of(ids);
  CHECK_EQ(table.lookup(batch, ids), batch.num_unique());
  // The misses changed the directory: the rows are located once more, and then not again.
  CHECK_EQ(table.lookup(batch, ids), batch.num_unique());
  CHECK_EQ(table.lookup(batch, ids, false), size_t{0});
  for (int step = 0; step < 3; ++step) {
    CHECK_EQ(table.update(batch), size_t{0});
    CHECK_EQ(table.lookup(batch, ids), size_t{0});
  }
  // An update that has to load rows changes the directory, too.
  const std::vector<int64_t> others = range(0, 100);
  const Batch other = table.batch_of(others);
  CHECK(table.update(other) > 0);
  CHECK_EQ(table.lookup(other, others), other.num_unique());
  CHECK_EQ(table.update(other), size_t{0});
}

// A step whose batch is larger than the cache: the update finds what the lookup read last.
TEST(update_of_a_batch_larger_than_the_cache_reads_no_row_that_is_still_there) {
  CountedTable table;
  const std::vector<int64_t> ids = range(0, kStored);
  const Batch batch = table.batch_of(ids);
  const Store& store = *table.parts->state.store;
  for (int step = 0; step < 3; ++step) {
    table.lookup(batch, ids);
    const StoreStats before = store.stats();
    table.update(batch);
    CHECK(store.stats().misses - before.misses <= kStored - kFrames);
    CHECK(store.stats().misses - before.misses >= kStored - kFrames - 8);
  }
  table.lookup(batch, ids);
}

// Ids in pieces: each row is read once, though its piece is chosen by its cell, and repeated ids are no problem.
TEST(lookup_of_ids_in_pieces_reads_each_row_once) {
  CountedTable table;
  TableState& state = table.parts->state;
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 3 * kStored; ++i) ids.push_back(i * 7 % (kStored + 100));
  ids.insert(ids.end(), 4000, 5);  // more than a piece has room for
  MemoryPlan plan = state.store->plan();
  plan.scratch_bytes = kScratchPerId * 500;
  state.store->apply(plan);
  CHECK_EQ(state.piece_ids(), size_t{500});
  for (const bool touch : {true, false}) {
    const uint64_t reads = state.store->log()->stats().read_records(), frames = state.store->cache().resident();
    std::vector<float> values(ids.size() * 4);
    table.parts->reader.lookup(ids.data(), ids.size(), touch, values.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto expected = static_cast<float>(ids[i] < kStored ? ids[i] : 0);
      for (size_t d = 0; d < 4; ++d) CHECK_EQ(values[i * 4 + d], expected);
    }
    CHECK(state.store->log()->stats().read_records() - reads <= kStored - frames + 16);
  }
}

// A batch larger than the cache is read in pieces. Compaction may move rows between two pieces.
TEST(lookup_of_a_batch_larger_than_the_cache_locates_later_pieces_again) {
  CountedTable table;
  const std::vector<int64_t> ids = range(0, kStored);
  const Batch batch = table.batch_of(ids);
  const size_t located = table.lookup(batch, ids);
  CHECK(located > batch.num_unique() && located < 2 * batch.num_unique());
}

// The lookup waits for rows that are being read. It uses the placement that the wait has made.
TEST(lookup_of_a_batch_that_is_being_read_locates_each_row_once) {
  CountedTable table;
  const std::vector<int64_t> ids = range(0, 150);
  const Batch batch = table.batch_of(ids);
  table.vfs.hold(Op::kRead);
  table.parts->prefetcher.stage(ids.data(), ids.size());
  (void)table.directory->take_located();
  CHECK(table.parts->state.lock.is_staging());
  table.vfs.wait_until_waiting();
  const uint64_t misses = table.parts->state.store->stats().misses;
  const ReleaseWhenWaitedFor releases(table.vfs, table.parts->state.lock);
  CHECK_EQ(table.lookup(batch, ids), batch.num_unique());
  CHECK(table.parts->state.store->stats().misses > misses + 50);  // counted when the batch was read
}
