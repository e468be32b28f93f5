// A store without a table: where it finds the rows of a batch, how often it locates them, and stagings that overlap.
#include "store/store.h"

#include <algorithm>
#include <cstring>
#include <cerrno>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "base/failpoints.h"
#include "tests/check.h"
#include "tests/counting_directory.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr size_t kPayload = 64;

// The record of a row that was written begins with the row's number.
struct StoreParts {
  explicit StoreParts(size_t frames) {
    auto counting = std::make_unique<CountingDirectory>();
    directory = counting.get();
    const MemoryPlan plan = plan_memory(0, kPayload, 4096, vfs::kBlockBytes, true);
    vfs.make_directories(sandbox / "t");
    auto made = std::make_unique<Log>(vfs, sandbox / "t", Uuid{}, kPayload, 4096, plan.log);
    made->begin_epoch(1, 1, 1);
    log = made.get();
    store = std::make_unique<Store>("t", kPayload, frames, std::move(counting), std::move(made), plan);
    store->set_initial_record(
        [](int64_t, size_t bytes, std::byte* record) { std::fill_n(record, bytes, std::byte{0xff}); });
  }
  // Stores rows. Some of the rows are then in RAM.
  void write(const std::vector<int64_t>& rows) {
    for (const int64_t row : rows) {
      uint32_t frame;
      store->reserve(store->new_rows(&row, 1));
      store->pin(&row, 1, true, &frame);
      reinterpret_cast<int64_t*>(store->cache().record(frame))[0] = row;
      store->mark_dirty(&frame, 1);
      store->unpin(&frame, 1);
    }
  }
  int64_t value(uint32_t frame) const { return reinterpret_cast<const int64_t*>(store->cache().record(frame))[0]; }
  // Compares the live records of each segment with the positions that the directory and clean frames have.
  void check_live(int64_t num_rows) const {
    std::map<uint64_t, uint64_t> live;
    for (int64_t row = 0; row < num_rows; ++row) {
      const Entry entry = directory->find(row);
      const uint64_t position = is_frame(entry) ? store->cache().info(frame_of(entry)).position : position_of(entry);
      if (position != kNoPosition) ++live[position / log->slots_per_segment()];
    }
    for (const auto& [id, segment] : log->segments()) {
      CHECK_EQ(segment->live, live[id]);
      live.erase(id);
    }
    CHECK(live.empty());
  }
  // Compares the placement with the directory.
  void check_placement(const Batch& batch) const {
    const Batch::Placement& placement = batch.placement();
    CHECK_EQ(placement.frames.size(), batch.num_unique());
    size_t missing = 0;
    for (size_t u = 0; u < batch.num_unique(); ++u) {
      const Entry entry = directory->find(batch.unique()[u]);
      CHECK_EQ(placement.frames[u], is_frame(entry) ? frame_of(entry) : kNoFrame);
      if (is_frame(entry)) {
        CHECK_EQ(value(placement.frames[u]), batch.unique()[u]);
      } else {
        CHECK_EQ(placement.entries[u], entry);
        ++missing;
      }
    }
    CHECK_EQ(placement.missing, missing);
  }

  const Sandbox sandbox;
  FaultVfs vfs;
  CountingDirectory* directory;
  Log* log;
  std::unique_ptr<Store> store;
};

Batch batch_of(const std::vector<int64_t>& ids) {
  Batch batch;
  batch.assign(ids.data(), ids.size());
  return batch;
}

}  // namespace

