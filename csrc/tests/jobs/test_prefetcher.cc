// Staging reads during lookups and updates: records move and values never change, with other threads at work.
#include <atomic>
#include <thread>
#include <vector>

#include "base/workers.h"
#include "table/table.h"
#include "tests/check.h"
#include "tests/gated.h"
#include "tests/model.h"
#include "tests/parts.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

namespace bunkbed {
namespace {

TableSpec spec_of(int64_t num_rows, uint32_t dim = 16) {
  TableSpec spec;
  spec.num_rows = num_rows;
  spec.dim = dim;
  spec.optimizer.kind = OptimizerKind::kSgd;
  spec.optimizer.lr = 1.0;
  return spec;
}

std::string fresh_folder(const char* name) {
  const std::string path = std::string("/tmp/bunkbed-") + name + "-" + std::to_string(::getpid());
  std::system(("rm -rf " + path).c_str());
  return path;
}

enum class Ahead { kStage, kWindow, kMisledWindow };

// Each update adds 1 to its rows (lr 1, gradient -1): a row's value is the number of times it was updated.
void staged_training(int64_t num_rows, const char* name, Ahead ahead) {
  const std::string path = fresh_folder(name);
  {
    auto table = Table::create(vfs::posix(), path, "t", spec_of(num_rows), 480u << 10);
    std::vector<float> expected(4000, 0.0f);
    uint64_t random = 1;
    const auto next = [&random] { return random = random * 6364136223846793005ull + 1442695040888963407ull; };
    std::vector<std::vector<int64_t>> batches(120);
    for (auto& batch : batches) {
      for (int i = 0; i < 300; ++i) batch.push_back(static_cast<int64_t>((next() >> 33) % 4000));
      std::sort(batch.begin(), batch.end());
      batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
    }
    std::vector<float> out(300 * 16);
    const std::vector<float> grads(300 * 16, -1.0f);
    std::vector<uint32_t> numbers;
    for (size_t b = 0; b < batches.size(); ++b) {
      if (ahead == Ahead::kStage) {
        if (b + 1 < batches.size()) table->stage(batches[b + 1].data(), batches[b + 1].size());
      } else {
        while (numbers.size() < std::min(batches.size(), b + 9)) {
          const auto& coming = batches[numbers.size()];
          const uint32_t number = table->expect(coming.data(), coming.size(), 0);
          if (number == Table::kWindowFull) break;
          numbers.push_back(number);
        }
        const auto number_of = [&](size_t i) { return i < numbers.size() ? numbers[i] : kNoUse; };
        table->advance(b > 0 ? number_of(b - 1) : kNoUse, number_of(b), b % 5 == 0 ? 0 : b % 5);
        if (ahead == Ahead::kMisledWindow) {
          // Batches that end early, never come or were never expected do not change values.
          const auto wrong = static_cast<uint32_t>(next() >> 57);
          if (b % 3 == 0) table->forget(wrong);
          if (b % 4 == 0) table->advance(wrong, wrong + 1, 3);
        }
      }
      const auto& ids = batches[b];
      table->lookup(ids.data(), ids.size(), true, out.data());
      for (size_t i = 0; i < ids.size(); ++i) CHECK_EQ(out[i * 16 + b % 16], expected[static_cast<size_t>(ids[i])]);
      table->update(ids.data(), ids.size(), grads.data(), std::nullopt, std::nullopt);
      for (const int64_t id : ids) ++expected[static_cast<size_t>(id)];
      if (b % 17 == 16) table->commit(std::nullopt, "");
      if (b % 40 == 39) table->set_ram(b % 80 == 39 ? 460u << 10 : 600u << 10);
    }
    const TableStats stats = table->stats();
    CHECK_EQ(stats.store.hits + stats.store.misses + stats.store.first_touches, stats.store.unique_rows);
    CHECK(stats.store.evictions > 0);
    CHECK(stats.staged_rows > 1000);
    std::vector<int64_t> all(4000);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    std::vector<float> rows(4000 * 16);
    table->stage(all.data(), all.size());
    table->lookup(all.data(), all.size(), false, rows.data());
    for (size_t i = 0; i < all.size(); ++i) CHECK_EQ(rows[i * 16], expected[i]);
    table->stage(batches[0].data(), batches[0].size());  // being read while the table closes
  }
  std::system(("rm -rf " + path).c_str());
}

}  // namespace

TEST(table_staging_flat) { staged_training(4000, "staging-flat", Ahead::kStage); }
TEST(table_staging_hashed) { staged_training(-1, "staging-hashed", Ahead::kStage); }
TEST(table_window_flat) { staged_training(4000, "window-flat", Ahead::kWindow); }
TEST(table_window_hashed) { staged_training(-1, "window-hashed", Ahead::kWindow); }
TEST(table_window_misled_flat) { staged_training(4000, "misled-flat", Ahead::kMisledWindow); }
TEST(table_window_misled_hashed) { staged_training(-1, "misled-hashed", Ahead::kMisledWindow); }

// A row that was staged and then looked up counts as one unique row and one miss.
// Compaction goes on during lookups and updates. An exclusive call waits for its slice.
TEST(table_staging_compacts_beside) {
  const std::string path = fresh_folder("staging-compacts");
  {
    auto table = Table::create(vfs::posix(), path, "t", spec_of(4000), 480u << 10);
    std::vector<float> expected(4000, 0.0f);
    std::vector<float> out(300 * 16);
    const std::vector<float> grads(300 * 16, -1.0f);
    std::vector<int64_t> ids(300), next(300);
    const auto batch_at = [](size_t b, std::vector<int64_t>* batch) {
      for (size_t i = 0; i < batch->size(); ++i) (*batch)[i] = static_cast<int64_t>((b * 300 + i) * 7 % 4000);
    };
    batch_at(0, &next);
    for (size_t b = 0; b < 600; ++b) {
      ids = next;
      batch_at(b + 1, &next);
      table->stage(next.data(), next.size());
      table->lookup(ids.data(), ids.size(), true, out.data());
      for (size_t i = 0; i < ids.size(); ++i) CHECK_EQ(out[i * 16 + 7], expected[ids[i]]);
      table->update(ids.data(), ids.size(), grads.data(), std::nullopt, std::nullopt);
      for (const int64_t id : ids) expected[id] += 1.0f;
      if (b % 97 == 96) table->commit(std::nullopt, "");
    }
    const TableStats stats = table->stats();
    CHECK(stats.compactions >= 3);
    CHECK(stats.disk_bytes < 8 * stats.live_bytes + (4u << 20));
    CHECK_EQ(stats.stored_rows, 4000u);
    table->commit(std::nullopt, "");
    table->close();
    OpenOptions options;
    options.ram_bytes = 480u << 10;
    table = Table::open(vfs::posix(), path, "t", options);
    for (int64_t row = 0; row < 4000; row += 300) {
      std::vector<int64_t> rows;
      for (int64_t r = row; r < std::min<int64_t>(4000, row + 300); ++r) rows.push_back(r);
      table->lookup(rows.data(), rows.size(), false, out.data());
      for (size_t i = 0; i < rows.size(); ++i) CHECK_EQ(out[i * 16], expected[rows[i]]);
    }
  }
  std::system(("rm -rf " + path).c_str());
}

TEST(table_staging_counts_a_row_once) {
  const std::string path = fresh_folder("staging-counts");
  {
    std::vector<int64_t> all(4000);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    const std::vector<float> grads(4000 * 16, -1.0f);
    auto table = Table::create(vfs::posix(), path, "t", spec_of(4000), 480u << 10);
    table->update(all.data(), all.size(), grads.data(), std::nullopt, std::nullopt);
    table->commit(std::nullopt, "");
    table.reset();
    OpenOptions options;
    options.ram_bytes = 480u << 10;
    table = Table::open(vfs::posix(), path, "t", options);
    std::vector<float> out(100 * 16);
    table->stage(all.data(), 100);
    table->lookup(all.data(), 100, true, out.data());
    const StoreStats stats = table->stats().store;
    CHECK_EQ(stats.unique_rows, 100u);
    CHECK_EQ(stats.misses, 100u);
    CHECK_EQ(stats.hits, 0u);
  }
  std::system(("rm -rf " + path).c_str());
}

// Rows of 4 KiB in a cache of a few dozen frames. A batch larger than the cache is staged in part, not refused.
TEST(table_staging_more_than_the_cache) {
  const std::string path = fresh_folder("staging-large");
  {
    TableSpec spec = spec_of(400);
    spec.dim = 1024;
    std::vector<int64_t> all(400);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    const std::vector<float> grads(400 * 1024, -1.0f);
    const size_t ram = minimum_ram(spec, 400, true) + (100u << 10);
    auto table = Table::create(vfs::posix(), path, "t", spec, ram);
    table->update(all.data(), all.size(), grads.data(), std::nullopt, std::nullopt);
    CHECK(table->stats().frame_capacity < all.size());
    table->commit(std::nullopt, "");
    std::vector<float> out(400 * 1024);
    for (int round = 0; round < 3; ++round) {
      table->stage(all.data(), all.size());
      table->lookup(all.data(), all.size(), true, out.data());
      for (size_t i = 0; i < all.size(); ++i) CHECK_EQ(out[i * 1024 + i], static_cast<float>(round + 1));
      table->update(all.data(), all.size(), grads.data(), std::nullopt, std::nullopt);
    }
  }
  std::system(("rm -rf " + path).c_str());
}

TEST(table_staging_from_another_thread) {
  const std::string path = fresh_folder("staging-threads");
  {
    auto table = Table::create(vfs::posix(), path, "t", spec_of(4000), 400u << 10);
    std::vector<int64_t> all(4000);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    const std::vector<float> grads(4000 * 16, -1.0f);
    table->update(all.data(), all.size(), grads.data(), std::nullopt, std::nullopt);
    table->commit(std::nullopt, "");
    std::atomic<bool> stop{false};
    std::thread stager([&] {
      for (size_t at = 0; !stop; at = (at + 311) % 3600) table->stage(all.data() + at, 400);
    });
    std::vector<float> out(500 * 16);
    for (int step = 1; step <= 60; ++step) {
      const size_t at = static_cast<size_t>(step * 97 % 3500);
      table->lookup(all.data() + at, 500, step % 3 != 0, out.data());
      for (size_t i = 0; i < 500; ++i) CHECK_EQ(out[i * 16], static_cast<float>(step));
      table->update(all.data(), all.size(), grads.data(), std::nullopt, std::nullopt);
      if (step % 20 == 0) table->commit(std::nullopt, "");
    }
    stop = true;
    stager.join();
  }
  std::system(("rm -rf " + path).c_str());
}

// ---- The prefetcher by itself

namespace {

using namespace test;

constexpr int64_t kStored = 2000;

// A table whose rows are all in the log, and none in RAM. Each has the value 1. By default the cache has no room for
// all of them.
struct OnDisk {
  explicit OnDisk(size_t more_ram = 100u << 10, uint32_t dim = 16) {
    const TableSpec spec = spec_of(kStored, dim);
    const OpenOptions options = Parts::with_ram(minimum_ram(spec, kStored, true) + more_ram);
    table = new_parts(vfs, sandbox / "t", spec, options);
    table->add_one(range(0, kStored));
    table->committer.commit(std::nullopt, "");
    table.reset();
    table = std::make_unique<Parts>(vfs, sandbox / "t", spec, options);
  }
  Prefetcher& prefetcher() { return table->prefetcher; }
  uint32_t expect(const std::vector<int64_t>& ids, uint32_t most = 8) {
    return prefetcher().expect(ids.data(), ids.size(), most);
  }
  void stage(const std::vector<int64_t>& ids) { prefetcher().stage(ids.data(), ids.size()); }
  // How many of these rows are being read, and how many have frames.
  size_t num_loading(const std::vector<int64_t>& ids) { return count(ids, true); }
  size_t num_resident(const std::vector<int64_t>& ids) { return count(ids, false); }
  // Waits until everything is read.
  void settle() {
    auto guard = table->state.lock.work();
    table->state.lock.settle(guard);
  }

