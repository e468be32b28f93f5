#include <algorithm>
#include <map>

#include "batch.h"
#include "check.h"
#include "sample.h"

using namespace bunkbed;
using namespace bunkbed::test;

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
    for (const bool use_members : {false, true}) {
      std::vector<int64_t> wanted = ids;
      if (use_members) {
        wanted.clear();
        for (const uint32_t m : members) wanted.push_back(ids[m]);
      }
      // An empty list of members is a list, not the absence of one.
      const uint32_t none = 0;
      batch.assign(ids.data(), wanted.size(), use_members ? (members.empty() ? &none : members.data()) : nullptr);
      batch.group();
      std::vector<int64_t> unique;
      std::map<int64_t, std::vector<uint32_t>> places;
      for (uint32_t i = 0; i < wanted.size(); ++i) {
        if (!places.contains(wanted[i])) unique.push_back(wanted[i]);
        places[wanted[i]].push_back(i);
      }
      CHECK(std::vector<int64_t>(batch.unique().begin(), batch.unique().end()) == unique);
      CHECK_EQ(batch.size(), wanted.size());
      for (size_t i = 0; i < wanted.size(); ++i) CHECK_EQ(unique[batch.inverse()[i]], wanted[i]);
      for (size_t u = 0; u < unique.size(); ++u) {
        const auto* order = batch.order().data();
        CHECK(std::vector<uint32_t>(order + batch.offsets()[u], order + batch.offsets()[u + 1]) == places[unique[u]]);
      }
    }
  }
}
