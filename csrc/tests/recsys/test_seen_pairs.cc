// Compares the set of pairs with a plain set, for each of its algorithms.
#include "recsys/seen_pairs.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "tests/check.h"
#include "tests/sample.h"

namespace bunkbed {
namespace {

using test::Sampler;

int64_t below(Sampler& sampler, int64_t bound) {
  return static_cast<int64_t>(sampler.bits() % static_cast<uint64_t>(bound));
}

// `count` keys of users below num_users and items below num_items, ascending, some more than once.
std::vector<int64_t> draw_keys(Sampler& sampler, size_t count, int64_t num_users, int64_t num_items) {
  std::vector<int64_t> keys;
  for (size_t i = 0; i < count; ++i) keys.push_back(below(sampler, num_users) * num_items + below(sampler, num_items));
  std::sort(keys.begin(), keys.end());
  return keys;
}

std::vector<int64_t> clashes(SeenPairs& pairs, const std::vector<int64_t>& users, const std::vector<int64_t>& items) {
  std::vector<int64_t> places(pairs.most_clashes(users.size(), users.data(), items.size(), items.data()) + 1, -7);
  const size_t n = pairs.clashes(users.size(), users.data(), items.size(), items.data(), places.data());
  CHECK(n < places.size());
  places.resize(n);
  return places;
}

}  // namespace

TEST(seen_pairs_answer_as_a_set_does) {
  Sampler sampler(4);
  for (const auto& [count, num_users, num_items] :
       {std::tuple<size_t, int64_t, int64_t>{0, 5, 5}, {1, 1, 1}, {300, 20, 30}, {40, 200, 1000}, {900, 3000, 17}}) {
    const std::vector<int64_t> keys = draw_keys(sampler, count, num_users, num_items);
    const std::set<int64_t> expected(keys.begin(), keys.end());
    SeenPairs pairs(keys.data(), keys.size(), num_items);
    std::vector<int64_t> users;
    std::vector<int64_t> items;
    // Also users beyond the last one, and the pairs of the set, which random pairs would rarely hit.
    for (size_t i = 0; i < 500; ++i) {
      const int64_t key = i < keys.size() ? keys[i] : below(sampler, (num_users + 3) * num_items);
      users.push_back(key / num_items);
      items.push_back(key % num_items);
    }
    bool found[500];
    pairs.contains(users.size(), users.data(), items.data(), found);
    for (size_t i = 0; i < users.size(); ++i) CHECK_EQ(found[i], expected.count(users[i] * num_items + items[i]) == 1);
    for (int round = 0; round < 2; ++round) {  // before the lists are made and after
      for (int64_t user = 0; user < num_users + 3; ++user) {
        const SeenPairs::Items own = pairs.items_of(user);
        const std::vector<int64_t> got(own.keys, own.keys + own.n);
        CHECK(got == std::vector<int64_t>(expected.lower_bound(user * num_items),
                                          expected.lower_bound((user + 1) * num_items)));
      }
      clashes(pairs, {0}, {0});
    }
  }
}

TEST(clashes_of_seen_pairs_are_all_there_row_by_row_by_users_and_by_items) {
  Sampler sampler(5);
  const int64_t num_users = 50;
  const int64_t num_items = 40;
  const std::vector<int64_t> keys = draw_keys(sampler, 300, num_users, num_items);
  const std::set<int64_t> expected(keys.begin(), keys.end());
  SeenPairs pairs(keys.data(), keys.size(), num_items);
  for (size_t num_asked : {0, 1, 2, 80}) {  // few users have fewer items than the items have owners; many have more
    for (size_t num_drawn : {1, 15, 40}) {
      std::vector<int64_t> users;
      std::vector<int64_t> items;
      for (size_t b = 0; b < num_asked; ++b) users.push_back(below(sampler, num_users + 3));
      for (size_t j = 0; j < num_drawn; ++j) items.push_back(static_cast<int64_t>(j * 3 % 40));
      std::vector<int64_t> wanted;
      for (size_t b = 0; b < users.size(); ++b) {
        for (size_t j = 0; j < items.size(); ++j) {
          if (expected.count(users[b] * num_items + items[j]))
            wanted.push_back(static_cast<int64_t>(b * num_drawn + j));
        }
      }
      for (int round = 0; round < 2; ++round) {  // scratch is left clean
        std::vector<int64_t> got = clashes(pairs, users, items);
        const auto width = static_cast<int64_t>(num_drawn);
        CHECK(std::is_sorted(got.begin(), got.end(), [=](int64_t a, int64_t b) { return a / width < b / width; }));
        std::sort(got.begin(), got.end());
        CHECK(got == wanted);
      }
    }
  }
}

TEST(seen_pairs_refuse_what_would_reach_beyond_their_memory) {
  const std::vector<int64_t> keys = {3, 2};
  CHECK_THROWS(SeenPairs(keys.data(), 2, 10), ErrorKind::kInvalid, "must ascend from 0, got 2 at position 1");
  CHECK_THROWS(SeenPairs(keys.data(), 1, 0), ErrorKind::kInvalid, "num_items must be positive, got 0");
  SeenPairs pairs(keys.data(), 1, 10);
  CHECK_THROWS(clashes(pairs, {0, -1}, {1}), ErrorKind::kIndex, "user -1 is negative");
  CHECK_THROWS(clashes(pairs, {0}, {1, 10}), ErrorKind::kIndex, "item 10 is outside [0, 10)");
  CHECK_THROWS(clashes(pairs, {0}, {3, 1, 3}), ErrorKind::kInvalid, "must be different");
  CHECK(clashes(pairs, {5, 0}, {1, 3}) == std::vector<int64_t>{3});
}

}  // namespace bunkbed
