// The device cache as the table sees it: which calls fail while it holds rows, and what is reserved for it.
#include "state/device_link.h"

#include <algorithm>
#include <cerrno>
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

constexpr int64_t kRows = 100;
constexpr int64_t kManyRows = 100'000;

size_t smallest_ram(const TableSpec& spec) { return minimum_ram(spec, kRows, true); }

OpenOptions limited(const TableSpec& spec, uint64_t disk_bytes) {
  OpenOptions options = Parts::with_ram(smallest_ram(spec));
  options.disk_bytes = disk_bytes;
  return options;
}

// The number after `label`, for example "ram=", in a message.
uint64_t named(const std::string& message, const std::string& label) {
  const size_t at = message.rfind(label);
  if (at == std::string::npos) fail(__FILE__, __LINE__, "no " + label + " in: " + message);
  return std::stoull(message.substr(at + label.size()));
}

}  // namespace

TEST(device_link_without_a_cache_holds_nothing) {
  Parts table(whole_numbers(kRows, 4));
  const std::vector<int64_t> ids{1, 2, 3};
  DeviceLink& link = table.device;
  CHECK(!link.is_attached());
  CHECK_EQ(link.num_held(), size_t{0});
  CHECK_EQ(link.max_rows(), size_t{0});
  CHECK(!link.is_held(1));
  // Also for n = 0: without a cache no row is on its way.
  for (const size_t n : {size_t{0}, ids.size()}) {
    CHECK(!link.is_write_back(ids.data(), n));
    CHECK(!link.are_reserved(ids.data(), n));
  }
  link.check_not_held(ids.data(), ids.size());
  link.release_for_change(ids.data(), ids.size());
  link.arrived(ids.data(), ids.size());
  link.require_not_in_use();
  link.give_up_all();
  link.require_disk(ids.data(), ids.size());
  link.require_directory(ids.data(), ids.size());
  int taken = 0;
  const auto guard = link.lock_written_back([&] {
    ++taken;
    return table.state.lock.work();
  });
  CHECK(static_cast<bool>(guard));
  CHECK_EQ(taken, 1);
}

TEST(device_link_takes_one_cache_at_a_time_and_gives_it_back) {
  Parts table(whole_numbers(kRows, 4));
  const auto first = std::make_shared<SomeRows>(), second = std::make_shared<SomeRows>();
  second->most = 20;
  int asked = 0;
  table.device.attach(first, [&] { ++asked; });
  CHECK(table.device.is_attached());
  CHECK_THROWS(table.device.attach(second, [] {}), ErrorKind::kInvalid, "table 't' has a device cache already");
  CHECK_EQ(table.device.max_rows(), size_t{10});
  std::shared_ptr<DeviceCache> cache;
  std::function<void()> write_back;
  table.device.detach(&cache, &write_back);
  CHECK(cache == first);
  write_back();
  CHECK_EQ(asked, 1);
  CHECK(!table.device.is_attached());
  CHECK_EQ(table.device.max_rows(), size_t{0});
  first->held = {1};
  CHECK_EQ(table.device.num_held(), size_t{0});
  table.device.attach(second, [] {});
  CHECK_EQ(table.device.max_rows(), size_t{20});
  table.device.detach(&cache, &write_back);
  CHECK(cache == second);
  table.device.detach(&cache, &write_back);  // nothing is attached
  CHECK(cache != second && write_back == nullptr);
}