TEST(store_appends_the_victims_of_a_load_by_cell) {
  for (const int64_t victims : {60, 5000}) {  // few and many are sorted in two ways
    StoreParts parts(victims + 4);
    Store& store = *parts.store;
    parts.write(range(0, victims + 4));
    std::vector<uint32_t> frames(victims);
    const std::vector<int64_t> rows = range(victims + 10, 2 * victims + 10);
    store.reserve(store.new_rows(rows.data(), rows.size()));
    store.pin(rows.data(), rows.size(), true, frames.data());
    store.unpin(frames.data(), frames.size());
    std::vector<std::pair<uint64_t, int64_t>> appended;  // position, row
    for (int64_t row = 0; row < victims + 4; ++row) {
      const Entry entry = parts.directory->find(row);
      if (is_position(entry)) appended.push_back({position_of(entry), row});
    }
    CHECK_EQ(appended.size(), frames.size());
    std::sort(appended.begin(), appended.end());
    for (const uint64_t num_cells : {uint64_t{2}, uint64_t{1000}, uint64_t{1} << 32}) {
      for (size_t i = 1; i < appended.size(); ++i) {
        CHECK(cell_of(appended[i - 1].second, num_cells) <= cell_of(appended[i].second, num_cells));
      }
    }
  }
  CHECK_EQ(cell_of(0, 16), uint64_t{0});
  CHECK_EQ(cell_of(1, 16), uint64_t{4});
}

// A load in groups: one is read while the next one gets its frames, and compaction moves the records of those that
// wait. In some loads an eviction or the compaction fails, in one of the groups.
TEST(store_load_in_groups_reads_the_newest_records) {
  constexpr int64_t kRows = 12'000;
  constexpr size_t kLoaded = 1900, kFrames = 2000;
  StoreParts parts(kFrames);
  Store& store = *parts.store;
  parts.write(range(0, kRows));
  std::vector<int64_t> order = range(0, kRows), value = range(0, kRows);
  std::vector<uint32_t> frames(kLoaded);
  std::mt19937 random(7);
  const std::vector<std::pair<const char*, uint64_t>> failures = {
      {"evict", 1}, {"evict", 512}, {"evict", 513}, {"evict", 1025}, {"compact.read", 1}, {"compact.moved", 1}};
  size_t failed = 0;
  for (size_t step = 0; step < 90; ++step) {
    std::shuffle(order.begin(), order.end(), random);
    const bool is_update = step % 3 > 0;  // two updates make all frames dirty
    // Most rows never change, so that the oldest segments stay full, and compaction takes later ones.
    if (is_update) std::partition(order.begin(), order.end(), [&](int64_t row) { return row >= kRows * 2 / 3; });
    if (!is_update && step / 3 < failures.size()) {
      arm_failpoint(failures[step / 3].first, failures[step / 3].second, FailpointAction::kError, 0);
      try {
        store.pin(order.data(), kLoaded, false, frames.data());
        store.unpin(frames.data(), kLoaded);
      } catch (const Error&) {
        ++failed;
      }
      disarm_failpoints();
      for (uint32_t frame = 0; frame < kFrames; ++frame) CHECK_EQ(int{store.cache().info(frame).pinned}, 0);
      parts.check_live(kRows);
    }
    store.pin(order.data(), kLoaded, is_update, frames.data());
    for (size_t i = 0; i < kLoaded; ++i) {
      const int64_t row = order[i];
      CHECK_EQ(parts.value(frames[i]), value[row]);
      CHECK_EQ(parts.directory->find(row), entry_of_frame(frames[i]));
      if (is_update) reinterpret_cast<int64_t*>(store.cache().record(frames[i]))[0] = value[row] += kRows;
    }
    if (is_update) store.mark_dirty(frames.data(), kLoaded);
    store.unpin(frames.data(), kLoaded);
    parts.check_live(kRows);
  }
  CHECK_EQ(failed, failures.size());
  CHECK(store.compactor().records_moved() > 500);
}