  const Sandbox sandbox;
  GatedVfs vfs;
  std::unique_ptr<Parts> table;
  const GatedVfs::Release release{vfs};  // before the table ends

 private:
  size_t count(const std::vector<int64_t>& ids, bool is_loading) {
    const auto guard = table->state.lock.work();
    const Store& store = *table->state.store;
    return static_cast<size_t>(std::count_if(ids.begin(), ids.end(), [&](int64_t id) {
      const Entry entry = table->state.store->directory().find(id);
      return is_frame(entry) && (!is_loading || store.is_loading(frame_of(entry)));
    }));
  }
};

}  // namespace

TEST(prefetcher_plans_nothing_where_every_row_is_in_ram) {
  const std::vector<int64_t> ids = range(0, 10);
  Parts in_ram(spec_of(kStored));
  in_ram.add_one(ids);
  CHECK_EQ(in_ram.prefetcher.expect(ids.data(), ids.size(), 8), kNoUse);
  in_ram.prefetcher.stage(ids.data(), ids.size());
  in_ram.prefetcher.advance(kNoUse, kNoUse, 2);
  CHECK_EQ(in_ram.state.counts.staged_rows, uint64_t{0});
}

// A table that fits in RAM and was opened again: its rows are read once, and the window takes no room from them.
TEST(prefetcher_stages_at_once_where_all_rows_have_room) {
  for (const bool has_room : {false, true}) {
    OnDisk rows(has_room ? 8u << 20 : 100u << 10);
    Store& store = *rows.table->state.store;
    const std::vector<int64_t> ids = range(0, 50);
    const size_t frames = store.cache().capacity();
    CHECK_EQ(frames >= kStored, has_room);
    rows.vfs.hold(Op::kRead);
    CHECK_EQ(rows.expect(ids) == kNoUse, has_room);
    CHECK_EQ(rows.num_loading(ids), has_room ? size_t{50} : size_t{0});
    CHECK_EQ(store.window().is_empty(), has_room);
    CHECK_EQ(store.cache().capacity() == frames, has_room);
    rows.vfs.release();
    rows.settle();
    CHECK_EQ(rows.num_resident(ids), has_room ? size_t{50} : size_t{0});
    CHECK_EQ(rows.table->value(49), 1.0f);
  }
}

// A batch that has no room is not planned: its rows would take frames from the batch that is being trained.
TEST(prefetcher_leaves_a_batch_that_is_larger_than_the_cache_to_the_lookup) {
  OnDisk rows(100u << 10, 128);
  Store& store = *rows.table->state.store;
  const auto room = static_cast<int64_t>(store.cache().capacity());
  const auto in_scratch = static_cast<int64_t>(rows.table->state.piece_ids());
  CHECK(room + 1 < kStored && room + 1 <= in_scratch);
  CHECK_EQ(rows.expect(range(0, room + 1)), kNoUse);
  CHECK(store.window().is_empty());
  rows.prefetcher().advance(kNoUse, kNoUse, 2);
  CHECK_EQ(rows.table->state.counts.staged_rows, uint64_t{0});
  std::vector<int64_t> repeated = range(0, 10);  // few rows, each often
  while (std::ssize(repeated) <= room) repeated.insert(repeated.end(), repeated.begin(), repeated.begin() + 10);
  CHECK_EQ(rows.expect(repeated), 1u);
  CHECK_EQ(rows.expect(range(0, room / 2)), 2u);
}

TEST(prefetcher_refuses_bad_ids_and_a_closed_table) {
  OnDisk rows;
  CHECK_THROWS(rows.stage({1, kStored}), ErrorKind::kIndex, "id 2000 at position 1");
  CHECK_THROWS(rows.expect({0, 1, -7}), ErrorKind::kIndex, "id -7 at position 2");
  // All ids are checked, also those after the ones that fit the scratch.
  std::vector<int64_t> many(rows.table->state.piece_ids() + 10, 3);
  many.back() = -1;
  CHECK_THROWS(rows.stage(many), ErrorKind::kIndex, "id -1 at position " + std::to_string(many.size() - 1));
  CHECK_THROWS(rows.expect(many), ErrorKind::kIndex, "id -1 at position " + std::to_string(many.size() - 1));
  CHECK_EQ(rows.table->state.store->window().next_batch(), 1u);
  rows.table->state.is_closed = true;
  CHECK_THROWS(rows.expect({1}), ErrorKind::kClosed, "is closed");
  CHECK_THROWS(rows.stage({1}), ErrorKind::kClosed, "is closed");
  CHECK_THROWS(rows.prefetcher().advance(kNoUse, kNoUse, 1), ErrorKind::kClosed, "is closed");
  rows.prefetcher().forget(1);  // no harm, also without a store
  rows.table->state.is_closed = false;
}

TEST(prefetcher_window_takes_so_many_batches) {
  OnDisk rows;
  CHECK_EQ(rows.expect(range(0, 50), 3), 1u);
  CHECK_EQ(rows.expect(range(50, 100), 3), 2u);
  CHECK_EQ(rows.expect(range(100, 150), 3), 3u);
  CHECK_EQ(rows.expect(range(150, 200), 3), Prefetcher::kWindowFull);
  CHECK_EQ(rows.expect(range(150, 200), 4), 4u);
  rows.prefetcher().advance(1, 2, 1);  // the first is over
  CHECK_EQ(rows.expect(range(200, 250), 4), 5u);
  CHECK_EQ(rows.expect(range(250, 300), 4), Prefetcher::kWindowFull);
  rows.prefetcher().forget(2);
  CHECK_EQ(rows.expect(range(250, 300), 4), 6u);
  rows.settle();
}

// Stages the `depth` batches after the one that begins, and no other.
TEST(prefetcher_stages_the_batches_ahead) {
  for (const uint32_t depth : {1u, 2u, 3u}) {
    OnDisk rows;
    for (int64_t batch = 0; batch < 5; ++batch) (void)rows.expect(range(100 * batch, 100 * batch + 50));
    rows.vfs.hold(Op::kRead);
    rows.prefetcher().advance(kNoUse, 1, depth);
    CHECK_EQ(rows.prefetcher().depth(), depth);
    for (int64_t batch = 0; batch < 5; ++batch) {
      const bool is_ahead = batch >= 1 && batch <= int64_t{depth};
      CHECK_EQ(rows.num_loading(range(100 * batch, 100 * batch + 50)), is_ahead ? size_t{50} : size_t{0});
    }
    CHECK_EQ(rows.table->state.counts.staged_rows, uint64_t{50} * depth);
    rows.prefetcher().advance(kNoUse, 1, depth);  // they are on their way
    CHECK_EQ(rows.table->state.counts.staged_rows, uint64_t{50} * depth);
    rows.vfs.release();
    rows.settle();
    CHECK_EQ(rows.num_loading(range(0, 500)), size_t{0});
    CHECK_EQ(rows.num_resident(range(0, 500)), size_t{50} * depth);
    for (const int64_t row : {int64_t{100}, int64_t{149}, int64_t{0}}) CHECK_EQ(rows.table->value(row), 1.0f);
  }
}

// Depth 0: the prefetcher chooses the depth by measured times. There are none before the first step.
TEST(prefetcher_chooses_a_depth_of_two_to_four) {
  OnDisk rows;
  for (int64_t batch = 0; batch < 8; ++batch) (void)rows.expect(range(100 * batch, 100 * batch + 50), 16);
  rows.prefetcher().advance(kNoUse, 1, 0);
  CHECK_EQ(rows.prefetcher().depth(), 2u);
  for (uint32_t batch = 2; batch < 8; ++batch) {
    rows.settle();
    rows.prefetcher().advance(batch - 1, batch, 0);
    CHECK(rows.prefetcher().depth() >= 2 && rows.prefetcher().depth() <= 4);
  }
  rows.settle();
}

// Staging stops while a call waits for rows. The next advance() goes on with it.
TEST(prefetcher_stages_no_more_while_a_call_waits_for_rows) {
  OnDisk rows;
  for (int64_t batch = 0; batch < 3; ++batch) (void)rows.expect(range(100 * batch, 100 * batch + 50));
  {
    std::unique_ptr<TableLock::WaitsForRows> waits;
    {
      const auto guard = rows.table->state.lock.work();
      waits = std::make_unique<TableLock::WaitsForRows>(&rows.table->state.lock);
    }
    rows.prefetcher().advance(kNoUse, 1, 2);
    CHECK_EQ(rows.table->state.counts.staged_rows, uint64_t{0});
    const auto guard = rows.table->state.lock.work();
    waits.reset();
  }
  rows.prefetcher().advance(kNoUse, 1, 2);
  CHECK_EQ(rows.table->state.counts.staged_rows, uint64_t{100});
  rows.settle();
}

TEST(prefetcher_waits_for_rows_that_are_being_read_and_for_no_others) {
  for (const bool as_batch : {false, true}) {
    OnDisk rows;
    TableState& state = rows.table->state;
    const std::vector<int64_t> ids = range(0, 100), others = range(500, 600);
    Batch batch, other;
    state.assign_checked(&batch, ids.data(), ids.size());
    state.assign_checked(&other, others.data(), others.size());
    auto guard = state.lock.work();
    const auto waits = [&](const std::vector<int64_t>& rows_of, const Batch& batch_of) {
      return as_batch ? rows.prefetcher().wait_for_rows(guard, batch_of)
                      : rows.prefetcher().wait_for_rows(guard, rows_of.data(), rows_of.size());
    };
    CHECK(!waits(ids, batch));
    CHECK(batch.placement().frames.empty());  // nothing is being read: nothing was looked for
    guard.unlock();
    rows.vfs.hold(Op::kRead);
    rows.stage(range(1000, 1100));  // a batch that ends before
    rows.stage(ids);
    rows.vfs.wait_until_waiting();
    guard = state.lock.work();
    CHECK(!waits(others, other));
    CHECK(state.lock.is_staging());
    CHECK_EQ(other.placement().frames.size(), as_batch ? others.size() : size_t{0});
    CHECK(state.counts.stall_s == 0.0);
    const ReleaseWhenWaitedFor releases(rows.vfs, state.lock);
    CHECK(waits(ids, batch));
    CHECK(!state.lock.is_waited_for() && state.counts.stall_s > 0.0);
    for (const int64_t id : ids) {
      const Entry entry = state.store->directory().find(id);
      CHECK(is_frame(entry) && !state.store->is_loading(frame_of(entry)));
    }
    CHECK(!as_batch || state.store->rows().is_placed(batch));
    CHECK(!waits(ids, batch));
    guard.unlock();
    rows.settle();
  }
}

TEST(prefetcher_waits_no_longer_than_until_the_table_closes) {
  OnDisk rows;
  TableState& state = rows.table->state;
  const std::vector<int64_t> ids = range(0, 100);
  rows.vfs.hold(Op::kRead);
  rows.stage(ids);
  {
    auto guard = state.lock.work();
    const ReleaseWhenWaitedFor releases(rows.vfs, state.lock);
    state.is_closed = true;
    CHECK_THROWS(rows.prefetcher().wait_for_rows(guard, ids.data(), ids.size()), ErrorKind::kClosed, "is closed");
    guard.unlock();
  }
  state.is_closed = false;
  rows.settle();
}

// After a failed read the rows are in the log as before. A lookup reads them again and throws the error.
TEST(prefetcher_whose_reads_fail_changes_nothing) {
  OnDisk rows;
  rows.vfs.fail_all(Op::kRead, EIO);
  rows.stage(range(0, 100));
  rows.settle();
  CHECK_EQ(rows.num_resident(range(0, 100)), size_t{0});
  CHECK_THROWS((void)rows.table->value(5), ErrorKind::kSystem, "injected");
  rows.vfs.heal();
  CHECK_EQ(rows.table->value(5), 1.0f);
  rows.stage(range(0, 100));
  rows.settle();
  CHECK_EQ(rows.num_resident(range(0, 100)), size_t{100});
}

// reset_queue() destroys the queue. reset() also forgets how far the window was staged.
TEST(prefetcher_goes_on_after_a_reset) {
  OnDisk rows;
  for (int64_t batch = 0; batch < 4; ++batch) (void)rows.expect(range(100 * batch, 100 * batch + 50));
  rows.prefetcher().advance(kNoUse, 1, 1);
  CHECK_EQ(rows.table->state.counts.staged_rows, uint64_t{50});
  const auto reset = [&](void (Prefetcher::*way)()) {
    const auto guard = rows.table->state.lock.exclusive();
    (rows.prefetcher().*way)();
  };
  reset(&Prefetcher::reset_queue);
  CHECK_EQ(rows.prefetcher().depth(), 1u);
  rows.prefetcher().advance(1, 2, 1);
  CHECK_EQ(rows.table->state.counts.staged_rows, uint64_t{100});
  reset(&Prefetcher::reset);
  CHECK_EQ(rows.prefetcher().depth(), 0u);
  rows.prefetcher().advance(2, 3, 1);
  CHECK_EQ(rows.table->state.counts.staged_rows, uint64_t{150});
  rows.settle();
  CHECK_EQ(rows.num_resident(range(0, 400)), size_t{150});
}

}  // namespace bunkbed