// Attaching a cache reserves disk for its rows, detaching it frees that, also when the table has no store.
TEST(device_link_reserves_disk_for_the_rows_of_the_cache) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const TableSpec spec = whole_numbers(kManyRows, 4);
  const auto table = new_parts(vfs, sandbox / "t", spec, limited(spec, 5u << 20));
  uint64_t free_bytes = 0;
  while (table->state.store->disk().has_bytes(free_bytes + 1024)) free_bytes += 1024;
  CHECK(free_bytes > 100'000);
  const auto cache = std::make_shared<SomeRows>();
  cache->most = 1000;
  std::shared_ptr<DeviceCache> taken;
  std::function<void()> write_back;
  for (int time = 0; time < 2; ++time) {
    CHECK(table->state.store->disk().has_bytes(free_bytes));
    table->device.attach(cache, [] {});
    CHECK(!table->state.store->disk().has_bytes(free_bytes - 1000 * 20));
    table->device.detach(&taken, &write_back);
  }
  CHECK(table->state.store->disk().has_bytes(free_bytes));
  table->device.attach(cache, [] {});
  table->loader.drop_store();
  table->device.detach(&taken, &write_back);
  CHECK(taken == cache);
}

TEST(device_link_refuses_rows_that_are_held) {
  Parts table(whole_numbers(kRows, 4));
  const auto cache = std::make_shared<SomeRows>();
  table.device.attach(cache, [] {});
  cache->held = {7, 9};
  const std::vector<int64_t> ids{3, 9, 5, 7};
  CHECK(table.device.is_held(9) && !table.device.is_held(3));
  CHECK_EQ(table.device.num_held(), size_t{2});
  table.device.check_not_held(ids.data(), 1);
  CHECK_THROWS(table.device.check_not_held(ids.data(), 4), ErrorKind::kBroken,
               "table 't': id 9 at position 1 is held by a device cache, which has its newest value");
  CHECK_THROWS(table.device.check_not_held(ids.data() + 2, 2), ErrorKind::kBroken, "id 7 at position 1 is held");
  CHECK_THROWS(table.device.release_for_change(ids.data(), 4), ErrorKind::kBroken, "id 9 at position 1 is held");
  CHECK(cache->dropped.empty());
}

TEST(device_link_drops_copies_of_rows_that_change_unless_they_are_in_use) {
  Parts table(whole_numbers(kRows, 4));
  const auto cache = std::make_shared<SomeRows>();
  table.device.attach(cache, [] {});
  cache->in_use = {5};
  const std::vector<int64_t> ids{3, 9, 5, 7};
  table.device.release_for_change(ids.data(), 2);
  CHECK(cache->dropped == std::vector<int64_t>({3, 9}));
  CHECK_THROWS(table.device.release_for_change(ids.data(), 4), ErrorKind::kBroken,
               "table 't': id 5 at position 2 is in use by a device cache");
  CHECK_EQ(cache->dropped.size(), size_t{2});
  table.device.check_not_held(ids.data(), 4);  // a row in use may be read
  table.device.arrived(ids.data() + 1, 2);
  CHECK(cache->written == std::vector<int64_t>({9, 5}));
}

TEST(device_link_gives_up_all_copies_or_refuses) {
  Parts table(whole_numbers(kRows, 4));
  const auto cache = std::make_shared<SomeRows>();
  table.device.attach(cache, [] {});
  cache->in_use = {5, 6};
  CHECK_THROWS(table.device.require_not_in_use(), ErrorKind::kBroken,
               "table 't': 2 rows are in use by a device cache; end the step under way first");
  CHECK_THROWS(table.device.give_up_all(), ErrorKind::kBroken, "2 rows are in use by a device cache");
  cache->in_use.clear();
  cache->held = {1};
  table.device.require_not_in_use();
  CHECK_THROWS(table.device.give_up_all(), ErrorKind::kBroken, "1 rows are in use by a device cache");
  CHECK_EQ(cache->all_dropped, 0);
  cache->held.clear();
  table.device.give_up_all();
  CHECK_EQ(cache->all_dropped, 1);
}

