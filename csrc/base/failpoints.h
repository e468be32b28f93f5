// Named places in the protocols where a test can cause an error, the end of the process or a delay. Always compiled in.
// Each costs one relaxed load while none is armed.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bunkbed {

enum class FailpointAction { kCount, kError, kDie, kDelay };

inline std::atomic<bool> failpoints_armed{false};
void reach_failpoint(const char* name);

inline void failpoint(const char* name) {
  if (failpoints_armed.load(std::memory_order_relaxed)) [[unlikely]]
    reach_failpoint(name);
}

// Takes the action once, at the `nth` time from now that the place is reached (1: the next), or at each time (0). An
// empty name counts all places and takes no action. Error(kInvalid) for an unknown name.
void arm_failpoint(const std::string& name, uint64_t nth, FailpointAction action, double delay_s);
void disarm_failpoints();
// Returns how often each place was reached since arm_failpoint(), for all names.
std::vector<std::pair<std::string, uint64_t>> failpoint_counts();

}  // namespace bunkbed
