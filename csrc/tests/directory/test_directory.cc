#include <algorithm>
#include <limits>
#include <map>

#include "directory/directory.h"
#include "tests/check.h"
#include "tests/sample.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

std::map<int64_t, Entry> walk(const Directory& directory) {
  std::map<int64_t, Entry> found;
  for (size_t part = 0; part < directory.num_parts(); ++part) {
    std::vector<int64_t> rows;
    std::vector<Entry> entries;
    directory.part(part, &rows, &entries);
    if (directory.has_ranges() && !found.empty()) {
      for (const int64_t row : rows) CHECK(row > found.rbegin()->first);
    }
    std::map<int64_t, Entry> of_part;
    for (size_t i = 0; i < rows.size(); ++i) CHECK(of_part.emplace(rows[i], entries[i]).second);
    for (const auto& [row, entry] : of_part) CHECK(found.emplace(row, entry).second);
  }
  return found;
}

// Random changes, with deletions, compared with a map.
void compare_with_map(Directory* directory, int64_t num_rows, uint64_t seed) {
  Sampler sampler(seed);
  std::map<int64_t, Entry> model;
  for (int round = 0; round < 60; ++round) {
    std::map<int64_t, Entry> coming;
    for (uint64_t i = sampler.bits() % 200; i > 0; --i) {
      const auto row = static_cast<int64_t>(sampler.bits() % static_cast<uint64_t>(num_rows));
      const uint64_t what = sampler.bits() % 8;
      coming[row] = what == 0   ? kAbsent
                    : what <= 3 ? entry_of_frame(static_cast<uint32_t>(sampler.bits()) >> 1)
                                : entry_of_position(sampler.bits() % kMaxPosition);
    }
    std::vector<int64_t> rows;
    for (const auto& [row, entry] : coming) {
      if (entry != kAbsent && !model.contains(row)) rows.push_back(row);
    }
    const size_t allowed = directory->bytes_after(directory->new_rows(rows.data(), rows.size()));
    directory->reserve(directory->new_rows(rows.data(), rows.size()));
    CHECK(directory->bytes() <= allowed);
    for (const auto& [row, entry] : coming) {
      directory->set(row, entry);
      if (entry == kAbsent) {
        model.erase(row);
      } else {
        model[row] = entry;
      }
    }
    CHECK(directory->bytes() <= allowed);
    CHECK_EQ(directory->stored_rows(), model.size());
  }
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < 3000; ++i)
    rows.push_back(static_cast<int64_t>(sampler.bits() % static_cast<uint64_t>(num_rows)));
  std::vector<Entry> entries(rows.size());
  directory->locate(rows.data(), rows.size(), entries.data());
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto found = model.find(rows[i]);
    CHECK_EQ(entries[i], found == model.end() ? kAbsent : found->second);
    CHECK_EQ(directory->find(rows[i]), entries[i]);
  }
  CHECK(walk(*directory) == model);
  directory->clear();
  CHECK_EQ(directory->stored_rows(), size_t{0});
  CHECK(walk(*directory).empty());
}

}  // namespace

