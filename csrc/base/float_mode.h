// Gives the core IEEE's default float mode and restores the caller's mode afterwards. So bits do not change for a
// caller that set flush-to-zero (torch.set_flush_denormal does).
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace bunkbed {

#if defined(__x86_64__)

// The register alone: the C library's functions also save and load the older x87 unit, which takes longer.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : before_(_mm_getcsr()) {
    if (before_ != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultFloatMode() {
    if (before_ != kDefault) _mm_setcsr(before_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  static constexpr unsigned kDefault = 0x1f80;  // round to nearest, denormals kept, exceptions masked
  unsigned before_;
};

#else

class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&before_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::fenv_t before_;
};

#endif

}  // namespace bunkbed
