// System calls of the real filesystem that may be interrupted or move fewer bytes than asked. A fault backend can make
// the next call of its thread do so. A backend of files cannot: these cases are handled below File.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

namespace bunkbed::vfs {

// What the next call of this thread does instead of the whole operation.
enum class Mishap { kNone, kInterrupt, kShort };

inline Mishap& next_mishap() {
  static thread_local Mishap mishap = Mishap::kNone;
  return mishap;
}

// True: fail with EINTR.
inline bool is_interrupted() {
  if (next_mishap() != Mishap::kInterrupt) return false;
  next_mishap() = Mishap::kNone;
  errno = EINTR;
  return true;
}

// The bytes that a call asks for when it must be short: half, in whole sectors, at least one sector.
inline size_t shortened(size_t n) {
  if (next_mishap() != Mishap::kShort) return n;
  next_mishap() = Mishap::kNone;
  constexpr size_t kSector = 512;
  return std::min(n, std::max(kSector, n / 2 / kSector * kSector));
}

inline ssize_t read_some(int fd, void* data, size_t n, off_t offset) {
  return is_interrupted() ? -1 : ::pread(fd, data, shortened(n), offset);
}

inline ssize_t write_some(int fd, const void* data, size_t n, off_t offset) {
  return is_interrupted() ? -1 : ::pwrite(fd, data, shortened(n), offset);
}

// Repeats a call until it is not interrupted.
template <typename Call>
auto uninterrupted(Call&& call) {
  for (;;) {
    const auto result = is_interrupted() ? static_cast<decltype(call())>(-1) : call();
    if (result != static_cast<decltype(call())>(-1) || errno != EINTR) return result;
  }
}

}  // namespace bunkbed::vfs
