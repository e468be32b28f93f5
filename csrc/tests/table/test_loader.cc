// refresh() of readers: it gives the same rows as opening again, and costs as much as the changes.
#include "table/loader.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "format/format.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/parts.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

std::vector<int64_t> some_ids(Sampler* sampler, size_t most, int64_t range) {
  std::vector<int64_t> ids(1 + sampler->bits() % most);
  for (int64_t& id : ids) id = static_cast<int64_t>(sampler->bits() % static_cast<uint64_t>(range));
  return ids;
}

void train(Table* table, Rows* rows, Sampler* sampler, size_t most, int64_t range) {
  const std::vector<int64_t> ids = some_ids(sampler, most, range);
  std::vector<float> grads(ids.size());
  for (float& grad : grads) grad = static_cast<float>(static_cast<int>(sampler->bits() % 3) - 1);
  update(table, ids, grads);
  apply(rows, ids, grads);
}

void look(Table* table, const Rows& rows, Sampler* sampler, int64_t range, const std::string& when) {
  const std::vector<int64_t> ids = some_ids(sampler, 300, range);
  std::vector<float> values(ids.size() * table->spec().dim);
  table->lookup(ids.data(), ids.size(), true, values.data());
  check_values(rows, ids, values, table->spec().dim, when);
}

// Random commits, some in the background, compaction, snapshots that are kept, dropped and rewound to, sessions that
// die, and a reader that refreshes at random.
void follows(const TableSpec& spec, int64_t range, uint64_t seed, size_t ram_factor) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, static_cast<uint64_t>(range), true);
  auto table = Table::create(vfs, path, "t", spec, ram * ram_factor);
  Sampler sampler(seed);
  Rows rows, committed, seen;
  std::map<std::string, Rows> kept;
  const auto commit = [&](const std::string& keep) {
    if (sampler.bits() % 2 == 0) {
      table->commit(std::nullopt, keep);
      committed = rows;
      return;
    }
    const auto pending = table->begin_commit(std::nullopt, keep);
    committed = rows;
    // Meanwhile rows that the commit has not written yet change and are evicted.
    for (int step = 0; step < 3; ++step) train(table.get(), &rows, &sampler, 200, range);
    pending->wait();
  };
  commit("");
  const size_t readers_ram = ram * 2;
  auto reader = open_table(vfs, path, readers_ram, false);
  uint64_t refreshes = 0, cheap = 0;
  for (int round = 0; round < 250; ++round) {
    const std::string when = "round " + std::to_string(round);
    const uint64_t what = sampler.bits() % 32;
    if (what < 10) {
      train(table.get(), &rows, &sampler, 200, range);
    } else if (what < 16) {
      commit("");
    } else if (what < 24) {
      const uint64_t before = reader->stats().indexed_records;
      reader->refresh();
      seen = committed;
      CHECK_EQ(reader->stats().stored_rows, seen.size());
      if (sampler.bits() % 4 == 0) check_table_is(reader.get(), seen, when);
      const uint64_t cost = reader->stats().indexed_records - before;
      ++refreshes;
      cheap += cost < seen.size() / 2;
    } else if (what == 24) {
      (void)table->compact();
      if (sampler.bits() % 2 == 0) commit("");
    } else if (what == 25) {
      const std::string name = "s" + std::to_string(sampler.bits() % 3);
      commit(name);
      kept[name] = committed;
    } else if (what == 26 && !kept.empty()) {
      const auto chosen = std::next(kept.begin(), static_cast<ptrdiff_t>(sampler.bits() % kept.size()));
      if (sampler.bits() % 2 == 0) {
        table->drop(chosen->first);
        kept.erase(chosen);
      } else {
        table->rewind(chosen->first, std::nullopt);
        rows = committed = chosen->second;
      }
    } else if (what == 27) {
      table.reset();  // uncommitted changes are lost
      rows = committed;
      table = open_table(vfs, path, ram * ram_factor);
    } else {
      look(reader.get(), seen, &sampler, range, when);
    }
  }
  CHECK(refreshes > 20 && cheap > 5);
  reader->refresh();
  check_table_is(reader.get(), committed, "at the end");
}

}  // namespace

