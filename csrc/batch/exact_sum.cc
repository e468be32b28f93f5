#include "batch/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace bunkbed {

void ExactSum::add(const double* terms, size_t n) {
  constexpr uint64_t kLow = 0xffffffff;
  while (n > 0) {
    const size_t count = std::min(n, kMostAdds - adds_);
    for (size_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<uint64_t>(terms[i]);
      const auto exponent = static_cast<int>(bits >> 52 & 0x7ff);
      const int place = exponent - kLowest;
      if (place < 0) continue;  // 0
      if (exponent == 0x7ff) {
        words_[kLimbs] += std::isnan(terms[i]) ? int64_t{1} << 32 : 1;
        continue;
      }
      const uint64_t mantissa = (bits & ((uint64_t{1} << 52) - 1)) | uint64_t{1} << 52;
      const auto limb = static_cast<size_t>(place >> 5);
      const int shift = place & 31;
      words_[limb] += static_cast<int64_t>(mantissa << shift & kLow);
      words_[limb + 1] += static_cast<int64_t>(mantissa >> (32 - shift));
    }
    terms += count;
    n -= count;
    adds_ += count;
    if (adds_ == kMostAdds) carry();
  }
}

void ExactSum::add(const ExactSum& other) {
  const Words theirs = other.words();
  carry();
  for (size_t i = 0; i < kWords; ++i) words_[i] += theirs[i];
  carry();
}

void ExactSum::carry() {
  for (size_t i = 0; i + 1 < kLimbs; ++i) {
    words_[i + 1] += words_[i] >> 32;
    words_[i] &= 0xffffffff;
  }
  adds_ = 0;
}

ExactSum::Words ExactSum::words() const {
  ExactSum copy = *this;
  copy.carry();
  return copy.words_;
}

ExactSum ExactSum::from(const Words& words) {
  ExactSum sum;
  sum.words_ = words;
  sum.carry();
  return sum;
}

double ExactSum::rounded() const {
  const Words limbs = words();
  if (limbs[kLimbs] >> 32 != 0) return std::numeric_limits<double>::quiet_NaN();
  if (limbs[kLimbs] != 0) return std::numeric_limits<double>::infinity();
  size_t top = kLimbs;
  while (top > 0 && limbs[top - 1] == 0) --top;
  if (top == 0) return 0.0;
  // The highest 64 bits; the last one is also set where a lower bit is, which decides ties.
  const auto limb = [&](size_t below) { return below < top ? static_cast<uint64_t>(limbs[top - 1 - below]) : 0; };
  const int zeros = std::countl_zero(static_cast<uint32_t>(limb(0)));
  uint64_t high = limb(0) << 32 | limb(1);
  uint64_t rest = limb(2);
  if (zeros > 0) {
    high = high << zeros | rest >> (32 - zeros);
    rest = rest << zeros & 0xffffffff;
  }
  bool sticky = rest != 0;
  for (size_t i = 0; i + 3 < top; ++i) sticky |= limbs[i] != 0;
  high |= static_cast<uint64_t>(sticky);
  // `high` has 64 bits, so the conversion rounds it to 53: the sum is rounded once, by the mode of the thread.
  const int exponent = 32 * (static_cast<int>(top) - 2) - zeros - (1075 - kLowest);
  return std::ldexp(static_cast<double>(high), exponent);
}

}  // namespace bunkbed
