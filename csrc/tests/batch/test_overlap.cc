#include "batch/overlap.h"

#include <memory>
#include <random>
#include <set>
#include <vector>

#include "tests/check.h"

using namespace bunkbed;
using namespace bunkbed::test;

TEST(overlap_is_that_of_two_sets) {
  std::mt19937_64 random(7);
  for (const size_t sizes : {0, 1, 5, 3000}) {
    for (const int64_t range : {int64_t{3}, int64_t{4000}, int64_t{1} << 62}) {
      std::vector<int64_t> a(sizes), b(sizes / 2 + 2);
      for (auto& id : a) id = static_cast<int64_t>(random() % static_cast<uint64_t>(range));
      for (auto& id : b) id = static_cast<int64_t>(random() % static_cast<uint64_t>(range));
      if (!a.empty()) b[0] = a[0];
      Batch one, other;
      one.assign(a.data(), a.size());
      other.assign(b.data(), b.size());
      const std::set<int64_t> wanted(b.begin(), b.end());
      const auto found = std::make_unique<bool[]>(one.num_unique() + 1);
      rows_in_other(one, other, found.get());
      for (size_t i = 0; i < one.num_unique(); ++i) CHECK_EQ(found[i], wanted.contains(one.unique()[i]));
    }
  }
}
