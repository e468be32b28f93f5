// Kept commits of a table that lives in RAM only.
#include "jobs/ram_snapshots.h"

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/model.h"
#include "tests/parts.h"
#include "tests/sample.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

// The values of a snapshot's rows, in element 0.
std::map<int64_t, float> rows_of(const TableState& table, const RamSnapshot& snapshot) {
  std::map<int64_t, float> rows;
  CHECK_EQ(snapshot.records.size(), snapshot.rows.size() * table.payload_bytes);
  for (size_t i = 0; i < snapshot.rows.size(); ++i) {
    float value;
    std::memcpy(&value, snapshot.records.data() + i * table.payload_bytes, sizeof(value));
    CHECK(rows.emplace(snapshot.rows[i], value).second);
  }
  return rows;
}

}  // namespace

TEST(ram_snapshots_are_copies_of_the_rows_and_facts) {
  Parts table(whole_numbers(-1, 4));
  table.add_one({5, 1'000'000, 7, 5});
  table.committer.commit("{\"run\":1}", "");
  CHECK(table.ram.list().empty());
  table.ram.keep("first");
  uint32_t frame;  // of a call that failed: it holds no row any more
  CHECK(table.state.store->cache().allocate(&frame));
  table.state.store->cache().release(frame);
  table.add_one({5, 8});
  CHECK(table.state.store->cache().allocate(&frame));
  table.state.store->cache().release(frame);
  table.committer.commit("{\"run\":2}", "");
  table.ram.keep("second");
  table.add_one({5});
  const RamSnapshot& first = table.ram.find("first", std::nullopt);
  const RamSnapshot& second = table.ram.find("second", std::nullopt);
  CHECK(rows_of(table.state, first) == (std::map<int64_t, float>{{5, 2.0f}, {7, 1.0f}, {1'000'000, 1.0f}}));
  CHECK(rows_of(table.state, second) == (std::map<int64_t, float>{{5, 3.0f}, {7, 1.0f}, {8, 1.0f}, {1'000'000, 1.0f}}));
  CHECK_EQ(first.step, int64_t{1});
  CHECK_EQ(second.step, int64_t{2});
  CHECK_EQ(first.meta, std::string("{\"run\":1}"));
  CHECK_EQ(second.meta, std::string("{\"run\":2}"));
  CHECK_EQ(first.epoch, uint64_t{1});
  CHECK_EQ(second.epoch, uint64_t{2});
  CHECK(&table.ram.find("", uint64_t{2}) == &second);
  const auto all = table.ram.list();
  CHECK_EQ(all.size(), size_t{2});
  CHECK(all[0].name == "first" && all[0].epoch == 1 && all[1].name == "second" && all[1].epoch == 2);
}

TEST(ram_snapshots_move_a_name_that_is_used_again) {
  Parts table(whole_numbers(100, 4));
  for (int commit = 1; commit <= 3; ++commit) {
    table.add_one({1});
    table.committer.commit(std::nullopt, "");
    table.ram.keep(commit == 2 ? "other" : "kept");
  }
  const auto all = table.ram.list();
  CHECK_EQ(all.size(), size_t{2});
  CHECK(all[0].name == "other" && all[1].name == "kept" && all[1].epoch == 3);
  CHECK_EQ(rows_of(table.state, table.ram.find("kept", std::nullopt)).at(1), 3.0f);
  CHECK_EQ(rows_of(table.state, table.ram.find("other", std::nullopt)).at(1), 2.0f);
}

TEST(ram_snapshots_that_are_dropped_are_gone) {
  Parts table(whole_numbers(100, 4));
  table.ram.keep("a");
  table.ram.keep("b");
  CHECK_THROWS(table.ram.drop("c"), ErrorKind::kInvalid, "table 't' has no snapshot 'c'");
  table.ram.drop("a");
  CHECK_EQ(table.ram.list().size(), size_t{1});
  CHECK_THROWS(table.ram.drop("a"), ErrorKind::kInvalid, "has no snapshot 'a'");
  CHECK_THROWS((void)table.ram.find("a", std::nullopt), ErrorKind::kInvalid, "has no snapshot 'a'");
  CHECK(table.ram.find("b", std::nullopt).rows.empty());
}

TEST(ram_snapshots_have_the_table_as_it_was_made) {
  Parts table(whole_numbers(100, 4));
  table.add_one({1});
  table.committer.commit("{\"run\":1}", "");
  table.ram.keep("one");
  const RamSnapshot& start = table.ram.find("", uint64_t{0});
  CHECK(start.rows.empty() && start.records.empty() && start.meta == "{}");
  CHECK_EQ(start.step, int64_t{0});
  CHECK_EQ(table.ram.list().size(), size_t{1});
  Parts other(whole_numbers(100, 4));
  other.ram.keep("zero");
  CHECK_EQ(other.ram.find("", uint64_t{0}).name, std::string("zero"));
}

TEST(ram_snapshots_name_those_that_there_are) {
  Parts table(whole_numbers(100, 4));
  CHECK_THROWS((void)table.ram.find("a", std::nullopt), ErrorKind::kInvalid,
               "table 't' has no snapshot 'a'; it lives in RAM only, where none is kept");
  table.ram.keep("a");
  table.add_one({1});
  table.committer.commit(std::nullopt, "");
  table.ram.keep("b");
  CHECK_THROWS((void)table.ram.find("c", std::nullopt), ErrorKind::kInvalid,
               "has no snapshot 'c'; it lives in RAM only, where these are kept: 'a' (commit 0), 'b' (commit 1)");
  // An epoch is asked for by itself, whatever the name.
  CHECK_THROWS((void)table.ram.find("a", uint64_t{7}), ErrorKind::kInvalid, "has no snapshot of commit 7");
}
