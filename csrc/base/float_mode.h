// Bits are a promise, also to a caller who set flush-to-zero (torch.set_flush_denormal does): the core computes with
// IEEE's default mode and gives the caller's back.
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
