// Commits while updates go on: a commit has the values of the moment when it began, although rows change, are evicted
// and are moved while it is written.
#include "jobs/committer.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/workers.h"
#include "format/format.h"
#include "maintenance/check.h"
#include "tests/check.h"
#include "tests/gated.h"
#include "tests/model.h"
#include "tests/parts.h"
#include "tests/sample.h"
#include "tests/sandbox.h"
#include "vfs/fault.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

void check_snapshot(vfs::Vfs& vfs, const std::string& path, const std::string& name, const Rows& rows, size_t ram) {
  OpenOptions options;
  options.ram_bytes = ram;
  options.snapshot = name;
  options.writable = false;
  const auto reader = Table::open(vfs, path, "t", options);
  check_table_is(reader.get(), rows, "snapshot " + name);
}

void commits_beside_updates(const TableSpec& spec, uint64_t seed, size_t ram_factor, std::chrono::microseconds delay) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  GatedVfs vfs(delay);
  const size_t ram = minimum_ram(spec, 0, true);
  auto table = Table::create(vfs, path, "t", spec, ram * ram_factor);
  const GatedVfs::Release release(vfs);  // before the table is destroyed, which waits for its commit
  const auto range = static_cast<uint64_t>(spec.num_rows);
  Sampler sampler(seed);
  Rows rows;
  std::map<std::string, Rows> kept;
  std::shared_ptr<PendingCommit> pending;
  size_t changed_meanwhile = 0;
  uint64_t evictions = 0;
  for (int round = 0; round < 120; ++round) {
    if (round % 10 == 3) {
      const std::string name = "s" + std::to_string(1000 + round);
      kept[name] = rows;
      if (kept.size() > 4) {
        table->drop(kept.begin()->first);
        kept.erase(kept.begin());
      }
      vfs.hold(Op::kSync);
      pending = table->begin_commit("{\"round\":" + std::to_string(round) + "}", name);
    }
    const bool is_under_way = pending != nullptr && !pending->is_over();
    std::vector<int64_t> ids(1 + sampler.bits() % 150);
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % range);
    std::vector<float> grads(ids.size());
    for (float& grad : grads) grad = static_cast<float>(static_cast<int>(sampler.bits() % 3) - 1);
    if (round % 2 == 0) {
      update(table.get(), ids, grads);
    } else {
      // As a training step, whose update finds the rows where the lookup found them.
      const Batch batch = table->batch(ids.data(), ids.size());
      std::vector<float> before(ids.size() * spec.dim);
      table->lookup(batch, true, before.data());
      update(table.get(), batch, grads);
    }
    apply(&rows, ids, grads);
    if (round % 4 == 1) table->write_dirty();
    changed_meanwhile += is_under_way && !pending->is_over();
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % range);
    std::vector<float> values(ids.size() * spec.dim);
    table->lookup(ids.data(), ids.size(), true, values.data());
    check_values(rows, ids, values, spec.dim, "round " + std::to_string(round));
    const TableStats stats = table->stats();
    CHECK(stats.ram_bytes <= stats.ram_budget_bytes);
    if (round % 10 == 9) {
      vfs.release();
      pending->wait();
      for (const auto& [name, state] : kept) check_snapshot(vfs, path, name, state, ram);
    }
    if (round % 40 == 39) {
      evictions += table->stats().store.evictions;
      table.reset();  // without a commit
      rows = kept.rbegin()->second;
      for (const auto& [name, state] : kept) {
        if (std::stoi(name.substr(1)) > 1000 + round - 10) rows = state;
      }
      table = open_table(vfs, path, ram * ram_factor);
      check_table_is(table.get(), rows, "reopened after round " + std::to_string(round));
    }
  }
  CHECK_EQ(changed_meanwhile, size_t{7 * 12});  // rounds 3 to 9 of every ten
  CHECK(ram_factor > 1 || evictions > 500);
  table.reset();
  const auto problems = check_table(vfs::posix(), path);
  if (!problems.empty()) fail(__FILE__, __LINE__, problems.front());
}

}  // namespace

TEST(commit_holds_what_was_there_when_it_began) {
  commits_beside_updates(whole_numbers(2000, 24), 1, 1, std::chrono::microseconds(1000));
  commits_beside_updates(whole_numbers(300, 700), 2, 1, std::chrono::microseconds(500));
}
TEST(commit_of_rows_that_stay_in_ram) {
  commits_beside_updates(whole_numbers(2000, 24), 3, 8, std::chrono::microseconds(1000));
}

