#include "base/mutex.h"

#ifndef NDEBUG
#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace bunkbed {

namespace {

constexpr size_t kLevels = static_cast<size_t>(LockLevel::kTesting) + 1;
const char* const kNames[kLevels] = {"table", "part", "local", "memory", "testing"};
thread_local bool is_held[kLevels];

}  // namespace

void enter_lock(LockLevel level) {
  const auto wanted = static_cast<size_t>(level);
  for (size_t held = wanted; held < kLevels; ++held) {
    if (!is_held[held]) continue;
    std::fprintf(stderr, "bunkbed: a thread takes a lock of the level '%s' while it holds one of the level '%s'\n",
                 kNames[wanted], kNames[held]);
    std::abort();
  }
  is_held[wanted] = true;
}

void leave_lock(LockLevel level) { is_held[static_cast<size_t>(level)] = false; }

}  // namespace bunkbed
#endif
