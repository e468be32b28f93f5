// Commits while updates go on: a commit has the values of the moment when it began, although rows change, are evicted
// and are moved while it is written.
#include <atomic>
#include <chrono>
#include <thread>

#include "base/workers.h"
#include "maintenance/check.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"
#include "vfs/fault.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

// Delays writes to segments, so that commits write while updates go on. Holds back syncs, so that a test decides how
// long a commit is under way.
class SlowVfs final : public vfs::Vfs {
 public:
  explicit SlowVfs(std::chrono::microseconds delay) : delay_(delay) {}
  void hold_syncs() { gate_->is_open = false; }
  void release_syncs() {
    gate_->is_open = true;
    gate_->is_open.notify_all();
  }

  std::shared_ptr<vfs::File> create(const std::string& path) override {
    return std::make_shared<File>(below_.create(path), delay_, gate_);
  }
  std::shared_ptr<vfs::File> create_small(const std::string& path) override { return below_.create_small(path); }
  std::shared_ptr<vfs::File> open(const std::string& path, bool direct) override { return below_.open(path, direct); }
  void link(const std::string& from, const std::string& to) override { below_.link(from, to); }
  void remove(const std::string& path) override { below_.remove(path); }
  void truncate(const std::string& path, uint64_t bytes) override { below_.truncate(path, bytes); }
  void sync_directory(const std::string& path) override { below_.sync_directory(path); }
  void make_directories(const std::string& path) override { below_.make_directories(path); }
  std::vector<std::string> list(const std::string& path) override { return below_.list(path); }
  bool exists(const std::string& path) override { return below_.exists(path); }
  std::unique_ptr<vfs::Lock> lock(const std::string& path) override { return below_.lock(path); }

 private:
  struct Gate {
    std::atomic<bool> is_open{true};
  };
  class File final : public vfs::File {
   public:
    File(std::shared_ptr<vfs::File> below, std::chrono::microseconds delay, std::shared_ptr<Gate> gate)
        : below_(std::move(below)), delay_(delay), gate_(std::move(gate)) {}
    void read(void* data, size_t n, uint64_t offset) override { below_->read(data, n, offset); }
    void write(const void* data, size_t n, uint64_t offset) override {
      std::this_thread::sleep_for(delay_);
      below_->write(data, n, offset);
    }
    void sync() override {
      std::this_thread::sleep_for(delay_);
      gate_->is_open.wait(false);
    }
    uint64_t size() override { return below_->size(); }
    uint32_t read_alignment() const override { return below_->read_alignment(); }
    const std::string& path() const override { return below_->path(); }

   private:
    std::shared_ptr<vfs::File> below_;
    std::chrono::microseconds delay_;
    std::shared_ptr<Gate> gate_;
  };
  FaultVfs below_;  // makes no syncs
  std::chrono::microseconds delay_;
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
};

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
  SlowVfs vfs(delay);
  const size_t ram = minimum_ram(spec, 0, true);
  auto table = Table::create(vfs, path, "t", spec, ram * ram_factor);
  const struct Release {  // before the table is destroyed, which waits for its commit
    SlowVfs& vfs;
    ~Release() { vfs.release_syncs(); }
  } release{vfs};
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
      vfs.hold_syncs();
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
      vfs.release_syncs();
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
  SlowVfs vfs(std::chrono::microseconds(300));
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
  for (int round = 1; round <= 400; ++round) {
    std::fill(values.begin(), values.end(), static_cast<float>(round));
    table->set(ids.data(), ids.size(), 0, values.data());
    if (beside_busy_threads) {
      io_pool().submit([] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }, kIoThreads);
    }
    table->write_dirty();
  }
  const TableStats stats = table->stats();
  CHECK(stats.store.written_back > 50 * ids.size());
  CHECK(stats.compactions > 0);
  CHECK(stats.disk_bytes < 64 * stats.live_bytes);
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
  SlowVfs vfs(std::chrono::milliseconds(5));
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
