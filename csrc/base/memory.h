// Large blocks come from the system and not from the heap. Blocks of many MiB that are allocated and freed between
// those of torch would leave holes in the heap that no later block fits, and the process would exceed its RAM budget
// (measured: 110 MiB more than 256).
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <vector>

namespace bunkbed {

inline constexpr size_t kLargeBlock = 256u << 10;  // smaller ones come from the heap

// The system could not provide so many bytes.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) : text_("cannot allocate " + std::to_string(bytes) + " bytes of memory") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Aligned to 64 bytes at least; throws OutOfMemory. free_block() returns large blocks to the system at once.
void* allocate_block(size_t bytes);
void free_block(void* block, size_t bytes) noexcept;

// The same for arrays that callers get and free step after step. Freed blocks are kept for later arrays of about their
// size, so that a warm step touches no new pages. Blocks that stay unused are returned to the system.
void* allocate_array(size_t bytes);
void free_array(void* block, size_t bytes) noexcept;

// Allocators of vectors whose elements are not set when the vector is made or resized without a value.
template <typename T, void* (*kAllocate)(size_t), void (*kFree)(void*, size_t) noexcept>
struct UnsetAllocator {
  using value_type = T;
  template <typename U>
  struct rebind {
    using other = UnsetAllocator<U, kAllocate, kFree>;
  };
  UnsetAllocator() = default;
  template <typename U>
  UnsetAllocator(const UnsetAllocator<U, kAllocate, kFree>&) {}  // NOLINT: the standard asks for a conversion
  T* allocate(size_t n) { return static_cast<T*>(kAllocate(n * sizeof(T))); }
  void deallocate(T* block, size_t n) noexcept { kFree(block, n * sizeof(T)); }
  template <typename U>
  void construct(U* at) {
    ::new (static_cast<void*>(at)) U;
  }
  template <typename U, typename... Values>
  void construct(U* at, Values&&... values) {
    ::new (static_cast<void*>(at)) U(static_cast<Values&&>(values)...);
  }
  bool operator==(const UnsetAllocator&) const { return true; }
};

// Scratch memory of a table, kept by the table.
template <typename T>
using BlockVector = std::vector<T, UnsetAllocator<T, allocate_block, free_block>>;
// Arrays that are made and freed with each step.
template <typename T>
using ArrayVector = std::vector<T, UnsetAllocator<T, allocate_array, free_array>>;

// Blocks taken from the system so far, process-wide; a warm step takes none.
size_t blocks_mapped();

// Small long-lived blocks split the heap, and before glibc 2.39 posix_memalign cannot reuse a hole of exactly its size.
// A new segment's block was placed behind a tensor of the concurrent step, and the next tensor behind the block. So a
// process grew by a tensor with every segment (measured: 5 MiB, 8 MiB a second, a gibibyte above `ram=` in four
// minutes). Code that makes a long-lived block calls this. It returns true at most once a second: then
// return_heap_holes() is worth its milliseconds.
bool should_return_heap_holes();

// Returns the pages of the heap's holes to the system. Waits for the heap's locks: not under a table's lock.
void return_heap_holes() noexcept;

}  // namespace bunkbed
