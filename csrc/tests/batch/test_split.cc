#include <cstdint>
#include <limits>
#include <vector>

#include "base/workers.h"
#include "batch/split.h"
#include "format/shard_rule.h"
#include "tests/check.h"
#include "tests/sample.h"

using namespace bunkbed;
using namespace bunkbed::test;

TEST(split_groups_the_places_of_ids_by_part_in_batch_order) {
  Sampler sampler(5);
  for (const uint32_t shards : {1u, 2u, 7u, 1024u}) {
    for (const size_t num_parts : {size_t{1}, size_t{2}, size_t{7}}) {
      std::vector<uint16_t> parts;
      for (uint32_t s = 0; s < shards; ++s) parts.push_back(static_cast<uint16_t>(s * num_parts / shards));
      std::vector<int64_t> ids = {0, std::numeric_limits<int64_t>::max()};
      for (size_t i = 0; i < 3000; ++i) ids.push_back(static_cast<int64_t>(sampler.bits() % 900));
      std::vector<std::vector<int64_t>> wanted(num_parts);
      for (size_t i = 0; i < ids.size(); ++i)
        wanted[parts[shard_of(ids[i], shards)]].push_back(static_cast<int64_t>(i));
      std::vector<int64_t> order(ids.size());
      std::vector<int64_t> bounds(num_parts + 1, -1);
      const PartRule rule{parts.data(), shards, num_parts};
      CHECK_EQ(split_ids(ids.data(), ids.size(), rule, order.data(), bounds.data()), ids.size());
      CHECK_EQ(bounds.front(), 0);
      CHECK_EQ(bounds.back(), static_cast<int64_t>(ids.size()));
      for (size_t part = 0; part < num_parts; ++part) {
        CHECK(std::vector<int64_t>(order.begin() + bounds[part], order.begin() + bounds[part + 1]) == wanted[part]);
      }
    }
  }
}

TEST(split_of_no_ids_has_empty_parts_and_an_id_without_a_part_is_named) {
  const std::vector<uint16_t> parts = {0, 9, 1};
  std::vector<int64_t> bounds(3, -1);
  CHECK_EQ(split_ids(nullptr, 0, {parts.data(), 3, 2}, nullptr, bounds.data()), size_t{0});
  CHECK(bounds == std::vector<int64_t>(3, 0));
  std::vector<int64_t> ids;
  for (int64_t id = 0; ids.size() < 5; ++id) {
    if (shard_of(id, 3) != 1) ids.push_back(id);
  }
  int64_t stranger = 0;
  while (shard_of(stranger, 3) != 1) ++stranger;
  ids.insert(ids.begin() + 4, stranger);
  std::vector<int64_t> order(ids.size());
  CHECK_EQ(split_ids(ids.data(), ids.size(), {parts.data(), 3, 2}, order.data(), bounds.data()), size_t{4});
}

TEST(gathered_rows_are_scaled_once_on_any_number_of_threads) {
  const size_t before = num_threads();
  Sampler sampler(6);
  for (const size_t dim : {1, 7, 32, 200, 1500}) {
    const size_t num_rows = 500;
    const size_t n = 2000;
    std::vector<float> rows;
    for (size_t i = 0; i < num_rows * dim; ++i)
      rows.push_back(static_cast<float>(sampler.bits() % 1000) / 7.0f - 70.0f);
    std::vector<int64_t> places;
    for (size_t i = 0; i < n; ++i) places.push_back(static_cast<int64_t>(sampler.bits() % num_rows));
    for (const float factor : {1.0f, 0.25f, 1.0f / 3.0f}) {
      std::vector<float> wanted;
      for (const int64_t place : places) {
        for (size_t d = 0; d < dim; ++d) wanted.push_back(rows[static_cast<size_t>(place) * dim + d] * factor);
      }
      for (const size_t threads : {1, 3}) {
        set_num_threads(threads);
        std::vector<float> out(n * dim, -1.0f);
        gather_scaled(rows.data(), places.data(), n, dim, factor, out.data());
        CHECK(out == wanted);
      }
    }
  }
  set_num_threads(before);
}