TEST(refresh_follows_a_flat_table) {
  for (uint64_t seed = 1; seed <= 3; ++seed) follows(whole_numbers(1500, 24), 1500, seed, 1);
  follows(whole_numbers(1500, 24), 1500, 4, 8);
}

TEST(refresh_follows_a_bounded_table) {
  for (uint64_t seed = 21; seed <= 23; ++seed) follows(whole_numbers(60'000, 24), 4000, seed, 1);
}

TEST(refresh_follows_a_hashed_table) {
  for (uint64_t seed = 11; seed <= 13; ++seed) follows(whole_numbers(-1, 24), 4000, seed, 1);
}

namespace {

// Throws std::bad_alloc for the `at`-th open or read of a file from now on, and for all later ones.
class PoorVfs final : public FaultVfs {
 public:
  void run_out_at(int at) { left_ = at; }
  bool is_poor() const { return is_poor_; }
  void recover() {
    left_ = -1;
    is_poor_ = false;
  }
  std::shared_ptr<vfs::File> open(const std::string& path, bool direct) override {
    spend();
    return std::make_shared<PoorFile>(this, FaultVfs::open(path, direct));
  }

 private:
  class PoorFile final : public vfs::File {
   public:
    PoorFile(PoorVfs* owner, std::shared_ptr<vfs::File> below) : owner_(owner), below_(std::move(below)) {}
    void read(void* data, size_t n, uint64_t offset) override {
      owner_->spend();
      below_->read(data, n, offset);
    }
    void write(const void* data, size_t n, uint64_t offset) override { below_->write(data, n, offset); }
    void sync() override { below_->sync(); }
    uint64_t size() override { return below_->size(); }
    uint32_t read_alignment() const override { return below_->read_alignment(); }
    const std::string& path() const override { return below_->path(); }
    bool is_at(const std::string& path) override { return below_->is_at(path); }

   private:
    PoorVfs* owner_;
    std::shared_ptr<vfs::File> below_;
  };
  void spend() {
    if (left_ > 0 && --left_ == 0) is_poor_ = true;
    if (is_poor_) throw std::bad_alloc();
  }
  std::atomic<int> left_{-1};
  std::atomic<bool> is_poor_{false};
};

}  // namespace

// When memory runs out at any point, the reader has its old commit or fails, and a later refresh() succeeds.
TEST(refresh_without_memory_can_be_tried_again) {
  const TableSpec spec = whole_numbers(600, 40);
  const Sandbox sandbox;
  PoorVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, 0, true) * 2;
  auto table = Table::create(vfs, path, "t", spec, ram);
  Rows rows, seen;
  Sampler sampler(5);
  size_t refused = 0, stayed = 0;
  for (int at = 1;; ++at) {
    auto reader = open_table(vfs, path, ram, false);
    seen = rows;
    for (int step = 0; step < 6; ++step) train(table.get(), &rows, &sampler, 200, spec.num_rows);
    table->commit(std::nullopt, "");
    const std::string when = "out of memory at " + std::to_string(at);
    vfs.run_out_at(at);
    bool is_out = false;
    try {
      reader->refresh();
    } catch (const std::bad_alloc&) {
      is_out = true;
    }
    const bool was_poor = vfs.is_poor();
    vfs.recover();
    if (is_out) {
      const int64_t id = 0;
      std::vector<float> values(spec.dim);
      bool refuses = false;
      try {
        reader->lookup(&id, 1, true, values.data());
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kBroken);
        CHECK(std::string(error.what()).find("refresh() tries again") != std::string::npos);
        refuses = true;
      }
      if (!refuses) check_table_is(reader.get(), seen, when);
      refused += refuses;
      stayed += !refuses;
      reader->refresh();
    }
    check_table_is(reader.get(), rows, when + ", then refreshed");
    CHECK_EQ(reader->epoch(), table->epoch());
    if (!was_poor) break;
  }
  CHECK(stayed > 0 && refused > 0);
}