// True when all of these rows are held and the held rows are no more than the frames that disk is reserved for.
TEST(device_link_knows_which_rows_have_room_reserved) {
  Parts table(whole_numbers(kRows, 4));
  const auto cache = std::make_shared<SomeRows>();
  table.device.attach(cache, [] {});
  cache->most = 3;
  const std::vector<int64_t> ids{1, 2, 3, 4};
  cache->held = {1, 2, 3};
  CHECK(table.device.is_write_back(ids.data(), 3) && table.device.are_reserved(ids.data(), 3));
  CHECK(!table.device.is_write_back(ids.data(), 4) && !table.device.are_reserved(ids.data(), 4));
  cache->held.insert(4);  // with rows that are on their way
  CHECK(table.device.is_write_back(ids.data(), 4) && !table.device.are_reserved(ids.data(), 4));
}

TEST(device_link_counts_no_more_rows_than_the_table_can_have) {
  for (const int64_t num_rows : {kRows, int64_t{-1}}) {
    Parts table(whole_numbers(num_rows, 4));
    const auto cache = std::make_shared<SomeRows>();
    table.device.attach(cache, [] {});
    for (const size_t most : {size_t{0}, size_t{99}, size_t{100}, size_t{101}, size_t{1} << 40}) {
      cache->most = most;
      CHECK_EQ(table.device.max_rows(), num_rows < 0 ? most : std::min<size_t>(most, 100));
    }
  }
}

// The write-back runs without the lock, because it calls the table.
TEST(device_link_asks_for_write_backs_without_the_lock_until_no_row_is_held) {
  Parts table(whole_numbers(kRows, 4));
  const auto cache = std::make_shared<SomeRows>();
  cache->held = {1, 2, 3};
  int asked = 0, taken = 0;
  table.device.attach(cache, [&] {
    ++asked;
    const auto guard = table.state.lock.exclusive();
    cache->held.erase(cache->held.begin());
  });
  const auto take = [&] {
    ++taken;
    return table.state.lock.work();
  };
  {
    const auto guard = table.device.lock_written_back(take);
    CHECK(static_cast<bool>(guard));
    CHECK_EQ(table.device.num_held(), size_t{0});
  }
  CHECK_EQ(asked, 3);
  CHECK_EQ(taken, 4);
}

TEST(device_link_gives_up_after_a_hundred_write_backs_and_holds_no_lock_then) {
  Parts table(whole_numbers(kRows, 4));
  const auto cache = std::make_shared<SomeRows>();
  cache->held = {1, 2};
  int asked = 0;
  const auto take = [&] { return table.state.lock.work(); };
  table.device.attach(cache, [&] { ++asked; });
  CHECK_THROWS((void)table.device.lock_written_back(take), ErrorKind::kBroken,
               "table 't': 2 rows are still held by a device cache after it was asked 100 times to write them back");
  CHECK_EQ(asked, 100);
  std::shared_ptr<DeviceCache> taken;
  std::function<void()> write_back;
  {
    const auto guard = table.state.lock.exclusive();
    table.device.detach(&taken, &write_back);
  }
  table.device.attach(cache, nullptr);  // a cache that cannot write back is asked, too
  CHECK_THROWS((void)table.device.lock_written_back(take), ErrorKind::kBroken, "after it was asked 100 times");
}

