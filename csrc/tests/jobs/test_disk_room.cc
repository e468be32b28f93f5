// The limit of what a table's files take (store/disk_budget.cc): never exceeded, and no table that fits is refused.
#include "jobs/disk_room.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/model.h"
#include "tests/parts.h"
#include "tests/sample.h"
#include "tests/sandbox.h"
#include "tests/some_rows.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr int64_t kRows = 20'000;
constexpr uint32_t kDim = 30;  // records of 124 bytes

std::map<std::string, uint64_t> sizes_of_files(const std::string& path) {
  std::map<std::string, uint64_t> sizes;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    std::error_code gone;
    const uint64_t size = entry.file_size(gone);
    if (!gone) sizes[entry.path().filename().string()] = size;
  }
  return sizes;
}

// Counts only files that exist before and after: a concurrent commit may remove a file meanwhile.
uint64_t bytes_of_files(const std::string& path) {
  const auto before = sizes_of_files(path);
  uint64_t bytes = 0;
  for (const auto& [name, size] : sizes_of_files(path)) {
    const auto found = before.find(name);
    if (found != before.end()) bytes += found->second;
  }
  return bytes;
}

TableSpec spec_of(int64_t num_rows = kRows) { return whole_numbers(num_rows, kDim); }

size_t little_ram(const TableSpec& spec) { return minimum_ram(spec, kRows, true); }

std::unique_ptr<Table> open_limited(vfs::Vfs& vfs, const std::string& path, uint64_t disk_bytes) {
  OpenOptions options;
  options.ram_bytes = little_ram(spec_of());
  options.disk_bytes = disk_bytes;
  return Table::open(vfs, path, "t", options);
}

// Returns the smallest limit with which a table of so many rows opens.
uint64_t needed(const std::string& message) {
  const size_t at = message.rfind("disk=");
  if (at == std::string::npos) fail(__FILE__, __LINE__, "no limit is named in: " + message);
  return std::stoull(message.substr(at + 5));
}

uint64_t least_limit(const std::string& path) {
  FaultVfs vfs;
  try {
    (void)open_limited(vfs, path, 1);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kInvalid);
    return needed(error.what());
  }
  fail(__FILE__, __LINE__, "a limit of one byte was taken");
  return 0;
}

struct Trained {
  Rows rows;
  Sampler sampler{7};

  void step(Table* table, size_t n) {
    std::vector<int64_t> ids(n);
    std::vector<float> grads(n);
    for (size_t i = 0; i < n; ++i) {
      ids[i] = static_cast<int64_t>(sampler.bits() % kRows);
      grads[i] = static_cast<float>(1 + sampler.bits() % 4);
    }
    update(table, ids, grads);
    apply(&rows, ids, grads);
  }
  void fill(Table* table) {
    for (int64_t begin = 0; begin < kRows; begin += 1000) {
      std::vector<int64_t> ids(1000);
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = begin + static_cast<int64_t>(i);
      const std::vector<float> grads(ids.size(), 1.0f);
      update(table, ids, grads);
      apply(&rows, ids, grads);
    }
  }
};

// Makes a table with every row committed.
void make_full(vfs::Vfs& vfs, const std::string& path, Trained* trained) {
  const auto table = Table::create(vfs, path, "t", spec_of(), little_ram(spec_of()));
  trained->fill(table.get());
  table->commit(std::nullopt, "");
}

}  // namespace

// With the smallest limit: hundreds of steps with some commits, and the files never exceed it.
TEST(disk_limit_holds_while_training_at_the_smallest_that_opens) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;
  Trained trained;
  make_full(vfs, path, &trained);
  const uint64_t limit = least_limit(path);
  auto table = open_limited(vfs, path, limit);
  uint64_t most = 0;
  for (int step = 0; step < 1200; ++step) {
    trained.step(table.get(), 400);
    if (step % 97 == 96) {
      table->commit(std::nullopt, "");
    } else if (step % 61 == 60) {
      (void)table->begin_commit(std::nullopt, "");
    }
    most = std::max(most, bytes_of_files(path));
    CHECK(bytes_of_files(path) <= limit);
    CHECK(bytes_of_files(path) <= table->stats().disk_bytes + (64u << 10));  // a new manifest is not counted yet
  }
  CHECK(most > limit / 2);  // the files came near the limit
  table->commit(std::nullopt, "");
  check_table_is(table.get(), trained.rows, "trained");
  table.reset();
  table = open_limited(vfs, path, limit);
  check_table_is(table.get(), trained.rows, "opened again");
}