// refresh() replays only the changed rows, however large the table is.
TEST(refresh_costs_what_changed) {
  for (const int64_t num_rows : {5000, 40000}) {
    const TableSpec spec = whole_numbers(num_rows, 8);
    const Sandbox sandbox;
    FaultVfs vfs;
    auto table = Table::create(vfs, sandbox / "t", "t", spec, 16u << 20);
    Rows rows;
    std::vector<int64_t> all;
    for (int64_t id = 0; id < num_rows; ++id) all.push_back(id);
    const std::vector<float> ones(all.size(), 1.0f);
    update(table.get(), all, ones);
    apply(&rows, all, ones);
    table->commit(std::nullopt, "");
    const auto reader = open_table(vfs, sandbox / "t", 16u << 20, false);
    CHECK_EQ(reader->stats().indexed_records, static_cast<uint64_t>(num_rows));
    std::vector<float> values(all.size() * spec.dim);
    reader->lookup(all.data(), all.size(), true, values.data());  // frames of every row
    uint64_t expected = static_cast<uint64_t>(num_rows);
    for (const size_t changed : {1u, 30u, 700u}) {
      const std::vector<int64_t> some(all.begin() + 100, all.begin() + 100 + static_cast<ptrdiff_t>(changed));
      update(table.get(), some, ones);
      apply(&rows, some, ones);
      table->commit(std::nullopt, "");
      reader->refresh();
      expected += changed;
      CHECK_EQ(reader->stats().indexed_records, expected);
      CHECK_EQ(reader->stats().frames, all.size() - changed);  // the other rows keep their frames
      check_table_is(reader.get(), rows, "after " + std::to_string(changed));
    }
    const uint64_t epoch = reader->epoch();
    CHECK_EQ(reader->refresh(), epoch);
    CHECK_EQ(reader->stats().indexed_records, expected);
  }
}

// A run that died takes back a commit that it had not named: its numbers of commits, segments and versions are used
// again.
TEST(refresh_after_commits_were_taken_back) {
  const TableSpec spec = whole_numbers(400, 40);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, 0, true) * 2;
  Rows rows;
  std::vector<int64_t> all;
  for (int64_t id = 0; id < spec.num_rows; ++id) all.push_back(id);
  const auto commit = [&](Table* table, float grad, size_t n) {
    const std::vector<int64_t> ids(all.begin(), all.begin() + static_cast<ptrdiff_t>(n));
    const std::vector<float> grads(n, grad);
    update(table, ids, grads);
    apply(&rows, ids, grads);
    return table->commit(std::nullopt, "");
  };
  auto table = Table::create(vfs, path, "t", spec, ram);
  for (const int more : {0, 1}) {
    const uint64_t first = commit(table.get(), 1.0f, all.size());
    const Rows named = rows;
    const uint64_t second = commit(table.get(), 2.0f, all.size());
    const auto reader = open_table(vfs, path, ram, false);
    check_table_is(reader.get(), rows, "before");
    table.reset();
    OpenOptions options;
    options.ram_bytes = ram;
    options.epoch = first;
    table = Table::open(vfs, path, "t", options);
    rows = named;
    CHECK_EQ(commit(table.get(), 3.0f, all.size()), second);
    if (more == 1) commit(table.get(), 4.0f, all.size() / 2);  // the files of the commit before are still named
    reader->refresh();
    check_table_is(reader.get(), rows, "after");
  }
}

