#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>

namespace bunkbed {

namespace {

constexpr size_t kUnit = 256u << 10;
constexpr size_t kHugePage = 2u << 20;

// What a request of `bytes` takes: sizes vary a little from step to step, and must still find each other's blocks.
size_t rounded(size_t bytes) {
  const size_t unit = std::max(kUnit, bytes / 16 / kUnit * kUnit);
  return (bytes + unit - 1) / unit * unit;
}

struct Kept {
  std::mutex mutex;  // guards the rest
  struct Block {
    void* address;
    size_t bytes;
  };
  std::vector<Block> blocks;
  size_t bytes = 0;
};

Kept& kept() {
  static auto* instance = new Kept;  // leaked: arrays may be freed while the process goes down
  return *instance;
}

}  // namespace

void* allocate_block(size_t bytes) {
  if (bytes < kLargeBlock) {
    void* block = std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64));
    if (block == nullptr) throw std::bad_alloc();
    return block;
  }
  const size_t size = rounded(bytes);
  {
    Kept& pool = kept();
    const std::lock_guard guard(pool.mutex);
    const auto found = std::find_if(pool.blocks.begin(), pool.blocks.end(),
                                    [size](const Kept::Block& block) { return block.bytes == size; });
    if (found != pool.blocks.end()) {
      void* block = found->address;
      pool.blocks.erase(found);
      pool.bytes -= size;
      return block;
    }
  }
  void* block = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (size >= 4 * kHugePage) ::madvise(block, size, MADV_HUGEPAGE);
#endif
  return block;
}

void free_block(void* block, size_t bytes) noexcept {
  if (block == nullptr) return;
  if (bytes < kLargeBlock) {
    std::free(block);
    return;
  }
  const size_t size = rounded(bytes);
  Kept& pool = kept();
  const std::lock_guard guard(pool.mutex);
  try {
    pool.blocks.push_back({block, size});
    pool.bytes += size;
  } catch (const std::bad_alloc&) {
    ::munmap(block, size);
    return;
  }
  // The oldest go first: sizes nobody asks for any more.
  while (pool.bytes > kKeptBytes) {
    ::munmap(pool.blocks.front().address, pool.blocks.front().bytes);
    pool.bytes -= pool.blocks.front().bytes;
    pool.blocks.erase(pool.blocks.begin());
  }
}

}  // namespace bunkbed