// Without a further commit, all records since the last one are compacted within the limit.
TEST(disk_limit_holds_without_commits) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;
  Trained trained;
  make_full(vfs, path, &trained);
  const Rows committed = trained.rows;
  const uint64_t limit = least_limit(path);
  auto table = open_limited(vfs, path, limit);
  for (int step = 0; step < 800; ++step) {
    trained.step(table.get(), 400);
    CHECK(bytes_of_files(path) <= limit);
    if (step % 7 > 0) continue;
    const uint64_t dirty = table->stats().dirty_rows;
    table->write_dirty();  // optional, and may do nothing
    CHECK_EQ(table->stats().dirty_rows, dirty);
  }
  check_table_is(table.get(), trained.rows, "trained");
  table.reset();  // without a commit
  table = open_limited(vfs, path, limit);
  check_table_is(table.get(), committed, "the last commit");
}

TEST(disk_limit_refuses_rows_it_has_no_room_for_and_changes_nothing) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;
  const TableSpec spec = spec_of(-1);
  auto table = Table::create(vfs, path, "t", spec, 16u << 20, 300u << 20);
  CHECK(table->stats().disk_limit_bytes == 300u << 20);
  Rows rows;
  uint64_t wanted = 0;
  for (int64_t begin = 0; wanted == 0; begin += 5'000) {
    std::vector<int64_t> ids(5'000);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = begin + static_cast<int64_t>(i);
    const std::vector<float> grads(ids.size(), 2.0f);
    try {
      update(table.get(), ids, grads);
      apply(&rows, ids, grads);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kSystem && error.error_number() == ENOSPC);
      wanted = needed(error.what());
    }
    CHECK(bytes_of_files(path) <= 300u << 20);
    if (begin % 50'000 == 0) table->commit(std::nullopt, "");
  }
  CHECK(rows.size() > 20'000);
  CHECK(wanted > 300u << 20);
  const auto first = rows.begin()->first;
  update(table.get(), {first}, {3.0f});  // stored rows can still be trained
  apply(&rows, {first}, {3.0f});
  check_table_is(table.get(), rows, "full");
  table->commit(std::nullopt, "");
  table.reset();
  OpenOptions options;
  options.ram_bytes = 16u << 20;
  options.disk_bytes = wanted;
  table = Table::open(vfs, path, "t", options);
  std::vector<int64_t> ids(5'000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(rows.size() + i);
  update(table.get(), ids, std::vector<float>(ids.size(), 2.0f));  // the update that was refused before
}

TEST(disk_limit_refuses_snapshots_it_has_no_room_for) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;
  Trained trained;
  make_full(vfs, path, &trained);
  const uint64_t limit = least_limit(path) + (4u << 20);  // room for one snapshot
  auto table = open_limited(vfs, path, limit);
  table->commit(std::nullopt, "first");
  uint64_t wanted = 0;
  for (int step = 0; step < 600; ++step) {
    trained.step(table.get(), 400);
    CHECK(bytes_of_files(path) <= limit);
    if (step % 100 != 99) continue;
    try {
      table->commit(std::nullopt, "second");
      fail(__FILE__, __LINE__, "kept without room");
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kSystem && error.error_number() == ENOSPC);
      wanted = needed(error.what());
    }
    table->commit(std::nullopt, "");
  }
  CHECK(table->stats().snapshot_bytes > 2'000'000);
  CHECK(wanted > limit);
  table->drop("first");
  CHECK_EQ(table->stats().snapshot_bytes, 0u);
  table->commit(std::nullopt, "second");
  check_table_is(table.get(), trained.rows, "trained");
  CHECK(bytes_of_files(path) <= limit);
}