// A rewind may add segments again that were dropped since. A record in a segment that stayed may be newer than theirs.
// Or it adds none, and the segments that are dropped have rows.
TEST(refresh_after_going_back) {
  const TableSpec spec = whole_numbers(40, 40);
  for (const bool brings_some : {true, false}) {
    const Sandbox sandbox;
    FaultVfs vfs;
    const std::string path = sandbox / "t";
    const size_t ram = minimum_ram(spec, 0, true) * 2;
    auto table = Table::create(vfs, path, "t", spec, ram);
    std::vector<int64_t> a, b;
    for (int64_t id = 0; id < 20; ++id) a.push_back(id);
    for (int64_t id = 20; id < 40; ++id) b.push_back(id);
    const std::vector<float> ones(20, 1.0f);
    Rows rows;
    const auto train = [&](const std::vector<int64_t>& ids) {
      update(table.get(), ids, ones);
      apply(&rows, ids, ones);
    };
    train(a);
    train(b);
    table->commit(std::nullopt, "");
    if (brings_some) train(a);
    table->commit("{\"back\":1}", "s");
    const Rows kept = rows;
    train(b);
    table->commit(std::nullopt, "");
    const auto reader = open_table(vfs, path, ram, false);
    table->rewind("s", std::nullopt);
    reader->refresh();
    check_table_is(reader.get(), kept, "gone back");
  }
}

// A reader of a run moves to the commit that the run names, forward or back, not to the newest one. One of a snapshot
// moves with the name. A commit that is gone changes nothing.
TEST(refresh_to_a_commit) {
  const TableSpec spec = whole_numbers(40, 40);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, 0, true) * 2;
  auto table = Table::create(vfs, path, "t", spec, ram);
  const std::vector<int64_t> ids{1, 2, 3};
  std::vector<Rows> at(1);  // rows by commit
  const auto commit = [&](const std::string& keep) {
    Rows rows = at.back();
    const std::vector<float> ones(ids.size(), 1.0f);
    update(table.get(), ids, ones);
    apply(&rows, ids, ones);
    at.push_back(rows);
    CHECK_EQ(table->commit(std::nullopt, keep), at.size() - 1);
  };
  commit("named");
  const auto reader = open_table(vfs, path, ram, false);
  OpenOptions options;
  options.ram_bytes = ram;
  options.writable = false;
  options.snapshot = "named";
  const auto follower = Table::open(vfs, path, "t", options);
  commit("kept");
  commit("");
  CHECK_EQ(reader->refresh(2), 2u);
  check_table_is(reader.get(), at[2], "a commit forward");
  CHECK_EQ(reader->refresh(1), 1u);
  check_table_is(reader.get(), at[1], "a commit back");
  CHECK_EQ(reader->refresh(), 3u);
  CHECK_EQ(follower->refresh(), 1u);
  commit("named");
  CHECK_EQ(follower->refresh(), 4u);
  check_table_is(follower.get(), at[4], "the name moved");
  CHECK_THROWS(reader->refresh(9), ErrorKind::kNotFound, "9");
  check_table_is(reader.get(), at[3], "the commit is not there");
}

