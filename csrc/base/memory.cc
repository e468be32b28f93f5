#include "base/memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "base/mutex.h"

namespace bunkbed {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 64;  // a line of the processor's caches
constexpr size_t kHugePagesFrom = 4u << 20;
constexpr size_t kKeptBytes = 64u << 20;  // freed arrays kept, process-wide
constexpr size_t kMadeUntilReturn = 8;    // each may leave a hole of the size of a tensor
constexpr uint64_t kKeptFor = 512;        // a kept array is unmapped after so many allocations

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Rounds up to an eighth of the power of two below. Sizes vary a little from step to step (the unique rows of a batch),
// and a freed block must fit the next step.
size_t rounded(size_t bytes) {
  const size_t unit = std::max(kPage, std::bit_floor(bytes) / 8);
  return (bytes + unit - 1) / unit * unit;
}

std::atomic<size_t> mapped{0};

void* map(size_t bytes) {
  mapped.fetch_add(1, std::memory_order_relaxed);
  void* block = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) throw OutOfMemory(bytes);
#ifdef MADV_HUGEPAGE
  if (bytes >= kHugePagesFrom) ::madvise(block, bytes, MADV_HUGEPAGE);
#endif
  return block;
}

// Aligned by hand: glibc's aligned_alloc before 2.39 leaves slivers between its blocks, which keep freed blocks from
// merging (sourceware bugs 14581 and 30723): a table of 16 MiB took 24 after 800 steps. The byte before the block is
// the block's distance from malloc's address.
void* from_heap(size_t bytes) {
  auto* const given = static_cast<std::byte*>(std::malloc(bytes + kAlignment));
  if (given == nullptr) throw OutOfMemory(bytes);
  const size_t ahead = kAlignment - reinterpret_cast<uintptr_t>(given) % kAlignment;
  given[ahead - 1] = static_cast<std::byte>(ahead);
  return given + ahead;
}

void to_heap(void* block) noexcept {
  auto* const aligned = static_cast<std::byte*>(block);
  std::free(aligned - std::to_integer<size_t>(aligned[-1]));
}

struct Kept {
  struct Block {
    void* address;
    size_t bytes;
    uint64_t since;
  };
  Mutex mutex{LockLevel::kMemory};  // guards the rest
  std::vector<Block> blocks;
  size_t bytes = 0;
  uint64_t handed_out = 0;

  // Unmaps the oldest blocks first.
  void drop_while(auto&& is_too_much) {
    while (!blocks.empty() && is_too_much(blocks.front())) {
      ::munmap(blocks.front().address, blocks.front().bytes);
      bytes -= blocks.front().bytes;
      blocks.erase(blocks.begin());
    }
  }
};

Kept& kept() {
  static auto* instance = new Kept;  // leaked: arrays may be freed at process exit
  return *instance;
}

}  // namespace

size_t blocks_mapped() { return mapped.load(std::memory_order_relaxed); }

bool should_return_heap_holes() {
  using Clock = std::chrono::steady_clock;
  static Mutex mutex{LockLevel::kMemory};  // guards the rest
  static size_t made = 0;
  static Clock::time_point last;
  const MutexLock guard(mutex);
  if (++made < kMadeUntilReturn || Clock::now() - last < std::chrono::seconds(1)) return false;
  made = 0;
  last = Clock::now();
  return true;
}

void return_heap_holes() noexcept {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

void* allocate_block(size_t bytes) { return bytes < kLargeBlock ? from_heap(bytes) : map(whole_pages(bytes)); }

void free_block(void* block, size_t bytes) noexcept {
  if (block == nullptr) return;
  if (bytes < kLargeBlock) {
    to_heap(block);
  } else {
    ::munmap(block, whole_pages(bytes));
  }
}

void* allocate_array(size_t bytes) {
  if (bytes < kLargeBlock) return from_heap(bytes);
  const size_t size = rounded(bytes);
  {
    Kept& pool = kept();
    const MutexLock guard(pool.mutex);
    ++pool.handed_out;
    const auto found = std::find_if(pool.blocks.begin(), pool.blocks.end(),
                                    [size](const Kept::Block& block) { return block.bytes == size; });
    if (found != pool.blocks.end()) {
      void* block = found->address;
      pool.blocks.erase(found);
      pool.bytes -= size;
      return block;
    }
  }
  return map(size);
}

void free_array(void* block, size_t bytes) noexcept {
  if (block == nullptr) return;
  if (bytes < kLargeBlock) {
    to_heap(block);
    return;
  }
  const size_t size = rounded(bytes);
  Kept& pool = kept();
  const MutexLock guard(pool.mutex);
  try {
    pool.blocks.push_back({block, size, pool.handed_out});
    pool.bytes += size;
  } catch (const std::bad_alloc&) {
    ::munmap(block, size);
    return;
  }
  pool.drop_while([&pool](const Kept::Block& oldest) {
    return pool.bytes > kKeptBytes || oldest.since + kKeptFor < pool.handed_out;
  });
}

}  // namespace bunkbed