// A record that cannot be appended: rows that were to be evicted stay, and no frame is lost or pinned.
TEST(store_load_that_cannot_evict_loses_nothing) {
  for (const uint64_t at : {0, 7, 40}) {
    StoreParts parts(64);
    Store& store = *parts.store;
    parts.write(range(0, 64));
    const std::vector<int64_t> rows = range(100, 150);
    store.reserve(store.new_rows(rows.data(), rows.size()));
    std::vector<uint32_t> frames(rows.size());
    arm_failpoint("evict", at + 1, FailpointAction::kError, 0);
    CHECK_THROWS(store.pin(rows.data(), rows.size(), true, frames.data()), ErrorKind::kSystem, "");
    disarm_failpoints();
    for (uint32_t frame = 0; frame < 64; ++frame) CHECK_EQ(int{store.cache().info(frame).pinned}, 0);
    for (const int64_t row : rows) CHECK_EQ(parts.directory->find(row), kAbsent);
    CHECK_EQ(store.cache().resident(), 64 - at);
    for (int64_t row = 0; row < 64; ++row) {
      int64_t record[kPayload / 8];
      store.fetch(&row, 1, kPayload, reinterpret_cast<std::byte*>(record));
      CHECK_EQ(record[0], row);
    }
    store.pin(rows.data(), rows.size(), true, frames.data());  // as if nothing had happened
    store.unpin(frames.data(), frames.size());
    CHECK_EQ(store.cache().resident(), size_t{64});
  }
}

TEST(store_uses_rows_in_ram_first_and_the_others_by_position) {
  StoreParts parts(32);
  parts.write(range(0, 100));
  std::vector<int64_t> rows = range(0, 120);
  Sampler sampler(3);
  for (size_t i = rows.size(); i > 1; --i) std::swap(rows[i - 1], rows[sampler.bits() % i]);
  const std::vector<uint32_t> order = parts.store->rows().reading_order(rows.data(), rows.size());
  CHECK_EQ(order.size(), rows.size());
  std::vector<bool> seen(rows.size());
  uint64_t last = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    CHECK(!seen[order[i]]);
    seen[order[i]] = true;
    const Entry entry = parts.directory->find(rows[order[i]]);
    CHECK_EQ(is_frame(entry), i < 32);
    if (!is_position(entry)) continue;
    CHECK(position_of(entry) >= last);
    last = position_of(entry);
  }
}

// Rows in frames, rows in the log and rows that are not stored.
TEST(store_locates_a_row_of_a_batch_once) {
  StoreParts parts(32);
  Store& store = *parts.store;
  parts.write(range(0, 100));
  std::vector<int64_t> ids;
  for (int64_t row = 0; row < 100; ++row) {
    if (row >= 95 || row % 10 == 0) ids.push_back(row);
  }
  ids.push_back(1000);
  ids.insert(ids.end(), ids.begin(), ids.end());
  const Batch batch = batch_of(ids);
  (void)parts.directory->take_located();
  CHECK(!store.rows().place(batch, true));
  CHECK_EQ(parts.directory->take_located(), batch.num_unique());
  parts.check_placement(batch);
  CHECK(!store.rows().place(batch, true) && !store.rows().place(batch, false));
  store.rows().locate(batch);
  CHECK(!store.place_for_update(batch) && !store.rows().is_placed(batch));
  CHECK_EQ(parts.directory->take_located(), size_t{0});

  // Rows in the log are read from the positions in the placement.
  std::vector<int64_t> rows;
  std::vector<Entry> entries;
  for (size_t u = 0; u < batch.num_unique(); ++u) {
    if (batch.placement().frames[u] != kNoFrame || batch.placement().entries[u] == kAbsent) continue;
    rows.push_back(batch.unique()[u]);
    entries.push_back(batch.placement().entries[u]);
  }
  CHECK(rows.size() > 3 && rows.size() + 1 < batch.num_unique());
  std::vector<uint32_t> frames(rows.size());
  const uint64_t misses = store.stats().misses;
  store.pin_stored(rows.data(), entries.data(), rows.size(), frames.data());
  CHECK_EQ(parts.directory->take_located(), size_t{0});
  CHECK_EQ(store.stats().misses, misses + rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    CHECK_EQ(parts.value(frames[i]), rows[i]);
    CHECK_EQ(int{store.cache().info(frames[i]).pinned}, 1);
  }
  store.unpin(frames.data(), frames.size());
  for (const uint32_t frame : frames) CHECK_EQ(int{store.cache().info(frame).pinned}, 0);
}