// After an error half way, the table does not return rows of two commits.
TEST(refresh_that_fails) {
  const TableSpec spec = whole_numbers(400, 40);
  const Sandbox sandbox;
  FaultVfs vfs;
  const std::string path = sandbox / "t";
  const size_t ram = minimum_ram(spec, 0, true) * 2;
  auto table = Table::create(vfs, path, "t", spec, ram);
  std::vector<int64_t> all;
  for (int64_t id = 0; id < spec.num_rows; ++id) all.push_back(id);
  const std::vector<float> ones(all.size(), 1.0f);
  update(table.get(), all, ones);
  table->commit(std::nullopt, "");
  const auto reader = open_table(vfs, path, ram, false);
  update(table.get(), all, ones);
  table->commit(std::nullopt, "");
  table.reset();
  std::string last;
  for (const std::string& name : vfs.list(path)) {
    uint64_t number;
    if (parse_name(name, "segment-", &number)) last = path + "/" + name;
  }
  // A byte of the last chunk's index.
  const auto file = vfs::posix().open(last, false);
  const uint64_t size = file->size();
  std::vector<std::byte> bytes(size);
  file->read(bytes.data(), size, 0);
  uint64_t index;
  std::memcpy(&index, bytes.data() + size - kChunkTrailerBytes + 56, sizeof(index));
  bytes[index] ^= std::byte{1};
  vfs::posix().remove(last);
  vfs::posix().create_small(last)->write(bytes.data(), size, 0);
  CHECK_THROWS(reader->refresh(), ErrorKind::kCorruption, "fails its checksum");
  std::vector<float> values(all.size() * spec.dim);
  CHECK_THROWS(reader->lookup(all.data(), all.size(), true, values.data()), ErrorKind::kBroken,
               "moving to a newer commit");
}

// A reader lists the directory, and the writer then collects a commit before the reader opens it.
TEST(refresh_and_opening_look_again_where_a_listed_commit_is_gone) {
  class Stale final : public FaultVfs {
   public:
    std::vector<std::string> list(const std::string& path) override {
      return stale.empty() ? FaultVfs::list(path) : std::exchange(stale, {});
    }
    std::vector<std::string> stale;  // the result of the next listing
  };
  const Sandbox sandbox;
  Stale vfs;
  const TableSpec spec = whole_numbers(100, 4);
  const auto table = Table::create(vfs, sandbox / "t", "t", spec, minimum_ram(spec, 0, true));
  std::vector<std::string> before;
  for (int commit = 0; commit < 4; ++commit) {
    update(table.get(), {1}, {1.0f});
    table->commit(std::nullopt, "a");
    if (commit == 0) before = vfs.list(sandbox / "t");
  }
  const Manifests manifests(vfs, sandbox / "t");
  vfs.stale = before;
  CHECK_EQ(manifests.load_snapshot("a").epoch, table->epoch());
  vfs.stale = before;
  CHECK_EQ(manifests.load_newest().epoch, table->epoch());
  vfs.stale = before;
  CHECK_EQ(manifests.snapshots().size(), size_t{1});
  CHECK_EQ(vfs.stale.size(), size_t{0});
}

// ---- The loader by itself

TEST(loader_starts_a_table_in_ram_without_rows) {
  TableSpec spec = whole_numbers(100, 4);
  spec.optimizer.kind = OptimizerKind::kAdagrad;
  const Parts table(spec);
  CHECK_EQ(table.state.committed.epoch, uint64_t{0});
  CHECK(table.state.committed.optimizer == spec.optimizer);
  CHECK(table.state.fields == fields_of(spec));
  CHECK_EQ(table.state.payload_bytes, size_t{32});
  CHECK_EQ(table.state.weight_bytes, size_t{16});
  CHECK(table.state.store->log() == nullptr);
  CHECK_EQ(table.state.store->directory().stored_rows(), size_t{0});
}

TEST(loader_makes_another_store_in_place_of_one_that_it_dropped) {
  Parts table(whole_numbers(100, 4));
  table.add_one({1, 2});
  {
    const auto guard = table.state.lock.exclusive();
    table.loader.drop_store();
    CHECK(table.state.store == nullptr);
    table.loader.make_store_in_ram();
  }
  CHECK_EQ(table.state.store->directory().stored_rows(), size_t{0});
  CHECK_EQ(table.value(1), 0.0f);
  table.add_one({1});
  CHECK_EQ(table.value(1), 1.0f);
}