// Each update adds one to every row, which shows a commit that has rows of two steps.
TEST(commit_beside_threads) {
  const TableSpec spec = whole_numbers(500, 60);
  const Sandbox sandbox;
  GatedVfs vfs(std::chrono::microseconds(300));
  const size_t ram = minimum_ram(spec, 0, true);
  const auto table = Table::create(vfs, sandbox / "t", "t", spec, ram * 2);
  std::vector<int64_t> all;
  for (int64_t id = 0; id < spec.num_rows; ++id) all.push_back(id);
  const std::vector<float> grads(all.size(), -1.0f);
  update(table.get(), all, grads);
  std::atomic<bool> stop{false};
  std::atomic<int> failures{0};
  const auto guarded = [&](auto&& work) {
    return std::thread([&failures, work] {
      try {
        work();
      } catch (const std::exception&) {
        ++failures;
      }
    });
  };
  std::vector<std::thread> threads;
  const struct Join {
    std::vector<std::thread>& threads;
    std::atomic<bool>& stop;
    ~Join() {
      stop = true;
      for (std::thread& thread : threads) thread.join();
    }
  } join{threads, stop};
  threads.push_back(guarded([&] {
    while (!stop) update(table.get(), all, grads);
  }));
  threads.push_back(guarded([&] {
    std::vector<float> values(all.size() * spec.dim);
    while (!stop) {
      table->lookup(all.data(), all.size(), true, values.data());
      for (size_t i = 0; i < all.size(); ++i) CHECK(values[i * spec.dim] == values[0]);
      table->stage(all.data(), 50);
      (void)table->stats();
    }
  }));
  threads.push_back(guarded([&] {
    while (!stop) {
      table->write_dirty();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }));
  threads.push_back(guarded([&] {
    while (!stop) table->begin_commit("{\"second\":1}", "");
  }));
  for (int round = 0; round < 12; ++round) {
    const uint64_t epoch = table->commit("{\"round\":" + std::to_string(round) + "}", "kept");
    OpenOptions options;
    options.ram_bytes = ram * 2;
    options.writable = false;
    options.snapshot = "kept";
    const auto reader = Table::open(vfs, sandbox / "t", "t", options);
    CHECK_EQ(reader->epoch(), epoch);
    std::vector<float> values(all.size() * spec.dim);
    reader->lookup(all.data(), all.size(), true, values.data());
    for (size_t i = 0; i < all.size(); ++i) CHECK_EQ(values[i * spec.dim], static_cast<float>(reader->step()));
  }
  CHECK_EQ(failures.load(), 0);
}

// A commit does not write again what write_dirty() wrote, and without a commit that is not durable.
TEST(write_dirty_leaves_a_commit_what_changed_since) {
  const TableSpec spec = whole_numbers(3000, 60);
  const Sandbox sandbox;
  FaultVfs vfs;
  auto table = Table::create(vfs, sandbox / "t", "t", spec, 4u << 20);
  Rows rows;
  const auto train = [&](int64_t from, int64_t to) {
    std::vector<int64_t> ids;
    for (int64_t id = from; id < to; ++id) ids.push_back(id);
    const std::vector<float> grads(ids.size(), 1.0f);
    update(table.get(), ids, grads);
    apply(&rows, ids, grads);
  };
  const auto write_all = [&] {
    while (table->stats().dirty_rows > 0) table->write_dirty();
  };
  train(0, 3000);
  table->commit(std::nullopt, "");
  const Rows committed = rows;
  uint64_t written = table->stats().store.written_back;
  train(500, 2500);
  write_all();
  CHECK_EQ(table->stats().store.written_back - written, uint64_t{2000});
  CHECK(table->is_changed());
  CHECK(table->uncommitted().rows >= 2000);
  table.reset();  // without a commit
  table = open_table(vfs, sandbox / "t", 4u << 20);
  check_table_is(table.get(), committed, "the last commit");
  rows = committed;
  train(0, 2000);
  write_all();
  train(1900, 2600);
  written = table->stats().store.written_back;
  table->commit(std::nullopt, "");
  CHECK_EQ(table->stats().store.written_back - written, uint64_t{700});
  check_table_is(table.get(), rows, "committed");
  table.reset();
  table = open_table(vfs, sandbox / "t", 4u << 20);
  check_table_is(table.get(), rows, "opened again");
}

// Rows that stay in RAM are set and written repeatedly. Their dead records are compacted, even when the compacting
// thread starts late, after the next exclusive call.
void written_over_and_over(bool beside_busy_threads) {
  const TableSpec spec = whole_numbers(2000, 24);
  const Sandbox sandbox;
  FaultVfs vfs;
  auto table = Table::create(vfs, sandbox / "t", "t", spec, 8u << 20);
  std::vector<int64_t> ids(2000);
  for (int64_t id = 0; id < 2000; ++id) ids[static_cast<size_t>(id)] = id;
  std::vector<float> values(ids.size() * spec.dim);
  const auto has_written = [&] { return table->stats().store.written_back > 50 * ids.size(); };
  for (int round = 1; round <= 400 || !has_written(); ++round) {  // write_dirty() waits for no buffer
    CHECK(round < 100'000);
    std::fill(values.begin(), values.end(), static_cast<float>(round));
    table->set(ids.data(), ids.size(), 0, values.data());
    if (beside_busy_threads) {
      io_pool().submit([] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }, kIoThreads);
    }
    table->write_dirty();
  }
  const TableStats stats = table->stats();
  CHECK(stats.compactions > 0);
  // Not live_bytes: the last write_dirty() may have found no free buffer, and then no record in the log is live.
  CHECK(stats.disk_bytes < 64 * ids.size() * (record_stride(table->payload_bytes()) + chunk_index_bytes(1)));
  std::vector<float> found(values.size());
  table->lookup(ids.data(), ids.size(), true, found.data());
  CHECK(found == values);
  table->commit(std::nullopt, "");
  table.reset();
  table = open_table(vfs, sandbox / "t", 8u << 20);
  table->lookup(ids.data(), ids.size(), true, found.data());
  CHECK(found == values);
}

TEST(write_dirty_leaves_no_log_that_only_grows) { written_over_and_over(false); }
TEST(write_dirty_leaves_no_log_that_only_grows_beside_busy_threads) { written_over_and_over(true); }

// A failed commit changes no row and reports its error one time. The next commit includes its rows.
TEST(commit_in_the_background_that_fails) {
  const TableSpec spec = whole_numbers(300, 60);
  const Sandbox sandbox;
  FaultVfs vfs;
  const size_t ram = minimum_ram(spec, 0, true);
  auto table = Table::create(vfs, sandbox / "t", "t", spec, ram * 4);
  Rows rows;
  std::vector<int64_t> all;
  for (int64_t id = 0; id < spec.num_rows; ++id) all.push_back(id);
  const std::vector<float> ones(all.size(), 1.0f);
  const auto step = [&] {
    update(table.get(), all, ones);
    apply(&rows, all, ones);
  };
  step();
  table->commit(std::nullopt, "");
  const Rows committed = rows;
  step();
  vfs.fail_all(Op::kWrite, ENOSPC);
  const auto pending = table->begin_commit(std::nullopt, "");
  CHECK_THROWS(pending->wait(), ErrorKind::kSystem, "injected");
  CHECK(table->is_changed());
  CHECK_EQ(table->epoch(), uint64_t{1});
  table->begin_commit(std::nullopt, "");  // no call waits for this commit
  CHECK_THROWS(table->commit(std::nullopt, ""), ErrorKind::kSystem, "injected");
  check_table_is(open_table(vfs::posix(), sandbox / "t", ram, false).get(), committed, "still");
  vfs.heal();
  check_table_is(table.get(), rows, "healed", false);
  table->commit(std::nullopt, "");
  CHECK(!table->is_changed());
  step();
  // After a failed sync it is unknown which bytes are on the disk.
  vfs.fail_all(Op::kSync, EIO);
  CHECK_THROWS(table->begin_commit(std::nullopt, "")->wait(), ErrorKind::kSync, "injected");
  vfs.heal();
  CHECK_THROWS(step(), ErrorKind::kReadOnly, "read-only until reopened");
  check_table_is(table.get(), rows, "read-only", false);
  table.reset();
  for (auto& [id, value] : rows) value += 1.0f;
  check_table_is(open_table(vfs, sandbox / "t", ram).get(), rows, "reopened");
}

// Rows that all change while a commit is under way leave its segments without a live record. Compaction must not choose
// these segments again and again: they stay until the commit is over. Three rows of ten never change, so compaction is
// needed.
TEST(commit_whose_rows_all_change_meanwhile_leaves_compaction_its_segments_once) {
  const TableSpec spec = whole_numbers(16000, 60);
  const Sandbox sandbox;
  GatedVfs vfs(std::chrono::milliseconds(5));
  const auto table = Table::create(vfs, sandbox / "t", "t", spec, 64u << 20);
  std::vector<int64_t> all, changing;
  for (int64_t id = 0; id < spec.num_rows; ++id) {
    all.push_back(id);
    if (id % 10 < 7) changing.push_back(id);
  }
  const std::vector<float> ones(all.size(), 1.0f);
  update(table.get(), all, ones);
  table->commit(std::nullopt, "");
  uint64_t segments = table->stats().segments;
  for (int round = 0; round < 3; ++round) {
    update(table.get(), changing, ones);
    const auto pending = table->begin_commit(std::nullopt, "");
    update(table.get(), changing, ones);
    pending->wait();
    segments += table->stats().segments;
    table->collect();  // waits for the work after the commit
  }
  CHECK(table->stats().compactions > 0);
  CHECK(table->stats().compactions <= segments);
}

// ---- The committer by itself

namespace {

constexpr int64_t kRows = 500;

struct Committed {
  Committed() { table = new_parts(vfs, path, spec, Parts::with_ram(size_t{4} << 20)); }
  Committer& committer() { return table->committer; }
  TableState& state() { return table->state; }
  uint64_t commit(const std::optional<std::string>& meta = std::nullopt, const std::string& keep = "") {
    return committer().commit(meta, keep);
  }
  Manifest newest() { return Manifests(vfs::posix(), path).load_newest(); }

  const TableSpec spec = whole_numbers(kRows, 4);
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  GatedVfs vfs;
  std::unique_ptr<Parts> table;
  const GatedVfs::Release release{vfs};  // before the table ends
};

}  // namespace

TEST(committer_of_an_unchanged_table_makes_no_commit) {
  Committed rows;
  rows.table->add_one({1});
  CHECK_EQ(rows.commit("{\"a\":1}"), uint64_t{1});
  CHECK_EQ(rows.commit(), uint64_t{1});
  CHECK_EQ(rows.commit("{\"a\":1}"), uint64_t{1});
  CHECK_EQ(rows.committer().begin_commit(std::nullopt, "")->wait(), uint64_t{1});
  CHECK_EQ(rows.newest().epoch, uint64_t{1});
  CHECK_EQ(rows.commit("{\"a\":2}"), uint64_t{2});           // another meta is a change,
  CHECK_EQ(rows.commit(std::nullopt, "kept"), uint64_t{3});  // and so is a name
  CHECK_EQ(rows.commit(), uint64_t{3});
  {
    const auto guard = rows.state().lock.exclusive();
    rows.state().spec.optimizer.lr = 0.5;
  }
  CHECK_EQ(rows.commit(), uint64_t{4});
  CHECK_EQ(rows.newest().optimizer.lr, 0.5);
  CHECK_EQ(rows.newest().meta, std::string("{\"a\":2}"));
  CHECK_EQ(rows.newest().keep, std::string());
  CHECK_EQ(rows.state().counts.commits, uint64_t{4});
}

TEST(committer_names_the_facts_of_the_moment_it_begins) {
  Committed rows;
  rows.table->add_one({1, 2, 3});
  rows.vfs.hold(Op::kSync);
  const auto pending = rows.committer().begin_commit("{\"a\":1}", "kept");
  rows.vfs.wait_until_waiting();
  {
    const auto guard = rows.state().lock.work();
    CHECK(rows.state().lock.is_committing() && !rows.state().is_durable && !rows.state().is_changed);
    CHECK_EQ(rows.state().committed.epoch, uint64_t{0});
    CHECK_EQ(rows.state().meta, std::string("{}"));
  }
  CHECK(!pending->is_over());
  rows.table->add_one({4});
  rows.vfs.release();
  CHECK_EQ(pending->wait(), uint64_t{1});
  const Manifest newest = rows.newest();
  CHECK_EQ(newest.step, int64_t{1});
  CHECK_EQ(newest.stored_rows, uint64_t{3});
  CHECK_EQ(newest.keep, std::string("kept"));
  CHECK_EQ(newest.parent_epoch, uint64_t{0});
  const auto guard = rows.state().lock.exclusive();
  CHECK(rows.state().is_durable && rows.state().is_changed);
  CHECK_EQ(rows.state().meta, std::string("{\"a\":1}"));
  CHECK_EQ(rows.state().committed.epoch, uint64_t{1});
}

// Compaction drops a segment whose records have died since the commit began. The commit still names the segment.
TEST(committer_keeps_the_segments_that_a_commit_under_way_names) {
  Committed rows;
  rows.table->add_one(range(0, kRows));
  Store& store = *rows.state().store;
  store.flush();
  store.log()->rotate();
  rows.vfs.hold(Op::kSync);
  const auto pending = rows.committer().begin_commit(std::nullopt, "");
  rows.vfs.wait_until_waiting();
  rows.table->add_one(range(0, kRows));
  {
    const auto guard = rows.state().lock.work();
    const size_t before = store.log()->segments().size();
    store.compactor().drop_dead_segments();
    CHECK(store.log()->segments().size() < before);
  }
  rows.vfs.release();
  pending->wait();
  OpenOptions options = Parts::with_ram(size_t{4} << 20);
  options.writable = false;
  Parts reader(rows.vfs, rows.path, rows.spec, options);
  for (const int64_t row : {int64_t{0}, kRows - 1}) CHECK_EQ(reader.value(row), 1.0f);
}

TEST(committer_makes_one_commit_after_the_other) {
  Committed rows;
  rows.table->add_one({1});
  rows.vfs.hold(Op::kSync);
  const auto first = rows.committer().begin_commit(std::nullopt, "");
  rows.vfs.wait_until_waiting();
  rows.table->add_one({2});
  std::atomic<uint64_t> second{0};
  std::thread call([&] { second = rows.commit(); });
  CHECK_EQ(second.load(), uint64_t{0});
  rows.vfs.release();
  call.join();
  CHECK_EQ(first->wait(), uint64_t{1});
  CHECK_EQ(second.load(), uint64_t{2});
}

TEST(committer_of_a_table_in_ram_counts_epochs_and_keeps_copies) {
  Parts table(whole_numbers(kRows, 4));
  table.add_one({1});
  CHECK_EQ(table.committer.commit("{\"a\":1}", "kept"), uint64_t{1});
  CHECK_EQ(table.committer.commit(std::nullopt, ""), uint64_t{1});
  CHECK_EQ(table.state.meta, std::string("{\"a\":1}"));
  CHECK_EQ(table.ram.find("kept", std::nullopt).epoch, uint64_t{1});
  table.add_one({1});
  CHECK_EQ(table.committer.begin_commit(std::nullopt, "")->wait(), uint64_t{2});
  CHECK_EQ(table.state.counts.commits, uint64_t{2});
  CHECK_EQ(table.ram.list().size(), size_t{1});
  table.committer.write_dirty();  // there is nothing to write,
  table.committer.collect(2);     // and nothing to remove
}

TEST(committer_refuses_what_the_table_refuses) {
  Committed rows;
  rows.table->add_one({1});
  rows.state().options.writable = false;
  CHECK_THROWS(rows.commit(), ErrorKind::kReadOnly, "open for reading");
  CHECK_THROWS((void)rows.committer().begin_commit(std::nullopt, ""), ErrorKind::kReadOnly, "open for reading");
  CHECK_THROWS(rows.committer().write_dirty(), ErrorKind::kReadOnly, "open for reading");
  CHECK_THROWS(rows.committer().collect(2), ErrorKind::kReadOnly, "open for reading");
  rows.state().options.writable = true;
  rows.state().spec.is_scratch = true;
  CHECK_THROWS(rows.commit(std::nullopt, "kept"), ErrorKind::kInvalid, "is a scratch table");
  CHECK(!rows.state().lock.is_committing());
  rows.state().spec.is_scratch = false;
  CHECK_EQ(rows.commit(), uint64_t{1});
}

// After a failed sync the manifest may be on disk. Its segments must stay.
TEST(committer_that_cannot_sync_a_manifest_leaves_the_table_read_only) {
  Committed rows;
  rows.table->add_one({1});
  rows.commit();
  Manifest manifest = rows.state().committed;
  ++manifest.epoch;
  manifest.writer_flags |= kWriterFlagCopy;
  const auto publish = [&] {
    const auto guard = rows.state().lock.exclusive();
    rows.committer().publish(manifest);
  };
  rows.vfs.fail_all(Op::kLink, EIO);
  CHECK_THROWS(publish(), ErrorKind::kSystem, "injected");
  CHECK(rows.state().read_only_reason.empty());
  CHECK_EQ(rows.state().committed.epoch, uint64_t{1});
  rows.vfs.fail_all(Op::kSyncDirectory, EIO);
  CHECK_THROWS(publish(), ErrorKind::kSync, "injected");
  CHECK(!rows.state().read_only_reason.empty());
  CHECK_EQ(rows.state().committed.epoch, uint64_t{1});
  rows.vfs.heal();
  ++manifest.epoch;
  publish();
  CHECK_EQ(rows.newest().epoch, uint64_t{3});
  CHECK_EQ(rows.state().committed.epoch, uint64_t{3});
  CHECK_EQ(rows.newest().writer_flags & kWriterFlagCopy, uint64_t{0});  // from here on it goes its own way
}

// The next commit throws the error of a failed commit only when no caller has waited for that.
TEST(committer_reports_a_failure_once) {
  Committed rows;
  rows.table->add_one({1});
  rows.commit();
  for (const bool is_waited_for : {true, false}) {
    rows.table->add_one({2});
    rows.vfs.fail_all(Op::kCreate, EIO);
    const auto pending = rows.committer().begin_commit(std::nullopt, "");
    if (is_waited_for) CHECK_THROWS(pending->wait(), ErrorKind::kSystem, "injected");
    for (bool is_committing = true; is_committing;) {
      const auto guard = rows.state().lock.work();
      is_committing = rows.state().lock.is_committing();
    }
    rows.vfs.heal();
    CHECK_EQ(pending->is_unreported_failure(), !is_waited_for);
    if (!is_waited_for) CHECK_THROWS(rows.commit(), ErrorKind::kSystem, "injected");
    CHECK(rows.state().is_changed && rows.state().is_durable);
    const uint64_t before = rows.newest().epoch;
    CHECK(rows.commit() > before);
    CHECK_EQ(rows.newest().step, rows.state().step);
  }
}

// Commits the same state again to name the index snapshot. A failure changes nothing.
TEST(committer_names_an_index_snapshot_when_the_table_closes) {
  Committed rows;
  rows.table->add_one(range(0, kRows));
  rows.commit();
  const uint64_t rows_before = index_snapshot_rows;
  index_snapshot_rows = 1;
  index_snapshots_in_line = true;
  rows.table->index.consider();
  index_snapshot_rows = rows_before;
  index_snapshots_in_line = false;
  CHECK(rows.table->index.ready().has_value());
  rows.vfs.fail_all(Op::kLink, EIO);
  rows.committer().commit_index_snapshot();
  rows.vfs.heal();
  CHECK_EQ(rows.newest().epoch, uint64_t{1});
  CHECK(rows.table->index.ready().has_value());
  rows.committer().commit_index_snapshot();
  CHECK(rows.newest().epoch > 1);
  CHECK_EQ(rows.newest().index_snapshots.size(), size_t{1});
  CHECK_EQ(rows.newest().step, int64_t{1});
  CHECK(!rows.table->index.ready().has_value());
}

// Neither a commit nor another collection runs meanwhile.
TEST(committer_collects_when_the_commit_is_over) {
  Committed rows;
  for (int time = 0; time < 4; ++time) {
    rows.table->add_one({1});
    rows.commit(std::nullopt, time == 0 ? "kept" : "");
  }
  CHECK(Manifests(vfs::posix(), rows.path).epochs() == std::vector<uint64_t>({1, 3, 4}));
  rows.vfs.hold(Op::kSync);
  rows.table->add_one({1});
  const auto pending = rows.committer().begin_commit(std::nullopt, "");
  rows.vfs.wait_until_waiting();
  std::thread call([&] { rows.committer().collect(1); });
  CHECK(!pending->is_over());
  rows.vfs.release();
  call.join();
  CHECK(pending->is_over());
  CHECK(Manifests(vfs::posix(), rows.path).epochs() == std::vector<uint64_t>({1, 5}));
  rows.table->add_one({1});
  rows.commit();
  rows.vfs.fail_all(Op::kRemove, EIO);
  CHECK_THROWS(rows.committer().collect(1), ErrorKind::kSystem, "injected");
  rows.vfs.heal();
  CHECK(!rows.state().lock.is_committing());
}
