#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "batch/exact_sum.h"
#include "tests/check.h"
#include "tests/sample.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

double sum_of(const std::vector<double>& terms) {
  ExactSum sum;
  sum.add(terms.data(), terms.size());
  return sum.rounded();
}

// Terms of the sizes that squares of float32 rows have, from 2^-298 to 2^279.
std::vector<double> random_terms(Sampler* sampler, size_t n, int lowest, int highest) {
  std::vector<double> terms;
  for (size_t i = 0; i < n; ++i) {
    const double mantissa = 1.0 + static_cast<double>(sampler->bits() >> 12) * 0x1p-52;
    terms.push_back(
        std::ldexp(mantissa, lowest + static_cast<int>(sampler->bits() % static_cast<uint64_t>(highest - lowest + 1))));
  }
  return terms;
}

}  // namespace

TEST(exact_sum_is_the_sum_in_twice_the_precision) {
  Sampler sampler(1);
  for (int round = 0; round < 200; ++round) {
    // 60 binary places apart, so that 113 bits hold the sum without rounding.
    const int lowest = -298 + static_cast<int>(sampler.bits() % 500);
    const std::vector<double> terms = random_terms(&sampler, 1 + sampler.bits() % 30, lowest, lowest + 50);
#ifdef __SIZEOF_FLOAT128__
    __extension__ typedef __float128 Wide;
#else
    typedef long double Wide;  // of 128 bits where there is no __float128
    static_assert(std::numeric_limits<Wide>::digits == 113);
#endif
    Wide wide = 0;
    for (const double term : terms) wide += term;
    CHECK_EQ(sum_of(terms), static_cast<double>(wide));
  }
}

TEST(exact_sum_rounds_once_to_nearest_even) {
  CHECK_EQ(sum_of({}), 0.0);
  CHECK_EQ(sum_of({0.0, 0.0}), 0.0);
  CHECK_EQ(sum_of({1.0, 0x1p-53}), 1.0);                      // a tie, to even
  CHECK_EQ(sum_of({1.0, 0x1p-53, 0x1p-298}), 1.0 + 0x1p-52);  // more than a tie
  CHECK_EQ(sum_of({1.0 + 0x1p-52, 0x1p-53}), 1.0 + 0x1p-51);  // a tie, to even
  CHECK_EQ(sum_of({1.0, 0x1p-54, 0x1p-54}), 1.0);             // the same tie in two parts
  CHECK_EQ(sum_of({0x1p279, 0x1p-298, 0x1p279}), 0x1p280);
  CHECK_EQ(sum_of({0x1p-298}), 0x1p-298);
  CHECK_EQ(sum_of({0x1p-298, 0x1p-298}), 0x1p-297);
  const double all_ones = 2.0 - 0x1p-52;
  for (int power = -298; power < 280; ++power)
    CHECK_EQ(sum_of({std::ldexp(all_ones, power)}), std::ldexp(all_ones, power));
}

TEST(exact_sum_does_not_depend_on_order_or_division) {
  Sampler sampler(2);
  for (int round = 0; round < 20; ++round) {
    std::vector<double> terms = random_terms(&sampler, 5000, -298, 279);
    const double expected = sum_of(terms);
    for (int order = 0; order < 5; ++order) {
      for (size_t i = terms.size() - 1; i > 0; --i) std::swap(terms[i], terms[sampler.bits() % (i + 1)]);
      CHECK_EQ(sum_of(terms), expected);
      ExactSum parts[3];
      for (const double term : terms) parts[sampler.bits() % 3].add(term);
      parts[2].add(ExactSum::from(parts[1].words()));
      parts[2].add(parts[0]);
      CHECK_EQ(parts[2].rounded(), expected);
    }
  }
}

TEST(exact_sum_carries_in_time) {
  const double largest = std::ldexp(2.0 - 0x1p-52, 247);  // its bits fill the lower part of a limb and the next one
  ExactSum sum;
  for (int i = 0; i < 1 << 20; ++i) sum.add(largest);
  CHECK_EQ(sum.rounded(), std::ldexp(largest, 20));
  ExactSum doubled;
  for (int i = 0; i < 10; ++i) {
    doubled.add(sum);
    doubled.add(doubled);
  }
  CHECK_EQ(doubled.rounded(), std::ldexp(largest, 20) * 2046.0);
}

TEST(exact_sum_of_a_term_that_is_not_finite_is_not_finite) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK_EQ(sum_of({1.0, infinity, infinity}), infinity);
  CHECK(std::isnan(sum_of({infinity, nan, 1.0})));
  CHECK(std::isnan(sum_of({nan})));
  ExactSum parts[2];
  parts[0].add(2.0);
  parts[1].add(infinity);
  parts[0].add(parts[1]);
  CHECK_EQ(parts[0].rounded(), infinity);
}