// Another thread may change the caller's ids between two calls of locate(), so some rows to read may be in RAM.
TEST(store_pins_located_rows_in_ram_or_not) {
  StoreParts parts(32);
  Store& store = *parts.store;
  parts.write(range(0, 100));
  store.flush();
  parts.log->drain();
  std::vector<int64_t> rows;
  for (const bool in_ram : {true, false}) {
    for (int64_t row = 0; row < 100 && rows.size() < (in_ram ? 12 : 24); ++row) {
      if (is_frame(parts.directory->find(row)) == in_ram) rows.push_back(row);
    }
  }
  CHECK_EQ(rows.size(), size_t{24});
  std::rotate(rows.begin(), rows.begin() + 6, rows.end());
  std::vector<Entry> entries(rows.size()), after(rows.size());
  const auto locate = [&](std::vector<Entry>* found) {
    parts.directory->locate(rows.data(), rows.size(), found->data());
  };
  std::vector<uint32_t> frames(rows.size());
  locate(&entries);
  // A failed read leaves every row where it was, and pins none.
  parts.vfs.fail_all(Op::kRead, EIO);
  CHECK_THROWS(store.pin_stored(rows.data(), entries.data(), rows.size(), frames.data()), ErrorKind::kSystem,
               "injected");
  parts.vfs.heal();
  locate(&after);
  for (size_t i = 0; i < rows.size(); ++i) {
    CHECK(after[i] == entries[i]);
    if (is_frame(entries[i])) CHECK_EQ(int{store.cache().info(frame_of(entries[i])).pinned}, 0);
  }
  store.pin_stored(rows.data(), entries.data(), rows.size(), frames.data());
  for (size_t i = 0; i < rows.size(); ++i) {
    CHECK(!is_frame(entries[i]) || frame_of(entries[i]) == frames[i]);
    CHECK_EQ(parts.value(frames[i]), rows[i]);
    CHECK_EQ(int{store.cache().info(frames[i]).pinned}, 1);
    CHECK(parts.directory->find(rows[i]) == entry_of_frame(frames[i]));
  }
  store.unpin(frames.data(), frames.size());
  for (const uint32_t frame : frames) CHECK_EQ(int{store.cache().info(frame).pinned}, 0);
}

TEST(store_locates_nothing_for_an_update_of_a_placed_batch) {
  StoreParts parts(32);
  Store& store = *parts.store;
  parts.write(range(0, 20));
  store.rows().begin_step();
  const Batch batch = batch_of({3, 4, 5, 3});
  CHECK(store.rows().place(batch, true));
  (void)parts.directory->take_located();
  CHECK(store.rows().is_placed(batch) && store.place_for_update(batch));
  store.mark_dirty(batch.placement().frames.data(), batch.num_unique());
  store.rows().begin_step();
  CHECK(store.rows().place(batch, true) && store.place_for_update(batch));
  CHECK_EQ(parts.directory->take_located(), size_t{0});
  // Frozen records are appended before the update changes them.
  store.freeze();
  const uint64_t written = store.stats().written_back;
  CHECK(store.place_for_update(batch));
  CHECK_EQ(store.stats().written_back, written + 3);
  CHECK_EQ(parts.directory->take_located(), size_t{0});
  store.thaw();
}

TEST(store_appends_records_of_rows_on_disk_in_frames_and_of_none) {
  StoreParts parts(32);
  Store& store = *parts.store;
  parts.write(range(0, 40));
  store.flush();
  parts.write(range(30, 36));
  const std::vector<int64_t> rows{1, 30, 100, 39, 31, 0, 101};
  const auto state = [&](int64_t row) { return parts.directory->find(row); };
  CHECK(is_position(state(0)) && is_position(state(1)) && is_frame(state(30)) && is_frame(state(31)));
  CHECK(is_frame(state(39)) && !store.cache().is_dirty(frame_of(state(39))) && !is_stored(state(100)));
  store.freeze();  // rows 30 to 35
  std::vector<std::byte> records(rows.size() * kPayload);
  for (size_t i = 0; i < rows.size(); ++i) std::memcpy(records.data() + i * kPayload, &rows[i], sizeof(int64_t));
  const uint64_t written = store.stats().written_back;
  const size_t resident = store.cache().resident(), unwritten = store.unwritten_rows();
  bool wrote = false;
  store.reserve(store.new_rows(rows.data(), rows.size()));
  store.append_records(rows.data(), rows.size(), records.data(), &wrote);
  CHECK(wrote);
  CHECK_EQ(store.stats().written_back, written + 2);  // frozen ones: the commit under way has them
  CHECK_EQ(store.unwritten_rows(), unwritten - 2);
  CHECK_EQ(store.cache().resident(), resident - 3);
  CHECK_EQ(parts.directory->stored_rows(), size_t{42});
  for (const int64_t row : rows) CHECK(is_position(state(row)));
  parts.check_live(102);
  std::vector<std::byte> found(records.size());
  store.log()->drain();
  store.fetch(rows.data(), rows.size(), kPayload, found.data());
  CHECK(found == records);
  store.thaw();
}

