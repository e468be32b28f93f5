#include "cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <string>

#include "error.h"

namespace bunkbed {

namespace {

constexpr uint32_t kNoFrame = ~0u;
constexpr size_t kHugePage = 2u << 20;
constexpr size_t kHugePagesFrom = 64u << 20;  // below, a half-used huge page would be a visible part of the budget

void* reserve(size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorKind::kMemory, "cannot reserve " + std::to_string(bytes) + " bytes of address space for the cache");
  }
  return memory;
}

// Frees whole pages of [from, end).
void give_back(std::byte* from, std::byte* end) {
  const auto begin = (reinterpret_cast<uintptr_t>(from) + 4095) / 4096 * 4096;
  const auto stop = reinterpret_cast<uintptr_t>(end) / 4096 * 4096;
  if (stop > begin) ::madvise(reinterpret_cast<void*>(begin), stop - begin, MADV_DONTNEED);
}

}  // namespace

Cache::Cache(size_t record_bytes, size_t max_frames)
    : stride_(padded(record_bytes)),
      max_frames_(std::min<size_t>(std::max<size_t>(1, max_frames), kNoFrame - 1)),
      capacity_(max_frames_),
      free_head_(kNoFrame),
      records_bytes_((max_frames_ * stride_ + kHugePage - 1) / kHugePage * kHugePage),
      infos_bytes_((max_frames_ * sizeof(FrameInfo) + 4095) / 4096 * 4096) {
  records_ = static_cast<std::byte*>(reserve(records_bytes_));
  infos_ = static_cast<FrameInfo*>(reserve(infos_bytes_));
#ifdef MADV_HUGEPAGE
  if (records_bytes_ >= kHugePagesFrom) ::madvise(records_, records_bytes_, MADV_HUGEPAGE);
#endif
}

Cache::~Cache() {
  ::munmap(records_, records_bytes_);
  ::munmap(infos_, infos_bytes_);
}

bool Cache::allocate(uint32_t* frame) {
  if (resident_ >= capacity_) return false;
  // Frames above a lowered capacity may still sit in the free list: drop them.
  while (free_head_ != kNoFrame && free_head_ >= capacity_) {
    free_head_ = static_cast<uint32_t>(infos_[free_head_].position);
  }
  if (free_head_ != kNoFrame) {
    *frame = free_head_;
    free_head_ = static_cast<uint32_t>(infos_[free_head_].position);
  } else {
    if (high_water_ >= capacity_) return false;
    *frame = high_water_++;
  }
  ++resident_;
  infos_[*frame] = FrameInfo{-1, kNoPosition, step_, 1, 0, 1, 0};
  return true;
}

bool Cache::victim(uint32_t* frame) {
  // At most kMaxCount + 1 rounds lower every unpinned frame to zero; one more means that all are pinned.
  const size_t limit = (size_t{kMaxCount} + 2) * high_water_;
  for (size_t looked = 0; looked < limit; ++looked) {
    if (hand_ >= high_water_) hand_ = 0;
    FrameInfo& info = infos_[hand_];
    if (info.row >= 0 && !info.pinned) {
      if (info.count == 0) {
        *frame = hand_++;
        return true;
      }
      --info.count;
    }
    ++hand_;
  }
  return false;
}

void Cache::release(uint32_t frame) {
  infos_[frame] = FrameInfo{-1, free_head_, 0, 0, 0, 0, 0};
  free_head_ = frame;
  --resident_;
}

void Cache::trim() {
  if (high_water_ <= capacity_) return;
  // Rebuild the free list without the frames that go.
  free_head_ = kNoFrame;
  for (uint32_t frame = static_cast<uint32_t>(capacity_); frame-- > 0;) {
    if (infos_[frame].row < 0) {
      infos_[frame].position = free_head_;
      free_head_ = frame;
    }
  }
  give_back(record(static_cast<uint32_t>(capacity_)), record(high_water_));
  give_back(reinterpret_cast<std::byte*>(infos_ + capacity_), reinterpret_cast<std::byte*>(infos_ + high_water_));
  high_water_ = static_cast<uint32_t>(capacity_);
  hand_ = 0;
}

void Cache::clear() {
  give_back(records_, record(high_water_));
  give_back(reinterpret_cast<std::byte*>(infos_), reinterpret_cast<std::byte*>(infos_ + high_water_));
  high_water_ = 0;
  hand_ = 0;
  resident_ = 0;
  free_head_ = kNoFrame;
}

}  // namespace bunkbed