// With little room a commit packs the log first, which moves records, even when the commit is then refused. A scan with
// commits between its steps returns every row once, or fails.
TEST(disk_limit_commits_never_hide_rows_from_a_scan) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;
  Trained trained;
  make_full(vfs, path, &trained);
  const uint64_t limit = least_limit(path) + (4u << 20);
  auto table = open_limited(vfs, path, limit);
  table->commit(std::nullopt, "kept");
  int refused = 0;
  for (int round = 0; round < 12; ++round) {
    for (int step = 0; step < 60; ++step) trained.step(table.get(), 400);
    Scan scan(table.get(), {0});
    std::map<int64_t, int> times;
    std::vector<int64_t> ids(512);
    std::vector<float> values(ids.size() * kDim);
    float* const out[] = {values.data()};
    bool is_whole = false;
    try {
      for (int call = 0; !is_whole; ++call) {
        const size_t n = scan.next(ids.size(), ids.data(), out);
        for (size_t i = 0; i < n; ++i) ++times[ids[i]];
        is_whole = n == 0;
        if (call != 3) continue;
        try {
          table->commit("{\"round\": " + std::to_string(round) + "}", round % 2 == 0 ? "more" : "");
        } catch (const Error& error) {
          CHECK(error.error_number() == ENOSPC);
          table->commit(std::nullopt, "");
        }
      }
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find("while it was scanned") != std::string::npos);
      ++refused;
    }
    for (const auto& [id, n] : times) CHECK_EQ(n, 1);
    if (is_whole) CHECK_EQ(times.size(), static_cast<size_t>(kRows));
  }
  CHECK(refused > 0);  // some commits were refused
  check_table_is(table.get(), trained.rows, "scanned");
}

TEST(disk_limit_too_small_for_anything_makes_nothing) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;
  CHECK_THROWS(Table::create(vfs, path, "t", spec_of(), little_ram(spec_of()), 1u << 20), ErrorKind::kInvalid,
               "it needs at least disk=");
  CHECK(!std::filesystem::exists(path));
}

TEST(disk_limit_holds_for_scratch_tables) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;
  TableSpec spec = spec_of();
  spec.is_scratch = true;
  const uint64_t limit = 9u << 20;
  auto table = Table::create(vfs, path, "t", spec, little_ram(spec), limit);
  Trained trained;
  trained.fill(table.get());
  for (int step = 0; step < 300; ++step) {
    trained.step(table.get(), 400);
    CHECK(table->stats().disk_bytes <= limit);
  }
  CHECK(table->stats().compactions > 0);
  check_table_is(table.get(), trained.rows, "trained");
}

// ---- Room on disk without calls of a table

namespace {

OpenOptions limited(const TableSpec& spec, uint64_t disk_bytes, size_t more_ram = 0) {
  OpenOptions options = Parts::with_ram(little_ram(spec) + more_ram);
  options.disk_bytes = disk_bytes;
  return options;
}

// How many bytes has_bytes() allows.
uint64_t bytes_left(DiskBudget* disk) {
  uint64_t left = disk->limit();
  while (left > 0 && !disk->has_bytes(left)) --left;
  return left;
}

}  // namespace

TEST(disk_room_of_a_table_without_a_limit_is_always_there) {
  Parts table(spec_of());
  const std::vector<int64_t> ids = range(0, kRows);
  CHECK(table.disk.has_room_for(ids.data(), ids.size()));
  CHECK(static_cast<bool>(table.disk.lock_for(ids.data(), ids.size())));
  CHECK(static_cast<bool>(table.disk.lock_for_device_cache(size_t{1} << 40)));
  table.disk.require_limit();
  const MemoryPlan plan = table.state.store->plan();
  CHECK_EQ(table.disk.within_limit(plan).fixed_bytes, plan.fixed_bytes);
}

// lock_for() and make_room() check the ids and whether the table can be written.
TEST(disk_room_checks_the_call_that_asks_for_it) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const auto table = new_parts(vfs, sandbox / "t", spec_of(), limited(spec_of(), 16u << 20));
  const std::vector<int64_t> ids{5, 6, kRows};
  CHECK_THROWS((void)table->disk.lock_for(ids.data(), 3), ErrorKind::kIndex, "id 20000 at position 2");
  CHECK_THROWS(table->disk.make_room(ids.data(), 3), ErrorKind::kIndex, "id 20000 at position 2");
  table->state.read_only_reason = "a sync failed";
  CHECK_THROWS((void)table->disk.lock_for(ids.data(), 2), ErrorKind::kReadOnly, "a sync failed");
  CHECK_THROWS(table->disk.make_room(ids.data(), 2), ErrorKind::kReadOnly, "a sync failed");
  CHECK_THROWS((void)table->disk.lock_for_device_cache(1), ErrorKind::kReadOnly, "a sync failed");
  table->state.read_only_reason.clear();
  CHECK(static_cast<bool>(table->disk.lock_for(ids.data(), 2)));
}

