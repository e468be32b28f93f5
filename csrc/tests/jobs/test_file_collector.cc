// Which commits and files a collection leaves, also while other calls change the log.
#include "jobs/file_collector.h"

#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/model.h"
#include "tests/parts.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

using Epochs = std::vector<uint64_t>;

// Calls a function when a manifest is removed: in the middle of a collection.
class AtRemoval final : public FaultVfs {
 public:
  std::function<void()> call, at_segment;
  void remove(const std::string& path) override {
    if (at_segment && path.find("/segment-") != std::string::npos) at_segment();
    if (call && path.find("/manifest-") != std::string::npos) std::exchange(call, nullptr)();
    FaultVfs::remove(path);
  }
};

struct Collected {
  explicit Collected(bool belongs_to_run = false) {
    spec.belongs_to_run = belongs_to_run;
    OpenOptions options = Parts::with_ram(size_t{4} << 20);
    options.through_run = belongs_to_run;
    table = new_parts(vfs, sandbox / "t", spec, options);
  }
  // Makes a commit without the compaction and the collection that follow one.
  void commit(const std::string& keep = "") {
    table->add_one(range(0, 50));
    const auto guard = table->state.lock.exclusive();
    Store& store = *table->state.store;
    store.freeze();
    while (store.write_frozen(1u << 20)) {
    }
    store.log()->finish_ending();
    while (!store.log()->buffers().is_written(store.log()->epoch())) store.log()->drain();
    Manifest manifest = table->state.committed;
    ++manifest.epoch;
    manifest.keep = keep;
    manifest.stored_rows = store.directory().stored_rows();
    manifest.next_segment = store.log()->next_segment();
    manifest.next_version = store.log()->next_version();
    manifest.segments.clear();
    for (const auto& [id, segment] : store.log()->segments()) {
      segment->is_ending = false;
      if (segment->live > 0) manifest.segments.push_back({id, segment->epoch, segment->bytes});
    }
    std::set<uint64_t> named;
    for (const SegmentEntry& entry : manifest.segments) named.insert(entry.segment);
    store.compactor().add_named_segments(named);
    table->committer.publish(manifest);
  }
  // Makes commits. The log drops the segments that have no live rows, as compaction does.
  void commit_and_drop(int times) {
    for (int commit = 1; commit <= times; ++commit) this->commit();
    const auto guard = table->state.lock.exclusive();
    table->state.store->compactor().drop_dead_segments();
  }
  void collect(size_t newest = FileCollector::kNewest) {
    const auto guard = table->state.lock.exclusive();
    table->collector.collect(newest);
  }
  Epochs epochs() const { return Manifests(vfs::posix(), sandbox / "t").epochs(); }
  // Numbers of the segment files.
  std::set<uint64_t> files() const {
    std::set<uint64_t> numbers;
    for (const std::string& name : vfs::posix().list(sandbox / "t")) {
      uint64_t number;
      if (parse_name(name, "segment-", &number)) numbers.insert(number);
    }
    return numbers;
  }
  // Numbers of the segments that a commit names or the log has.
  std::set<uint64_t> needed() const {
    std::set<uint64_t> numbers;
    for (const uint64_t epoch : epochs()) {
      for (const SegmentEntry& entry : Manifests(vfs::posix(), sandbox / "t").load(epoch).segments) {
        numbers.insert(entry.segment);
      }
    }
    for (const auto& [id, segment] : table->state.store->log()->segments()) numbers.insert(id);
    return numbers;
  }

  TableSpec spec = whole_numbers(1000, 4);
  const Sandbox sandbox;
  AtRemoval vfs;
  std::unique_ptr<Parts> table;
};

}  // namespace

