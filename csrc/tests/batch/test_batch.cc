#include <algorithm>
#include <map>

#include "base/workers.h"
#include "batch/batch.h"
#include "tests/check.h"
#include "tests/sample.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

// Every unique id once, by first occurrence, with its places in order.
void check_batch(const Batch& batch, const std::vector<int64_t>& ids, const std::vector<uint32_t>& members,
                 bool has_members) {
  std::vector<int64_t> first;
  std::map<int64_t, std::vector<uint32_t>> places;
  for (size_t i = 0; i < (has_members ? members.size() : ids.size()); ++i) {
    const uint32_t place = has_members ? members[i] : static_cast<uint32_t>(i);
    if (!places.contains(ids[place])) first.push_back(ids[place]);
    places[ids[place]].push_back(place);
  }
  const std::vector<int64_t> unique(batch.unique().begin(), batch.unique().end());
  CHECK(unique == first);
  CHECK_EQ(batch.size(), has_members ? members.size() : ids.size());
  CHECK_EQ(unique.size(), places.size());
  CHECK_EQ(batch.offsets().size(), unique.size() + 1);
  for (size_t u = 0; u < unique.size(); ++u) {
    const auto* order = batch.order().data();
    CHECK(std::vector<uint32_t>(order + batch.offsets()[u], order + batch.offsets()[u + 1]) == places[unique[u]]);
  }
  CHECK_EQ(batch.inverse().size(), has_members ? 0 : ids.size());
  if (has_members) return;
  for (size_t i = 0; i < ids.size(); ++i) CHECK_EQ(unique[batch.inverse()[i]], ids[i]);
}

}  // namespace

TEST(batch_against_the_plain_way) {
  Sampler sampler(7);
  Batch batch;
  for (int round = 0; round < 300; ++round) {
    const size_t n = sampler.bits() % 200;
    const uint64_t range = 1 + sampler.bits() % (round % 3 == 0 ? 3 : 300);
    const uint64_t high = round % 5 == 0 ? uint64_t{1} << 62 : 0;
    std::vector<int64_t> ids;
    for (size_t i = 0; i < n; ++i) ids.push_back(static_cast<int64_t>(high + sampler.bits() % range));
    std::vector<uint32_t> members;
    for (uint32_t i = 0; i < n; ++i) {
      if (sampler.bits() % 2 == 0) members.push_back(i);
    }
    batch.assign(ids.data(), n);
    check_batch(batch, ids, members, false);
    // An empty list of members is a list, not the absence of one.
    const uint32_t none = 0;
    batch.assign(ids.data(), members.size(), members.empty() ? &none : members.data());
    check_batch(batch, ids, members, true);
  }
}

TEST(batch_is_the_same_on_any_number_of_threads) {
  const size_t before = num_threads();
  Sampler sampler(8);
  for (const size_t n : {4096u, 20000u, 70000u, 300000u}) {
    // Mostly one id; few; many; ids that differ in their high bits alone.
    for (const int kind : {0, 1, 2, 3}) {
      std::vector<int64_t> ids;
      std::vector<uint32_t> members;
      for (uint32_t i = 0; i < n; ++i) {
        const uint64_t bits = sampler.bits();
        const uint64_t id = kind == 0   ? (bits % 16 == 0 ? bits % 1000 : 5)
                            : kind == 1 ? bits % 7
                            : kind == 2 ? bits % n
                                        : bits >> 50 << 50;
        ids.push_back(static_cast<int64_t>(id & ~(uint64_t{1} << 63)));
        if (i % 3 != 0) members.push_back(i);
      }
      std::vector<int64_t> unique;
      for (const size_t threads : {1, 2, 5}) {
        set_num_threads(threads);
        Batch batch;
        batch.assign(ids.data(), n);
        check_batch(batch, ids, members, false);
        if (unique.empty()) unique.assign(batch.unique().begin(), batch.unique().end());
        CHECK(std::equal(unique.begin(), unique.end(), batch.unique().begin(), batch.unique().end()));
        batch.assign(ids.data(), members.size(), members.data());
        check_batch(batch, ids, members, true);
      }
    }
  }
  set_num_threads(before);
}
