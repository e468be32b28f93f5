// Named places in the protocols where a test may make something happen: an error, the process's end, a delay. Always
// compiled in; one relaxed load each while none is armed.
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
  if (failpoints_armed.load(std::memory_order_relaxed)) [[unlikely]] reach_failpoint(name);
}

// At the `nth` time from now that the place is reached (1: the next) the action is taken, once; 0: every time. With an
// empty name all places are counted and nothing happens. Error(kInvalid) when there is no such place.
void arm_failpoint(const std::string& name, uint64_t nth, FailpointAction action, double delay_s);
void disarm_failpoints();
// How often each was reached since counting began; all names.
std::vector<std::pair<std::string, uint64_t>> failpoint_counts();

}  // namespace bunkbed
