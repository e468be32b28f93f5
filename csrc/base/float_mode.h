// Gives the core IEEE's default float mode and restores the caller's mode afterwards. So bits do not change for a
// caller that set flush-to-zero (torch.set_flush_denormal does).
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace bunkbed {

class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() : before_(_mm_getcsr()) {
    if (before_ != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultFloatMode() {
    if (before_ != kDefault) _mm_setcsr(before_);
  }
#else
  DefaultFloatMode() = default;
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kDefault = 0x1f80;  // round to nearest, denormals kept, exceptions masked
  unsigned before_;
#endif
};

}  // namespace bunkbed