// Rows that are not stored are refused before they are trained in the cache: all rows of the cache may be such rows.
TEST(device_link_requires_disk_for_every_row_of_the_cache) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const TableSpec spec = whole_numbers(kManyRows, 4);
  const auto table = new_parts(vfs, sandbox / "t", spec, limited(spec, 5u << 20));
  DiskBudget& disk = table->state.store->disk();
  table->add_one(range(0, 50));
  uint64_t most = 50;
  while (disk.needed(most + 1) <= disk.limit()) ++most;
  const std::vector<int64_t> stored = range(0, 50), fresh = range(1000, 1010);
  const auto cache = std::make_shared<SomeRows>();
  cache->most = static_cast<size_t>(most) - 60;
  table->device.require_disk(fresh.data(), fresh.size());  // without a cache nothing is asked
  table->device.attach(cache, [] {});
  table->device.require_disk(fresh.data(), fresh.size());
  cache->most += 1;
  table->device.require_disk(stored.data(), stored.size());
  table->device.require_disk(fresh.data(), fresh.size() - 1);
  const std::string stored_rows = std::to_string(most + 1) + " stored rows, those of its device cache included";
  CHECK_THROWS(table->device.require_disk(fresh.data(), fresh.size()), ErrorKind::kSystem, stored_rows);
  uint64_t enough = 0;
  try {
    table->device.require_disk(fresh.data(), fresh.size());
  } catch (const Error& error) {
    CHECK_EQ(error.error_number(), ENOSPC);
    enough = named(error.what(), "disk=");
  }
  CHECK(enough > disk.limit());
  disk.set_limit(enough, 1, kManyRows);
  table->device.require_disk(fresh.data(), fresh.size());
  disk.set_limit(enough - 1, 1, kManyRows);
  CHECK_THROWS(table->device.require_disk(fresh.data(), fresh.size()), ErrorKind::kSystem, "would do");
  // Without a cache the update itself checks the limit.
  std::shared_ptr<DeviceCache> taken;
  std::function<void()> write_back;
  table->device.detach(&taken, &write_back);
  disk.set_limit(disk.needed(50), 1, kManyRows);
  table->device.require_disk(fresh.data(), fresh.size());
}

// The same for the memory of a directory that grows with the rows. The error names a sufficient budget.
TEST(device_link_requires_directory_memory_for_every_row_of_the_cache) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const TableSpec spec = whole_numbers(-1, 4);
  const auto table = new_parts(vfs, sandbox / "t", spec, Parts::with_ram(smallest_ram(spec)));
  table->add_one(range(0, 50));
  const std::vector<int64_t> stored = range(0, 50), fresh = range(40, 60);
  const auto cache = std::make_shared<SomeRows>();
  cache->most = 200'000;
  table->device.require_directory(fresh.data(), fresh.size());
  table->device.attach(cache, [] {});
  table->device.require_directory(stored.data(), stored.size());
  CHECK_THROWS(table->device.require_directory(fresh.data(), fresh.size()), ErrorKind::kMemory,
               "table 't': with the 200000 rows of its device cache 200050 rows may be stored");
  uint64_t enough = 0;
  try {
    table->device.require_directory(fresh.data(), fresh.size());
  } catch (const Error& error) {
    enough = named(error.what(), "ram=");
  }
  const auto with_ram = [&](size_t ram_bytes) {
    const MemoryPlan& now = table->state.store->plan();
    table->state.store->apply(plan_memory(ram_bytes, now.payload_bytes, now.slots_per_segment, now.read_unit, true));
  };
  with_ram(enough - 1);
  CHECK_THROWS(table->device.require_directory(fresh.data(), fresh.size()), ErrorKind::kMemory, "nothing was changed");
  with_ram(enough);
  table->device.require_directory(fresh.data(), fresh.size());
  // One new row after 1000 stored ones is enough.
  with_ram(enough - 1);
  std::vector<int64_t> many;
  for (int i = 0; i < 1000; ++i) many.push_back(i % 50);
  table->device.require_directory(many.data(), many.size());
  many.push_back(99);
  CHECK_THROWS(table->device.require_directory(many.data(), many.size()), ErrorKind::kMemory, "device cache");
}

// A flat directory does not grow. Without a budget a hashed one may grow.
TEST(device_link_requires_no_directory_memory_where_none_is_taken) {
  const std::vector<int64_t> fresh = range(0, 20);
  const auto cache = std::make_shared<SomeRows>();
  cache->most = 100'000;
  Parts flat(whole_numbers(kRows, 4), minimum_ram(whole_numbers(kRows, 4), kRows, false));
  CHECK(!flat.state.store->directory().grows());
  flat.device.attach(cache, [] {});
  flat.device.require_directory(fresh.data(), fresh.size());
  Parts unbounded(whole_numbers(-1, 4));
  CHECK(unbounded.state.store->directory().grows());
  unbounded.device.attach(cache, [] {});
  unbounded.device.require_directory(fresh.data(), fresh.size());
}