// A device cache may write back all its rows at once, at most all rows of the table.
TEST(disk_room_for_a_device_cache_is_there_or_named) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const auto table = new_parts(vfs, sandbox / "t", spec_of(), limited(spec_of(), 10u << 20));
  DiskBudget& disk = table->state.store->disk();
  const uint64_t before = bytes_left(&disk);
  {
    const auto guard = table->disk.lock_for_device_cache(1000);
  }
  CHECK(bytes_left(&disk) < before - 1000 * kDim * sizeof(float));  // they count as admitted
  disk.forget_admitted();
  {
    const auto guard = table->disk.lock_for_device_cache(size_t{1} << 40);  // of 20,000 rows
  }
  disk.forget_admitted();
  disk.set_limit(5u << 20, 1, kRows);
  CHECK_THROWS((void)table->disk.lock_for_device_cache(kRows), ErrorKind::kSystem,
               "no room for the 20000 rows of a device cache within disk=5242880; make the cache smaller");
  CHECK_EQ(bytes_left(&disk), before - (5u << 20));  // nothing is admitted
  const auto guard = table->state.lock.exclusive();  // and the lock is free
}

// A change of other rows must leave the disk that is reserved for the rows of a device cache.
TEST(disk_room_leaves_what_is_reserved_for_the_device_cache) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const auto table = new_parts(vfs, sandbox / "t", spec_of(), limited(spec_of(), 10u << 20));
  const std::vector<int64_t> ids = range(0, 8000);
  CHECK(table->disk.has_room_for(ids.data(), ids.size()));
  table->state.store->disk().forget_admitted();
  const auto cache = std::make_shared<SomeRows>();
  cache->most = 15'000;
  table->device.attach(cache, nullptr);
  const std::string stored = "those of its device cache included, are more than its limit of disk=10485760 bytes";
  CHECK_THROWS((void)table->disk.has_room_for(ids.data(), ids.size()), ErrorKind::kSystem, stored);
  CHECK_THROWS((void)table->disk.lock_for(ids.data(), ids.size()), ErrorKind::kSystem, stored);
  const auto guard = table->state.lock.exclusive();
}

// The slack grows with the chunks, and the chunks grow with RAM. Rows are refused only when smaller chunks do not help.
TEST(disk_room_comes_from_smaller_chunks_first) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const TableSpec spec = spec_of();
  const auto table = new_parts(vfs, sandbox / "t", spec, limited(spec, 32u << 20, 64u << 20));
  DiskBudget& disk = table->state.store->disk();
  const size_t stride = table->state.store->log()->stride();
  const MemoryPlan large = table->state.store->plan();
  CHECK(large.log.chunk_bytes > 8 * smallest_chunk_bytes(stride));
  LogMemory small = large.log;
  small.chunk_bytes = smallest_chunk_bytes(stride);
  table->add_one(range(0, 1000));
  const std::vector<int64_t> ids = range(1000, 2000);
  disk.set_limit(disk.needed_with(small, 2000) + 100'000, 1, kRows);
  CHECK(disk.rows_beyond(ids.data(), ids.size()) > 0);
  table->disk.make_room(ids.data(), ids.size());
  CHECK_EQ(disk.rows_beyond(ids.data(), ids.size()), uint64_t{0});
  const MemoryPlan& now = table->state.store->plan();
  CHECK(now.log.chunk_bytes < large.log.chunk_bytes);
  CHECK_EQ(now.total_bytes, large.total_bytes);
  CHECK_EQ(large.fixed_bytes - now.fixed_bytes, large.log.total(stride) - now.log.total(stride));
  CHECK_EQ(table->state.store->log()->memory().chunk_bytes, now.log.chunk_bytes);
  table->add_one(ids);
  CHECK_EQ(table->value(1500), 1.0f);
  CHECK_EQ(table->value(500), 1.0f);
  // A plan for more RAM keeps the small chunks.
  const MemoryPlan kept = table->disk.within_limit(large);
  CHECK_EQ(kept.log.chunk_bytes, now.log.chunk_bytes);
  CHECK_EQ(kept.fixed_bytes, now.fixed_bytes);
  table->state.store->apply(kept);
  disk.set_limit(1u << 30, 1, kRows);
  CHECK_EQ(table->disk.within_limit(large).log.chunk_bytes, large.log.chunk_bytes);
}

