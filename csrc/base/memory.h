// Large blocks straight from the system, kept apart from the heap: blocks of many MiB that come and go between
// torch's own would leave holes there which nobody can use, and a RAM budget would not hold (measured: 110 MiB on top
// of 256).
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <vector>

namespace bunkbed {

inline constexpr size_t kLargeBlock = 256u << 10;  // smaller ones come from the heap

// The system has not so many bytes of memory.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) : text_("cannot allocate " + std::to_string(bytes) + " bytes of memory") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// 64-byte aligned at least; throws OutOfMemory. Given back to the system at once when freed.
void* allocate_block(size_t bytes);
void free_block(void* block, size_t bytes) noexcept;

// The same for arrays that are handed to callers and come back step after step: freed blocks are kept for the next one
// of about the size, so that a warm step touches no new pages. What was not wanted for a while goes.
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

// A table's scratch, kept by the table.
template <typename T>
using BlockVector = std::vector<T, UnsetAllocator<T, allocate_block, free_block>>;
// What comes and goes with each step.
template <typename T>
using ArrayVector = std::vector<T, UnsetAllocator<T, allocate_array, free_array>>;

// Blocks taken from the system so far, process-wide; a warm step takes none.
size_t blocks_mapped();

// Small blocks that live long part the heap, and before glibc 2.39 the holes between them do not serve posix_memalign:
// asked for so many bytes, it looks for a few more. A new segment of a log comes to lie behind a tensor of the step
// beside it, and the next tensor behind the segment, so a process grew by a tensor with every segment (measured: 5 MiB,
// 8 MiB a second, a gibibyte beside `ram=` in four minutes). Whoever makes what lives long calls this for each; it is
// true every now and then, no more than once a second: then return_heap_holes() is worth its milliseconds.
bool should_return_heap_holes();

// Gives the pages of the heap's holes back to the system. Waits for the heap's locks: not under the table's.
void return_heap_holes() noexcept;

}  // namespace bunkbed
