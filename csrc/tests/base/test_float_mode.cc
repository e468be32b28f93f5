// A caller that flushes denormal numbers to zero gets the core's bits, and keeps its mode.
#include "base/float_mode.h"

#include <cstdint>
#include <limits>

#include "tests/check.h"

using namespace bunkbed;

namespace {

// Flushes denormal numbers of this thread to zero, as torch.set_flush_denormal does, until it ends.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushToZero() { _mm_setcsr(before_); }
  unsigned before_;
#elif defined(__aarch64__)
  FlushToZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | uint64_t{1} << 24) : "memory");
  }
  ~FlushToZero() { asm volatile("msr fpcr, %0" : : "r"(before_) : "memory"); }
  uint64_t before_;
#else
#error "how this processor flushes denormal numbers is not written here"
#endif
};

// Not known to the compiler, so that the processor computes.
float half_of_the_smallest_normal() {
  volatile float smallest = std::numeric_limits<float>::min(), half = 0.5F;
  return smallest * half;
}

}  // namespace

TEST(float_mode_keeps_denormal_numbers_and_restores_the_mode_of_the_caller) {
  CHECK(half_of_the_smallest_normal() > 0);
  {
    const FlushToZero flushes;
    CHECK_EQ(half_of_the_smallest_normal(), 0.0F);
    {
      const DefaultFloatMode mode;
      CHECK(half_of_the_smallest_normal() > 0);
    }
    CHECK_EQ(half_of_the_smallest_normal(), 0.0F);
  }
  CHECK(half_of_the_smallest_normal() > 0);
}
