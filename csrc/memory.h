// Large blocks straight from the system, kept apart from the heap: blocks of many MiB that come and go between
// torch's own would leave holes there which nobody can use, and a RAM budget would not hold (measured: 110 MiB on top
// of 256).
#pragma once

#include <cstddef>
#include <vector>

namespace bunkbed {

inline constexpr size_t kLargeBlock = 256u << 10;  // smaller ones come from the heap

// 64-byte aligned at least; throws std::bad_alloc. Given back to the system at once when freed.
void* allocate_block(size_t bytes);
void free_block(void* block, size_t bytes) noexcept;

// The same for arrays that are handed to callers and come back step after step: freed blocks are kept for the next one
// of about the size, so that a warm step touches no new pages. What was not wanted for a while goes.
void* allocate_array(size_t bytes);
void free_array(void* block, size_t bytes) noexcept;

// For the vectors that hold a table's scratch.
template <typename T>
struct BlockAllocator {
  using value_type = T;
  BlockAllocator() = default;
  template <typename U>
  BlockAllocator(const BlockAllocator<U>&) {}  // NOLINT: the standard asks for a conversion
  T* allocate(size_t n) { return static_cast<T*>(allocate_block(n * sizeof(T))); }
  void deallocate(T* block, size_t n) noexcept { free_block(block, n * sizeof(T)); }
  bool operator==(const BlockAllocator&) const { return true; }
};

template <typename T>
using BlockVector = std::vector<T, BlockAllocator<T>>;

}  // namespace bunkbed
