// Frames: records in RAM. Residency, dirty bits, pins and the choice of a victim; knows no disk and no directory.
//
// The victim (DESIGN section 5, "Plan, then execute"):
//   1. A frame no coming batch wants, by GCLOCK: each frame carries a small count, raised once per step in which its
//      row is wanted and lowered as the hand passes; the hand takes the first unpinned frame at zero. (Plain CLOCK
//      missed 13 % more on Zipf ids; fast ageing loses the tail rows, which recur every few hundred steps: see
//      ENGINE's last section.)
//   2. Where there are few of those and the hand would walk far to each: one that lost its last use not long ago, else the
//      frame whose next use is furthest (Belady's choice, within the window).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "memory.h"

namespace bunkbed {

// What is known of the record in a frame; 24 bytes each, two of heat and a dirty bit beside it, inside the RAM budget.
struct FrameInfo {
  int64_t row;        // -1: the frame is free
  uint64_t position;  // of the same bytes in the log; kNoPosition when dirty or never stored
  uint32_t next_use;  // the coming batch that wants the row next (Window's numbers); past ones mean none
  uint8_t pinned;
  uint8_t loading;  // its record is being read by staging
};
inline constexpr uint64_t kNoPosition = ~0ull;
inline constexpr uint32_t kNoUse = 0;

class Cache {
 public:
  // Reserves address space for `max_frames`; memory is taken as frames are first used.
  Cache(size_t record_bytes, size_t max_frames);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  static constexpr uint8_t kMaxCount = 15;
  // Bytes a frame costs: its record, padded for alignment, its FrameInfo, its heat and its dirty bit.
  static size_t frame_cost(size_t record_bytes) { return padded(record_bytes) + kInfoBytes; }

  std::byte* record(uint32_t frame) const { return records_ + size_t{frame} * stride_; }
  FrameInfo& info(uint32_t frame) const { return infos_[frame]; }
  void prefetch(uint32_t frame) const { __builtin_prefetch(&infos_[frame]); }
  void prefetch_heat(uint32_t frame) const { __builtin_prefetch(&heats_[frame]); }

  size_t max_frames() const { return max_frames_; }
  // Frames that may be in use; lowering it leaves frames above it in place until the table evicts them.
  size_t capacity() const { return capacity_; }
  void set_capacity(size_t frames) { capacity_ = frames; }
  size_t resident() const { return resident_; }
  size_t resident_bytes() const { return resident_ * (stride_ + kInfoBytes); }
  // One past the highest frame ever used since the last trim().
  uint32_t high_water() const { return high_water_; }

  // A free frame, or false when capacity is reached: then evict a victim first.
  bool allocate(uint32_t* frame);
  // The next frame to give up, or false when there is none: pinned frames stay, and so do those that a batch up to
  // `keep_until` wants. The caller writes it back if dirty, tells the directory, and release()s it.
  bool victim(uint32_t* frame, uint32_t keep_until = kNoUse);
  void release(uint32_t frame);
  // Gives memory above the capacity back to the system; the frames there must have been released.
  void trim();
  void clear();

  // A step ends with an update; within one step a row counts as wanted once.
  void begin_step() { step_ = (step_ + 1) & kStepMask; }
  // The row is wanted now. Returns whether that is news: not in this step yet, and not since mark_staged(), which
  // counted it. Safe from several threads at once.
  bool touch(uint32_t frame) {
    std::atomic_ref<uint16_t> heat(heats_[frame]);
    uint16_t seen = heat.load(std::memory_order_relaxed);
    if (seen >> kStepShift == step_) return false;
    const auto count = static_cast<uint16_t>(seen & kMaxCount);
    const auto raised = static_cast<uint16_t>(step_ << kStepShift | (count < kMaxCount ? count + 1 : count));
    // Who loses the exchange lost it to another touch of this step.
    return heat.compare_exchange_strong(seen, raised, std::memory_order_relaxed) && (seen & kStagedBit) == 0;
  }
  // The row was brought in for a step to come, and counted.
  void mark_staged(uint32_t frame) { heats_[frame] = static_cast<uint16_t>(stale_step() << kStepShift | kStagedBit | 1); }
  uint8_t count(uint32_t frame) const { return heats_[frame] & kMaxCount; }
  void set_count(uint32_t frame, uint8_t count) {
    heats_[frame] = static_cast<uint16_t>((heats_[frame] & ~uint16_t{kMaxCount}) | count);
  }

  // Whether the record in the frame is newer than the log's. A bit beside FrameInfo: an update of rows that are dirty
  // already, as nearly all are in a warm step, touches nothing else of their frames.
  bool is_dirty(uint32_t frame) const { return (dirty_[frame / 64] >> frame % 64 & 1) != 0; }
  void set_dirty(uint32_t frame, bool dirty) {
    const uint64_t bit = uint64_t{1} << frame % 64;
    dirty_[frame / 64] = dirty ? dirty_[frame / 64] | bit : dirty_[frame / 64] & ~bit;
  }

  // ---- Coming uses. Batches are numbered from 1 upwards; `first_batch` is the oldest that is not over: frames whose
  // next use lies before it are wanted by none.
  void set_first_batch(uint32_t batch);
  void set_next_use(uint32_t frame, uint32_t batch);
  bool is_wanted(uint32_t frame) const { return infos_[frame].next_use >= first_batch_; }
  size_t uses_bytes() const;  // of memory the coming uses take, beside the frames

 private:
  // A frame's heat: the step in which its row was last wanted (11 bits, enough to tell steps apart that follow each
  // other), whether it waits for its first use since it was staged, GCLOCK's count. Two bytes instead of a part of
  // FrameInfo: lookups touch nothing else of a frame, and 8 MB for 4M frames stay in the processor's cache.
  static constexpr uint16_t kStagedBit = 16;
  static constexpr unsigned kStepShift = 5;
  static constexpr uint32_t kStepMask = (1u << (16 - kStepShift)) - 1;
  static constexpr size_t kInfoBytes = sizeof(FrameInfo) + sizeof(uint16_t) + 1 /*the dirty bit, rounded up*/;
  uint32_t stale_step() const { return (step_ - 1) & kStepMask; }
  bool lately_unwanted(uint32_t* frame);
  bool furthest(uint32_t* frame, uint32_t keep_until);
  void forget_use(uint32_t frame);

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
  uint16_t* heats_ = nullptr;
  uint64_t* dirty_ = nullptr;
  size_t records_bytes_;
  size_t infos_bytes_;
  size_t heats_bytes_;
  size_t dirty_bytes_;

  uint32_t first_batch_ = 1;
  size_t num_wanted_ = 0;  // frames with a next use
  // Frames by the batch that wants them next, [i] of batch first_batch_ + i. An entry counts while its frame's next_use
  // says the same: moving a frame from one batch to another leaves the old entry behind.
  std::deque<BlockVector<uint32_t>> uses_;
  BlockVector<uint32_t> unwanted_;  // frames that lost their last use; an entry counts while that is so
};

}  // namespace bunkbed
