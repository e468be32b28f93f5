// A scan, commit or rewind next to a device cache that other threads train asks for write-backs until no row is held;
// and a table with a probability of admission has no device cache.
#include <functional>
#include <memory>

#include "tests/check.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

// Holds one row until `more` write-backs, as if another thread had changed a row after each write-back.
struct Busy final : DeviceCache {
  int more = 0, asked = 0, all_given_up = 0;
  size_t in_use = 0;
  size_t num_held() const override { return asked < more ? 1 : 0; }
  size_t max_held() const override { return 4; }
  size_t num_in_use() const override { return 0; }  // what the table sees before the rows change
  size_t first_held(const int64_t*, size_t n) const override { return n; }
  size_t first_not_held(const int64_t*, size_t n) const override { return n; }
  size_t give_up(const int64_t*, size_t n) override { return n; }
  size_t give_up_all() override {
    all_given_up += in_use == 0;
    return in_use;
  }
  void arrived(const int64_t*, size_t) override {}
};

constexpr int64_t kRows = 50;

void check_call(const std::function<void(Table*)>& call) {
  const Sandbox sandbox;
  const TableSpec spec = whole_numbers(kRows, 2);
  const auto table = Table::create(vfs::posix(), sandbox / "t", "t", spec, minimum_ram(spec, kRows, true));
  const auto busy = std::make_shared<Busy>();
  update(table.get(), {1, 2, 3}, {1, 1, 1});
  table->commit(std::nullopt, "a");
  table->set_device_cache(busy, [busy] { ++busy->asked; });
  for (const int more : {0, 1, 3}) {
    busy->asked = 0;
    busy->more = more;
    call(table.get());
    CHECK_EQ(busy->asked, more);
  }
  busy->asked = 0;
  busy->more = 1 << 30;
  CHECK_THROWS(call(table.get()), ErrorKind::kBroken,
               "1 rows are still held by a device cache after it was asked 100 times");
  busy->more = 0;
  table->set_device_cache(nullptr, nullptr);
}

}  // namespace

TEST(held_rows_are_written_back_before_a_scan) {
  check_call([](Table* table) {
    Scan scan(table, {0});
    int64_t ids[4];
    std::vector<float> values(4 * 2);
    float* const fields[] = {values.data()};
    CHECK_EQ(scan.next(4, ids, fields), size_t{3});
  });
}

TEST(held_rows_are_written_back_before_a_commit) {
  check_call([](Table* table) {
    update(table, {1}, {1});
    table->commit(std::nullopt, "");
  });
}

TEST(held_rows_are_written_back_before_a_rewind) {
  check_call([](Table* table) { table->rewind("a", std::nullopt); });
}

// A step may start between the check and the rewind. The rewind then drops all copies before it changes rows, or fails.
TEST(held_rows_of_a_step_that_just_started_stop_a_rewind) {
  for (const bool on_disk : {true, false}) {
    const Sandbox sandbox;
    const TableSpec spec = whole_numbers(kRows, 2);
    const auto table = Table::create(vfs::posix(), on_disk ? sandbox / "t" : "", "t", spec,
                                     on_disk ? minimum_ram(spec, kRows, true) : 0);
    update(table.get(), {1}, {1});
    table->commit(std::nullopt, "a");
    update(table.get(), {1}, {1});
    const auto busy = std::make_shared<Busy>();
    table->set_device_cache(busy, [] {});
    const auto value = [&] {
      const int64_t id = 1;
      float found[2];
      table->lookup(&id, 1, true, found);
      return found[0];
    };
    const float before = value();
    busy->in_use = 3;
    CHECK_THROWS(table->rewind("a", std::nullopt), ErrorKind::kBroken, "3 rows are in use by a device cache");
    CHECK_EQ(value(), before);
    busy->in_use = 0;
    table->rewind("a", std::nullopt);
    CHECK_EQ(busy->all_given_up, 1);
    CHECK(value() != before);
    table->set_device_cache(nullptr, nullptr);
  }
}

TEST(admission_and_a_device_cache_exclude_each_other) {
  TableSpec spec = whole_numbers(-1, 4);
  spec.retention.admit = 0.5;
  const auto table = Table::create(vfs::posix(), "", "t", spec, 0);
  const auto cache = std::make_shared<Busy>();
  CHECK_THROWS(table->set_device_cache(cache, [] {}), ErrorKind::kInvalid, "does not work with a device cache");
  table->set_retention({});
  table->set_device_cache(cache, [] {});
  CHECK_THROWS(table->set_retention(spec.retention), ErrorKind::kInvalid, "does not work with a device cache");
  CHECK_EQ(table->changeable().retention.admit, 0.0);
  table->set_device_cache(nullptr, nullptr);
  table->set_retention(spec.retention);
}