TEST(directory_against_a_map) {
  for (const int64_t num_rows : {1, 2, 17, 4000}) {
    compare_with_map(make_flat_directory(static_cast<uint64_t>(num_rows)).get(), num_rows, 1);
    compare_with_map(make_hashed_directory().get(), num_rows, 2);
    compare_with_map(make_bounded_directory(static_cast<uint64_t>(num_rows)).get(), num_rows, 4);
  }
  compare_with_map(make_bounded_directory(400'000).get(), 400'000, 5);
  compare_with_map(make_bounded_directory(1ull << 62).get(), int64_t{1} << 62, 6);
  compare_with_map(make_hashed_directory().get(), std::numeric_limits<int64_t>::max(), 3);
}

TEST(directory_with_a_bound_takes_the_fewer_bytes_of_both_forms) {
  for (const uint64_t num_rows : {1ull, 1000ull, 5000ull, 300'000ull, 1'000'003ull, 20'000'000ull}) {
    for (const bool are_neighbours : {true, false}) {  // dense ranges and empty ones, or all ranges alike
      const auto directory = make_bounded_directory(num_rows);
      const auto hashed = make_hashed_directory();
      const size_t empty = directory->bytes();
      const uint64_t step = are_neighbours ? 1 : 7, batch = are_neighbours ? 16 : 1000;  // few ranges at once, or many
      for (uint64_t row = 0; row < std::min(num_rows, uint64_t{1'000'003}); row += batch) {
        std::vector<int64_t> rows;
        for (uint64_t i = row; i < std::min(row + batch, num_rows); ++i)
          rows.push_back(static_cast<int64_t>(i * step % num_rows));
        const size_t allowed = directory->bytes_after(directory->new_rows(rows.data(), rows.size()));
        CHECK(allowed <= bounded_directory_bytes(num_rows, row + rows.size()));
        CHECK(allowed <= directory->bytes_for(row + rows.size()));
        directory->reserve(directory->new_rows(rows.data(), rows.size()));
        const size_t reserved = directory->bytes();
        CHECK(reserved <= allowed);
        hashed->reserve(hashed->new_rows(rows.data(), rows.size()));
        for (const int64_t id : rows) {
          directory->set(id, entry_of_position(static_cast<uint64_t>(id)));
          hashed->set(id, entry_of_position(1));
        }
        CHECK_EQ(directory->bytes(), reserved);
        CHECK_EQ(directory->stored_rows(), row + rows.size());
        CHECK(directory->bytes() <= hashed->bytes() + hashed->bytes() / 4 + 60'000);
      }
      if (num_rows > 1'000'003) continue;
      CHECK(!directory->grows());
      CHECK(directory->bytes() <= empty + num_rows * 5 + 256 * 8 + 8);
      const std::map<int64_t, Entry> found = walk(*directory);
      CHECK_EQ(found.size(), size_t{num_rows});
      for (const auto& [row, entry] : found) CHECK_EQ(entry, entry_of_position(static_cast<uint64_t>(row)));
    }
  }
  // Few rows of many leave the bytes of the flat form to others.
  CHECK(bounded_directory_bytes(10'000'000'000, 1'000'000) < 25'000'000);
  CHECK(make_bounded_directory(10'000'000'000)->bytes() < 1'000'000);
  CHECK(bounded_directory_bytes(1ull << 62, 1000) < 50'000);
}

TEST(directory_with_a_bound_has_the_same_bytes_when_it_is_filled_at_once) {
  constexpr uint64_t kRows = 500'000;
  Sampler sampler(3);
  std::map<int64_t, Entry> model;
  for (int i = 0; i < 90'000; ++i)
    model[static_cast<int64_t>(sampler.bits() % kRows / (i % 3 + 1))] =
        entry_of_position(sampler.bits() % kMaxPosition);
  const auto one_by_one = make_bounded_directory(kRows), at_once = make_bounded_directory(kRows);
  at_once->begin_bulk(model.size());
  for (const auto& [row, entry] : model) {
    one_by_one->set(row, entry);
    Entry exchanged = entry;
    at_once->bulk_exchange(&row, &exchanged, 1);
    CHECK_EQ(exchanged, kAbsent);
  }
  at_once->end_bulk(model.size(), 0);
  CHECK_EQ(at_once->bytes(), one_by_one->bytes());
  CHECK_EQ(at_once->stored_rows(), model.size());
  CHECK(at_once->grows());
  CHECK(walk(*at_once) == model);
  CHECK(walk(*one_by_one) == model);
  at_once->clear();
  CHECK(walk(*at_once).empty());
  CHECK_EQ(at_once->bytes(), make_bounded_directory(kRows)->bytes());
}

TEST(directory_entries_are_told_apart) {
  CHECK(is_position(entry_of_position(0)) && is_position(entry_of_position(kMaxPosition)));
  CHECK(is_frame(entry_of_frame(0)) && is_frame(entry_of_frame(~0u - 1)));
  CHECK(entry_of_frame(~0u - 1) < (uint64_t{1} << 40));
  CHECK(!is_frame(entry_of_position(kMaxPosition)) && !is_position(entry_of_frame(0)));
  CHECK_EQ(position_of(entry_of_position(kMaxPosition)), kMaxPosition);
  CHECK_EQ(frame_of(entry_of_frame(123)), 123u);
}

TEST(directory_estimate_holds_growing_one_by_one_and_at_once) {
  for (const size_t rows : {1, 3, 30, 100, 250, 500, 800, 1200, 1600, 2500, 4096, 9000, 60000}) {
    std::vector<int64_t> ids;
    for (size_t i = 0; i < rows; ++i) ids.push_back(static_cast<int64_t>(i * 11));
    const auto at_once = make_hashed_directory();
    CHECK(at_once->bytes_after(at_once->new_rows(ids.data(), rows)) <= hashed_directory_bytes(rows));
    const auto one_by_one = make_hashed_directory();
    size_t most = 0;
    for (const int64_t id : ids) {
      most = std::max(most, one_by_one->bytes_after(one_by_one->new_rows(&id, 1)));
      one_by_one->reserve(one_by_one->new_rows(&id, 1));
      one_by_one->set(id, entry_of_position(1));
    }
    CHECK(most <= hashed_directory_bytes(rows));
  }
}

// Rows in the frame with their own number take a short path. They move out, move in and are dropped as all others.
TEST(directory_flat_knows_rows_at_home) {
  constexpr int64_t kRows = 10 * kFlatGroupRows + 7;
  const auto directory = make_flat_directory(kRows);
  std::vector<int64_t> rows;
  std::vector<Entry> expected;
  for (int64_t row = 0; row < kRows; ++row) {
    rows.push_back(row);
    expected.push_back(entry_of_frame(static_cast<uint32_t>(row)));
    directory->set(row, expected.back());
  }
  const auto check = [&] {
    std::vector<Entry> entries(rows.size());
    directory->locate(rows.data(), rows.size(), entries.data());
    CHECK(entries == expected);
    for (size_t i = 0; i < rows.size(); ++i) CHECK_EQ(directory->find(rows[i]), expected[i]);
    CHECK_EQ(directory->stored_rows(),
             rows.size() - static_cast<size_t>(std::count(expected.begin(), expected.end(), kAbsent)));
  };
  check();
  Sampler sampler(11);
  for (int round = 0; round < 400; ++round) {
    const uint64_t row = sampler.bits() % kRows;
    const uint64_t what = sampler.bits() % 8;
    const Entry entry = what == 0   ? kAbsent
                        : what == 1 ? entry_of_position(sampler.bits() % kMaxPosition)
                        : what == 2 ? entry_of_frame(static_cast<uint32_t>(sampler.bits() % kRows))
                                    : entry_of_frame(static_cast<uint32_t>(row));
    for (int again = 0; again < 2; ++again) directory->set(static_cast<int64_t>(row), entry);
    expected[row] = entry;
    check();
  }
  directory->clear();
  expected.assign(rows.size(), kAbsent);
  check();
}

TEST(directory_sizes_do_not_wrap) {
  // 5 times this is 2^64 + 4: a directory of 12 bytes for 3.7e18 rows.
  CHECK(flat_directory_bytes(3689348814741910324u) > (size_t{1} << 50));
  CHECK(flat_directory_bytes(~uint64_t{0}) > (size_t{1} << 50));
  CHECK(hashed_directory_bytes(~uint64_t{0}) > (size_t{1} << 50));
  CHECK(bounded_directory_bytes(uint64_t{1} << 63, ~uint64_t{0}) > (size_t{1} << 50));
}

// tests/order/test_block_order.py has the same values: cells, the ids of a block and the log's order use this hash.
TEST(hashes_of_ids_stay_the_same) {
  CHECK_EQ(mix_id(0), 0u);
  CHECK_EQ(mix_id(1), 0x4179b061e0c0e0d0u);
  CHECK_EQ(mix_id(2), 0x1c9963305febc252u);
  CHECK_EQ(mix_id(41), 0xa32bfdee79de1057u);
  CHECK_EQ(mix_id(1'000'000'007), 0x003c1c9c002037f0u);
  CHECK_EQ(mix_id((int64_t{1} << 40) + 3), 0x07cf43f504cfe2f7u);
  CHECK_EQ(mix_id(std::numeric_limits<int64_t>::max()), 0xb6d2958ba3f08589u);
}
