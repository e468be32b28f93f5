// Compares the window with a plain list of batches.
#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "cache/window.h"
#include "tests/check.h"
#include "tests/sample.h"

using namespace bunkbed;
using bunkbed::test::Sampler;

namespace {

uint32_t plain_next_use(const std::map<uint32_t, std::set<int64_t>>& batches, int64_t row) {
  for (const auto& [batch, rows] : batches) {
    if (rows.count(row) != 0) return batch;
  }
  return 0;
}

}  // namespace

TEST(window_next_use_is_that_of_a_plain_list) {
  Sampler sampler(11);
  const int64_t base = int64_t{1} << 40;  // every third batch has rows that do not fit four bytes
  Window window;
  std::map<uint32_t, std::set<int64_t>> batches;
  uint32_t expected = 1;
  for (int round = 0; round < 2000; ++round) {
    if (window.has_room() && sampler.bits() % 3 != 0) {
      std::set<int64_t> rows;
      for (uint64_t i = sampler.bits() % 60; i > 0; --i) rows.insert(static_cast<int64_t>(sampler.bits() % 500));
      if (expected % 3 == 0) rows.insert(base + expected % 5);
      const std::vector<int64_t> list(rows.begin(), rows.end());
      const size_t bound = window.bytes_after(list.size());
      CHECK_EQ(window.push(list.data(), list.size()), expected);
      CHECK(window.bytes() <= bound);
      batches[expected++] = rows;
    } else if (!batches.empty()) {
      // Mostly the oldest batch ends, sometimes one in the middle.
      auto which = batches.begin();
      if (sampler.bits() % 4 == 0) std::advance(which, sampler.bits() % batches.size());
      CHECK(window.holds(which->first));
      std::vector<int64_t> rows(window.num_rows(which->first));
      window.copy_rows(which->first, 0, rows.size(), rows.data());
      CHECK(std::set<int64_t>(rows.begin(), rows.end()) == which->second);
      window.finish(which->first);
      CHECK(!window.holds(which->first));
      batches.erase(which);
    }
    CHECK_EQ(window.first_batch(), batches.empty() ? expected : batches.begin()->first);
    CHECK_EQ(window.next_batch(), expected);
    for (int64_t row = 0; row < 500; row += 7) CHECK_EQ(window.next_use(row), plain_next_use(batches, row));
    for (int64_t row = base; row < base + 5; ++row) CHECK_EQ(window.next_use(row), plain_next_use(batches, row));
  }
}

TEST(window_holds_32_batches_and_forgets_them) {
  Window window;
  const int64_t row = 5;
  for (uint32_t i = 0; i < Window::kMaxBatches; ++i) {
    CHECK(window.has_room());
    window.push(&row, 1);
  }
  CHECK(!window.has_room());
  window.finish(2);  // not the oldest: its slot stays in use
  CHECK(!window.has_room());
  window.finish(1);
  CHECK_EQ(window.first_batch(), 3u);
  CHECK_EQ(window.next_use(row), 3u);
  window.clear();
  CHECK_EQ(window.next_use(row), 0u);
  CHECK_EQ(window.bytes(), size_t{0});
  CHECK_EQ(window.push(&row, 1), 33u);
}
