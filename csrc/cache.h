// Frames: records in RAM. Residency, dirty bits, pins and the choice of a victim; knows no disk and no directory.
//
// Eviction is GCLOCK: each frame carries a small count, raised once per step in which its row is wanted and lowered
// as the hand passes; the hand takes the first unpinned frame at zero. (Plain CLOCK missed 13 % more on Zipf ids;
// fast ageing loses the tail rows, which recur every few hundred steps: see ENGINE's last section.)
#pragma once

#include <cstddef>
#include <cstdint>

namespace bunkbed {

// What is known of the record in a frame; 24 bytes each, inside the RAM budget.
struct FrameInfo {
  int64_t row;        // -1: the frame is free
  uint64_t position;  // of the same bytes in the log; kNoPosition when dirty or never stored
  uint32_t step;      // the step (see Cache::begin_step) in which the row was last wanted
  uint8_t count;      // GCLOCK's
  uint8_t dirty;
  uint8_t pinned;
  uint8_t staged;  // kLoading while its record is being read by staging, kStaged until it is first wanted
};
inline constexpr uint64_t kNoPosition = ~0ull;
inline constexpr uint8_t kLoading = 1;
inline constexpr uint8_t kStaged = 2;

class Cache {
 public:
  // Reserves address space for `max_frames`; memory is taken as frames are first used.
  Cache(size_t record_bytes, size_t max_frames);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  static constexpr uint8_t kMaxCount = 15;
  // Bytes a frame costs: its record, padded for alignment, and its FrameInfo.
  static size_t frame_cost(size_t record_bytes) { return padded(record_bytes) + sizeof(FrameInfo); }

  std::byte* record(uint32_t frame) const { return records_ + size_t{frame} * stride_; }
  FrameInfo& info(uint32_t frame) const { return infos_[frame]; }
  void prefetch(uint32_t frame) const { __builtin_prefetch(&infos_[frame]); }

  size_t max_frames() const { return max_frames_; }
  // Frames that may be in use; lowering it leaves frames above it in place until the table evicts them.
  size_t capacity() const { return capacity_; }
  void set_capacity(size_t frames) { capacity_ = frames; }
  size_t resident() const { return resident_; }
  size_t resident_bytes() const { return resident_ * (stride_ + sizeof(FrameInfo)); }
  // One past the highest frame ever used since the last trim().
  uint32_t high_water() const { return high_water_; }

  // A free frame, or false when capacity is reached: then evict a victim first.
  bool allocate(uint32_t* frame);
  // The next frame to give up, or false when every frame is pinned. The caller writes it back if dirty, tells the
  // directory, and release()s it.
  bool victim(uint32_t* frame);
  void release(uint32_t frame);
  // Gives memory above the capacity back to the system; the frames there must have been released.
  void trim();
  void clear();

  // A step ends with an update; within one step a row counts as wanted once.
  void begin_step() { ++step_; }
  uint32_t step() const { return step_; }

 private:
  static size_t padded(size_t record_bytes) {
    // Whole cache lines for records that are near one anyway; small records are packed.
    const size_t line = (record_bytes + 63) / 64 * 64;
    return line - record_bytes <= record_bytes / 16 ? line : (record_bytes + 7) / 8 * 8;
  }

  size_t stride_;
  size_t max_frames_;
  size_t capacity_;
  size_t resident_ = 0;
  uint32_t high_water_ = 0;
  uint32_t hand_ = 0;
  uint32_t free_head_;  // released frames form a list through FrameInfo::position
  uint32_t step_ = 1;
  std::byte* records_ = nullptr;
  FrameInfo* infos_ = nullptr;
  size_t records_bytes_;
  size_t infos_bytes_;
};

}  // namespace bunkbed