TEST(collector_leaves_the_newest_the_kept_and_the_pinned_commits) {
  Collected rows;
  for (int commit = 1; commit <= 8; ++commit) rows.commit(commit == 2 || commit == 4 ? "kept" : "");
  CHECK(rows.epochs() == Epochs({0, 1, 2, 3, 4, 5, 6, 7, 8}));
  rows.table->collector.set_pinned({3, 5}, {5});
  CHECK(rows.table->collector.is_pinned(3) && !rows.table->collector.is_pinned(4));
  rows.table->add_one(range(0, 50));
  rows.table->state.store->flush();  // to a segment that no commit names
  rows.table->state.store->log()->drain();
  rows.collect();
  CHECK(rows.epochs() == Epochs({3, 4, 5, 7, 8}));  // the name has moved from 2 to 4
  CHECK(rows.files() == rows.needed());
  rows.table->collector.set_pinned({5}, {5});
  CHECK(!rows.table->collector.is_pinned(3));
  rows.collect(1);
  CHECK(rows.epochs() == Epochs({4, 5, 8}));
  CHECK(rows.files() == rows.needed());
  CHECK(rows.table->state.store->disk().snapshot_bytes() > 0);
  rows.table->collector.set_pinned({}, {});
  rows.collect(0);  // the last commit stays at any rate
  CHECK(rows.epochs() == Epochs({4, 8}));
}

// A run collects after its own manifest is durable. Before it has pinned its commits, every commit stays.
TEST(collector_of_a_run_waits_for_the_runs_pins) {
  Collected rows(true);
  for (int commit = 1; commit <= 5; ++commit) rows.commit();
  rows.collect(1);
  CHECK(rows.epochs() == Epochs({0, 1, 2, 3, 4, 5}));
  rows.table->collector.set_pinned({2, 4}, {});
  rows.collect(1);
  CHECK(rows.epochs() == Epochs({2, 4, 5}));
}

// A manifest with a later epoch may exist although writing it failed. Power loss may remove it.
TEST(collector_leaves_the_commit_that_the_table_is_at) {
  Collected rows;
  for (int commit = 1; commit <= 3; ++commit) rows.commit();
  const Manifest at = rows.table->state.committed;
  rows.commit();
  rows.commit();
  rows.table->state.committed = at;
  rows.collect(1);
  CHECK(rows.epochs() == Epochs({3, 5}));
}

// The disk budget counts the files that are left.
TEST(collector_tells_the_disk_budget_what_is_left) {
  for (const bool in_slices : {false, true}) {
    Collected rows;
    for (int commit = 1; commit <= 4; ++commit) rows.commit();
    if (in_slices) {
      rows.table->collector.collect_in_slices();
    } else {
      rows.collect();
    }
    uint64_t bytes = 0;
    for (const std::string& name : vfs::posix().list(rows.sandbox / "t")) {
      if (name != kLockName) bytes += vfs::posix().open(rows.sandbox / ("t/" + name), false)->size();
    }
    CHECK_EQ(rows.table->state.store->disk().used_bytes(), bytes + rows.table->state.store->log()->open_bytes());
  }
}

// The disk budget counts kept pins as it counts snapshots.
TEST(collector_counts_kept_pins_as_snapshots) {
  for (const bool is_kept : {false, true}) {
    Collected rows(true);
    rows.commit();
    rows.commit();
    rows.table->collector.set_pinned({1}, is_kept ? std::set<uint64_t>{1} : std::set<uint64_t>{});
    rows.collect(1);
    CHECK(rows.epochs() == Epochs({1, 2}));
    CHECK_EQ(rows.table->state.store->disk().snapshot_bytes() > 0, is_kept);
  }
}

// The collection does not hold the lock meanwhile. Another call drops a dead segment whose file belongs to a commit
// that this collection removes. It also empties a segment that the last commit names. No commit names a third one.
TEST(collector_in_slices_removes_segments_that_were_dropped_meanwhile) {
  Collected rows;
  rows.table->add_one(range(500, 600));
  for (int commit = 1; commit <= 3; ++commit) rows.commit();
  rows.collect();
  CHECK(rows.epochs() == Epochs({2, 3}));
  rows.commit();
  rows.table->add_one(range(0, 10));
  Store& store = *rows.table->state.store;
  store.flush();
  store.log()->rotate();
  size_t dropped = 0;
  rows.vfs.call = [&] {
    const auto guard = rows.table->state.lock.work();  // which the collection has released
    dropped = store.log()->segments().size();
    store.compactor().drop_dead_segments();
    dropped -= store.log()->segments().size();
    const auto is_committed = [](const Segment& segment, bool is_named) { return is_named && segment.live > 0; };
    (void)store.compactor().empty_until([] { return false; }, is_committed, store.plan().compaction_bytes);
    CHECK(store.compactor().records_moved() > 0);
    store.log()->drain();
  };
  rows.table->collector.collect_in_slices(1);
  CHECK_EQ(dropped, size_t{1});
  CHECK(rows.epochs() == Epochs({4}));
  CHECK(rows.files() == rows.needed());
  CHECK_EQ(rows.table->value(550), 1.0f);
}