TEST(store_looks_for_a_batch_again_when_a_row_has_moved) {
  StoreParts parts(32);
  Store& store = *parts.store;
  parts.write(range(0, 20));
  const Batch batch = batch_of({3, 4, 5});
  CHECK(store.rows().place(batch, true));
  CHECK(store.rows().is_placed(batch));
  parts.write({1000});  // any row
  CHECK(!store.rows().is_placed(batch) && !store.place_for_update(batch));
  (void)parts.directory->take_located();
  CHECK(store.rows().place(batch, true) && store.rows().is_placed(batch));
  CHECK_EQ(parts.directory->take_located(), size_t{3});
  // Another store locates the batch again.
  StoreParts other(32);
  other.write(range(0, 20));
  CHECK(!other.store->rows().is_placed(batch));
  (void)other.directory->take_located();
  CHECK(other.store->rows().place(batch, true));
  CHECK_EQ(other.directory->take_located(), size_t{3});
  other.check_placement(batch);
  // A batch that is assigned other rows is located again.
  Batch reused = batch_of({3, 4, 5});
  CHECK(store.rows().place(reused, true));
  const int64_t ids[] = {6, 7};
  reused.assign(ids, 2);
  CHECK(!store.rows().is_placed(reused));
  CHECK(store.rows().place(reused, true));
  parts.check_placement(reused);
}

// A row counts once in a step, however often its batch is placed. Without `touch` it does not count.
TEST(store_counts_the_rows_of_a_batch_once_a_step) {
  StoreParts parts(32);
  Store& store = *parts.store;
  parts.write(range(0, 20));
  store.rows().begin_step();
  const Batch batch = batch_of({3, 4, 5});
  uint64_t hits = store.stats().hits;
  store.rows().locate(batch);
  (void)store.rows().place(batch, false);
  CHECK_EQ(store.stats().hits, hits);
  for (int step = 0; step < 3; ++step) {
    for (int time = 0; time < 3; ++time) {
      (void)store.rows().place(batch, true);
      (void)store.rows().place(batch, false);
      CHECK_EQ(store.stats().hits, hits + 3);
    }
    CHECK(store.place_for_update(batch));
    CHECK_EQ(store.stats().hits, hits + 3);
    hits = store.stats().hits;
    store.rows().begin_step();
  }
}