// A reader keeps weights in RAM and no slots.
TEST(loader_gives_readers_frames_of_weights) {
  const Sandbox sandbox;
  FaultVfs vfs;
  TableSpec spec = whole_numbers(-1, 4);
  spec.optimizer.kind = OptimizerKind::kAdagrad;
  OpenOptions options = Parts::with_ram(size_t{4} << 20);
  auto table = new_parts(vfs, sandbox / "t", spec, options);
  CHECK_EQ(table->state.store->frame_bytes(), table->state.payload_bytes);
  CHECK(table->state.store->directory().grows());
  options.writable = false;
  const Parts reader(vfs, sandbox / "t", spec, options);
  CHECK_EQ(reader.state.store->frame_bytes(), reader.state.weight_bytes);
}

// The limit of the files counts the commits that exist at once: the last one, three of a run, none of a scratch table.
TEST(loader_tells_the_limit_how_many_commits_there_are) {
  std::vector<uint64_t> for_rows;
  for (const bool of_run : {false, true}) {
    const Sandbox sandbox;
    FaultVfs vfs;
    TableSpec spec = whole_numbers(1000, 4);
    spec.belongs_to_run = of_run;
    OpenOptions options = Parts::with_ram(size_t{4} << 20);
    options.through_run = of_run;
    options.disk_bytes = 64u << 20;
    const auto table = new_parts(vfs, sandbox / "t", spec, options);
    const DiskBudget& disk = table->state.store->disk();
    CHECK_EQ(disk.limit(), uint64_t{64u << 20});
    const uint64_t snapshots = 2 * (DiskBudget::index_snapshot_estimate(1000) - DiskBudget::index_snapshot_estimate(0));
    for_rows.push_back(disk.needed(1000) - disk.needed(0) - snapshots);
  }
  CHECK_EQ(2 * for_rows[0], for_rows[1]);  // the same rows (1 + 1) times, and (3 + 1) times
}

TEST(loader_refuses_records_of_another_layout) {
  const Sandbox sandbox;
  FaultVfs vfs;
  TableSpec spec = whole_numbers(100, 4);
  const OpenOptions options = Parts::with_ram(size_t{4} << 20);
  new_parts(vfs, sandbox / "t", spec, options).reset();
  spec.optimizer.kind = OptimizerKind::kAdam;
  CHECK_THROWS(Parts(vfs, sandbox / "t", spec, options), ErrorKind::kFormat,
               "its record holds fields this release does not know");
}

TEST(loader_refuses_a_commit_that_names_other_rows) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const TableSpec spec = whole_numbers(100, 4);
  const OpenOptions options = Parts::with_ram(size_t{4} << 20);
  auto table = new_parts(vfs, sandbox / "t", spec, options);
  table->add_one({1, 2, 3});
  table->committer.commit(std::nullopt, "");
  Manifest manifest = table->state.committed;
  const auto guard = table->state.lock.exclusive();
  ++manifest.stored_rows;
  CHECK_THROWS(table->loader.load(manifest), ErrorKind::kCorruption, "its segments hold 3 rows, the commit names 4");
  --manifest.stored_rows;
  table->loader.load(manifest);
  CHECK_EQ(table->state.store->directory().stored_rows(), size_t{3});
  CHECK_EQ(table->state.store->log()->epoch(), manifest.epoch + 1);
}

// A session that died left segments. A limited table removes them first: their numbers are not used again.
TEST(loader_of_a_limited_table_removes_leftovers_and_spares_their_numbers) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const TableSpec spec = whole_numbers(100, 4);
  OpenOptions options = Parts::with_ram(size_t{4} << 20);
  options.disk_bytes = 64u << 20;
  auto table = new_parts(vfs, sandbox / "t", spec, options);
  table->add_one({1});
  table->committer.commit(std::nullopt, "");
  table.reset();
  const std::string left = sandbox / ("t/" + segment_name(50));
  vfs.create_small(left);
  table = std::make_unique<Parts>(vfs, sandbox / "t", spec, options);
  CHECK(!vfs.exists(left));
  CHECK_EQ(table->state.store->log()->next_segment(), uint64_t{51});
  CHECK_EQ(table->value(1), 1.0f);
}