// Only a commit in the background pauses, and where no disk limit needs the space.
TEST(collector_pauses_after_each_segment) {
  using Clock = std::chrono::steady_clock;
  for (const bool is_commit : {false, true}) {
    Collected rows;
    rows.commit_and_drop(4);
    std::vector<Clock::time_point> removed;
    rows.vfs.at_segment = [&] { removed.push_back(Clock::now()); };
    if (is_commit) {
      rows.table->add_one(range(0, 1));
      rows.table->committer.begin_commit(std::nullopt, "")->wait();
      for (bool is_over = false; !is_over; std::this_thread::yield()) {
        const auto guard = rows.table->state.lock.work();
        is_over = !rows.table->state.lock.is_committing();
      }
    } else {
      rows.table->collector.collect_in_slices(1, FileCollector::Pace::kPaused);
    }
    CHECK(rows.files() == rows.needed());
    CHECK(removed.size() >= 2);
    CHECK(removed.back() - removed.front() >= (removed.size() - 1) * FileCollector::kPause);
  }
}

TEST(collector_takes_no_lock_to_pause_in_a_call_or_with_a_disk_limit) {
  for (const bool is_commit : {false, true}) {
    Collected rows;
    rows.commit_and_drop(4);
    TableLock::Guard guard;
    size_t removed = 0;
    rows.vfs.at_segment = [&] { guard = ++removed == 1 ? rows.table->state.lock.work() : TableLock::Guard(); };
    if (is_commit) {
      rows.table->add_one(range(0, 1));
      rows.table->committer.commit(std::nullopt, "");
    } else {
      rows.table->state.store->disk().set_limit(uint64_t{1} << 40, FileCollector::kNewest, 1000);
      rows.table->collector.collect_in_slices(1, FileCollector::Pace::kPaused);
    }
    CHECK(removed >= 2);
    CHECK(rows.files() == rows.needed());
  }
}

TEST(collector_that_fails_is_tried_again) {
  Collected rows;
  for (int commit = 1; commit <= 4; ++commit) rows.commit();
  rows.vfs.fail_all(Op::kRemove, EIO);
  CHECK_THROWS(rows.collect(), ErrorKind::kSystem, "injected");
  CHECK_THROWS(rows.table->collector.collect_in_slices(), ErrorKind::kSystem, "injected");
  {
    const auto guard = rows.table->state.lock.exclusive();
    rows.table->collector.try_collect();
  }
  CHECK(rows.epochs() == Epochs({0, 1, 2, 3, 4}));
  rows.vfs.heal();
  {
    const auto guard = rows.table->state.lock.exclusive();
    rows.table->collector.try_collect();
  }
  CHECK(rows.epochs() == Epochs({3, 4}));
  CHECK(rows.files() == rows.needed());
}

// For closing: removes segments that no commit names, except those of a run that has not pinned its commits.
TEST(collector_removes_leftovers_of_a_table_that_closes) {
  for (const bool belongs_to_run : {false, true}) {
    for (const bool has_pins : {false, true}) {
      Collected rows(belongs_to_run);
      for (int commit = 1; commit <= 3; ++commit) rows.commit();
      rows.table->add_one(range(0, 50));
      {
        const auto guard = rows.table->state.lock.exclusive();
        rows.table->state.store->flush();
        rows.table->state.store->log()->drain();
        if (has_pins) rows.table->collector.set_pinned({1}, {});
        rows.table->loader.drop_store();
        rows.table->collector.collect_leftovers();
      }
      const bool is_left = belongs_to_run && !has_pins;
      CHECK(rows.epochs() == (is_left ? Epochs({0, 1, 2, 3}) : has_pins ? Epochs({1, 2, 3}) : Epochs({2, 3})));
      std::set<uint64_t> named;
      for (const uint64_t epoch : rows.epochs()) {
        for (const SegmentEntry& entry : Manifests(vfs::posix(), rows.sandbox / "t").load(epoch).segments) {
          named.insert(entry.segment);
        }
      }
      CHECK_EQ(rows.files() == named, !is_left);
    }
  }
}