// A placement that the store uses again is the one that the directory gives, whatever has moved rows.
TEST(store_never_believes_an_old_placement) {
  StoreParts parts(24);
  Store& store = *parts.store;
  parts.write(range(0, 60));
  Sampler sampler(1);
  std::vector<Batch> batches(6);
  const auto make = [&](Batch* batch) {
    std::vector<int64_t> ids(1 + sampler.bits() % 12);
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % 80);  // some are never stored
    batch->assign(ids.data(), ids.size());
  };
  for (Batch& batch : batches) make(&batch);
  size_t known = 0, placed = 0;
  for (int round = 0; round < 4000; ++round) {
    Batch& batch = batches[sampler.bits() % batches.size()];
    const auto row = static_cast<int64_t>(sampler.bits() % 60);
    uint32_t frame;
    switch (sampler.bits() % 16) {
      case 0:
        make(&batch);
        break;
      case 1:
        store.rows().begin_step();
        break;
      case 2:
        parts.write({row});
        break;
      case 3:
        store.pin(&row, 1, false, &frame);
        CHECK_EQ(parts.value(frame), row);
        store.unpin(&frame, 1);
        break;
      case 4:
        store.flush();
        break;
      case 5: {
        const Store::Staging staging = store.begin_staging(&row, 1);
        parts.log->reads().execute(staging.plan, kPayload, parts.log->reads().staging_lane(), nullptr);
        store.end_staging(staging, sampler.bits() % 4 == 0);
        break;
      }
      default: {
        (void)parts.directory->take_located();
        const bool has_all = store.rows().place(batch, sampler.bits() % 2 == 0);
        const size_t located = parts.directory->take_located();
        CHECK(located == 0 || located == batch.num_unique());
        known += located == 0;
        parts.check_placement(batch);
        CHECK_EQ(has_all, batch.placement().missing == 0);
        CHECK_EQ(store.place_for_update(batch), has_all);
        placed += has_all;
      }
    }
    const StoreStats& stats = store.stats();
    CHECK_EQ(stats.hits + stats.misses + stats.first_touches, stats.unique_rows);
  }
  CHECK(known > 100 && placed > 100);
}

// Two stagings under way: the end of the first must not free the second's frames. The first finds a row in the log's
// buffers. That row may be evicted at once, and its frame is loading for the second before the first ends.
TEST(staging_that_ends_leaves_the_frames_of_others_alone) {
  constexpr size_t kFrames = 32;
  StoreParts parts(kFrames);
  Store& store = *parts.store;
  Log& log = *parts.log;
  const auto touch = [&](int64_t row) {
    uint32_t frame;
    store.pin(&row, 1, false, &frame);
    CHECK_EQ(parts.value(frame), row);
    store.unpin(&frame, 1);
  };
  constexpr int64_t kFirst = 100, kOnDisk = 200, kRow = 1;
  const auto push_out = [&](int64_t row) {
    for (int64_t i = 0; is_frame(store.directory().find(row)); ++i) {
      CHECK(i < 100 * kOnDisk);
      touch(kFirst + i % kOnDisk);
    }
  };
  parts.write(range(kFirst, kFirst + kOnDisk));
  store.flush();
  log.drain();
  parts.write({kRow});
  push_out(kRow);
  const uint64_t position = position_of(store.directory().find(kRow));
  CHECK(log.pending(position) != nullptr);

  const Store::Staging first = store.begin_staging(&kRow, 1);
  CHECK_EQ(first.copied, size_t{1});
  const uint32_t frame = frame_of(store.directory().find(kRow));
  // With one that must be read, so that both are pinned until it is.
  int64_t both[] = {kRow, kFirst};
  while (is_frame(store.directory().find(both[1]))) ++both[1];
  uint32_t frames[2];
  store.pin(both, 2, false, frames);
  CHECK_EQ(parts.value(frames[0]), kRow);
  store.unpin(frames, 2);
  push_out(kRow);
  std::vector<int64_t> wanted;
  std::vector<Store::Staging> others;
  const auto end_others = [&] {
    for (size_t i = 0; i < others.size(); ++i) {
      log.reads().execute(others[i].plan, kPayload, log.reads().staging_lane(), nullptr);
      store.end_staging(others[i], false);
      CHECK_EQ(parts.value(others[i].frames[0]), wanted[i]);
    }
    others.clear();
    wanted.clear();
  };
  for (int64_t i = 0; others.empty() || others.back().frames[0] != frame; ++i) {
    CHECK(i < 100 * kOnDisk);
    const int64_t row = kFirst + i % kOnDisk;
    if (!is_position(store.directory().find(row))) continue;
    if (others.size() == kFrames / 2 - 1) end_others();
    others.push_back(store.begin_staging(&row, 1));
    CHECK_EQ(others.back().frames.size(), size_t{1});
    wanted.push_back(row);
  }
  store.end_staging(first, false);
  for (const Store::Staging& one : others) {
    CHECK(store.is_loading(one.frames[0]));
    CHECK_EQ(int{store.cache().info(one.frames[0]).pinned}, 1);
  }
  end_others();
}