// With less RAM, chunks are smaller and records pack less tightly in them. A plan that would need more disk than the
// limit is refused.
TEST(disk_room_refuses_a_plan_that_needs_more_disk) {
  const Sandbox sandbox;
  FaultVfs vfs;
  TableSpec spec = whole_numbers(kRows, 1500);  // two or three records in a small chunk
  const OpenOptions options = limited(spec, 600u << 20, 64u << 20);
  const auto table = new_parts(vfs, sandbox / "t", spec, options);
  DiskBudget& disk = table->state.store->disk();
  MemoryPlan small = table->state.store->plan();
  small.log.chunk_bytes = smallest_chunk_bytes(table->state.store->log()->stride());
  std::vector<int64_t> rows = range(0, 4000);
  table->add_one(rows);
  const uint64_t with_large = disk.needed(4000), with_small = disk.needed_with(small.log, 4000);
  CHECK(with_large + 1 < with_small);
  disk.set_limit(with_small - 1, 1, kRows);
  CHECK_THROWS((void)table->disk.within_limit(small), ErrorKind::kInvalid,
               "its writes are so small that its limit of disk=" + std::to_string(with_small - 1) +
                   " bytes is too small; it would need disk=" + std::to_string(with_small));
  disk.set_limit(with_small, 1, kRows);
  CHECK_EQ(table->disk.within_limit(small).log.chunk_bytes, small.log.chunk_bytes);
}

// Large `meta=` counts against the limit while a commit has it.
TEST(disk_room_of_a_commit_counts_its_meta) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const auto table = new_parts(vfs, sandbox / "t", spec_of(), limited(spec_of(), 16u << 20));
  DiskBudget& disk = table->state.store->disk();
  table->add_one(range(0, 1000));
  const uint64_t before = disk.needed(1000);
  const std::string little(16u << 10, 'm'), much(200u << 10, 'm');
  table->disk.make_commit_fit(little, "");
  CHECK_EQ(disk.needed(1000), before);
  table->disk.make_commit_fit(much, "");
  CHECK_EQ(disk.needed(1000), before + 2 * (much.size() - little.size()));  // of this commit and the one before
  table->disk.make_commit_fit(little, "");
  CHECK_EQ(disk.needed(1000), before);
  disk.set_limit(before, 1, kRows);
  CHECK_THROWS(table->disk.make_commit_fit(much, ""), ErrorKind::kSystem,
               "204800 bytes of meta= leave too little of disk=" + std::to_string(before) + " bytes");
  CHECK_EQ(disk.needed(1000), before);  // the commit that was refused takes nothing
  table->state.committed.meta = much;   // the last commit has it: it is there, and may be again
  table->disk.make_commit_fit(much, "");
}

TEST(disk_room_to_keep_a_commit_is_there_or_named) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const auto table = new_parts(vfs, sandbox / "t", spec_of(), limited(spec_of(), 16u << 20));
  DiskBudget& disk = table->state.store->disk();
  table->add_one(range(0, 3000));
  const uint64_t to_keep = disk.needed_to_keep();
  disk.set_limit(to_keep, 1, kRows);
  table->disk.make_commit_fit("{}", "kept");
  disk.set_limit(to_keep - 20'000, 1, kRows);
  CHECK_THROWS(table->disk.make_commit_fit("{}", "kept"), ErrorKind::kSystem,
               "keeping 'kept' would leave too little of disk=");
  table->disk.make_commit_fit("{}", "");
}

TEST(disk_room_of_an_opening_is_required) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const auto table = new_parts(vfs, sandbox / "t", spec_of(), limited(spec_of(), 16u << 20));
  DiskBudget& disk = table->state.store->disk();
  table->add_one(range(0, 3000));
  table->state.store->flush();
  const uint64_t needed_now = disk.needed_now();
  disk.set_limit(needed_now, 1, kRows);
  table->disk.require_limit();
  disk.set_limit(needed_now - 1, 1, kRows);
  const std::string text = "disk=" + std::to_string(needed_now - 1) + " bytes is too small for 3000 stored rows in " +
                           std::to_string(disk.log_bytes()) + " bytes of files";
  CHECK_THROWS(table->disk.require_limit(), ErrorKind::kInvalid, text);
  CHECK_THROWS(table->disk.require_limit(), ErrorKind::kInvalid,
               "it needs at least disk=" + std::to_string(needed_now));
}
