// Sums of squares that do not depend on the order of their terms.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace bunkbed {

// The exact sum of non-negative doubles, in fixed point: limb i counts units of 2^(32 i - 350). A term is the sum of
// squares of a row of float32 values in double, which is 0 or between 2^-298 and 2^280, or not finite. For such terms
// the sum has no rounding, so neither the order of terms nor their division among threads and processes matters.
// Holds 2^40 terms.
//
// The method is that of R. M. Neal, "Fast exact summation using small and large superaccumulators", 2015.
class ExactSum {
 public:
  // Limbs of 32 bits and their carries; the last word counts terms that are infinite (+1) or NaN (+2^32).
  static constexpr size_t kWords = 23;
  using Words = std::array<int64_t, kWords>;

  void add(const double* terms, size_t n);
  void add(double term) { add(&term, 1); }
  void add(const ExactSum& other);
  // Every limb in [0, 2^32): equal sums have equal words.
  Words words() const;
  static ExactSum from(const Words& words);
  // The sum, rounded once to the nearest double, ties to even; infinite or NaN if a term is.
  double rounded() const;

 private:
  static constexpr size_t kLimbs = kWords - 1;
  static constexpr int kLowest = 1023 - 298;    // the biased exponent of 2^-298
  static constexpr size_t kMostAdds = 1 << 10;  // each adds less than 2^53 to a limb

  void carry();

  Words words_{};
  size_t adds_ = 0;  // since the last carry
};

}  // namespace bunkbed
