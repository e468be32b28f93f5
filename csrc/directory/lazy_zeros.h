#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <string>

#include "base/error.h"

namespace bunkbed {

inline constexpr size_t kHugePagesFrom = 8u << 20;
inline constexpr size_t kHugePagesTo = 256u << 20;

// Zeroed memory that takes no RAM until it is touched. The budget counts all of it.
class LazyZeros {
 public:
  explicit LazyZeros(size_t bytes) : bytes_(bytes) { map(); }
  ~LazyZeros() { ::munmap(memory_, bytes_); }
  LazyZeros(const LazyZeros&) = delete;
  LazyZeros& operator=(const LazyZeros&) = delete;
  void clear() {
    ::munmap(memory_, bytes_);
    map();
  }
  std::byte* get() const { return static_cast<std::byte*>(memory_); }

 private:
  void map() {
    memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) {
      throw Error(ErrorKind::kMemory, "cannot map a directory of " + std::to_string(bytes_) + " bytes");
    }
#ifdef MADV_HUGEPAGE
    // A batch touches one entry in each of many pages, and with small pages each costs a walk through the page tables.
    // Not for larger memory, where a few rows would make most of it resident.
    if (bytes_ >= kHugePagesFrom && bytes_ < kHugePagesTo) ::madvise(memory_, bytes_, MADV_HUGEPAGE);
#endif
  }
  size_t bytes_;
  void* memory_ = nullptr;
};

}  // namespace bunkbed
