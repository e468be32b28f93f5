// Frames: records in RAM. Residency, dirty bits, pins and the choice of a victim. Knows no disk and no directory.
//
// The victim (docs/design/architecture.md, "Plan, then execute"):
//   1. A frame that no coming batch wants, by GCLOCK with fine counts. A row wanted in a step gains kHit; each pass of
//      the hand subtracts 1; the hand evicts the first unpinned frame at zero. A row that was just loaded starts at
//      zero. So rows of the tail, which are most loads, are evicted after one pass, where a single hit would keep them
//      for kHit passes, and free their frames for rows that return. The cache stays within a few per cent of the best
//      static one. (With kHit 1 it missed 34 % more than that, and LRU 38 %: both kept a row of the tail about until
//      its next use; see benchmarks/cases/disk/policy.py.)
//   2. A recently evicted row leaves a ghost: a byte in a table as long as the cache. A row that returns while its
//      ghost is there starts with kReturn, because it was wanted twice in a short time. Without ghosts a hot set that
//      moves would take several times as long to settle.
//   3. Where few frames are unwanted and the hand would walk far to each: a frame that lost its last use recently, else
//      the frame whose next use is furthest (Belady's choice, within the window).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "base/memory.h"

namespace bunkbed {

// A frame's metadata: these 24 bytes, two of heat, two bits and a ghost, all inside the RAM budget.
struct FrameInfo {
  int64_t row;        // -1: the frame is free
  uint64_t position;  // of the same bytes in the log; kNoPosition when dirty or never stored
  uint32_t next_use;  // the coming batch that wants the row next (Window's numbers); past ones mean none
  uint8_t pinned;
  uint8_t loading;  // staging reads its record now
};
inline constexpr uint64_t kNoPosition = ~0ull;
inline constexpr uint32_t kNoUse = 0;

// Whole cache lines where that adds little; other records are padded to 8 bytes.
inline size_t padded_record(size_t record_bytes) {
  const size_t line = (record_bytes + 63) / 64 * 64;
  return line - record_bytes <= record_bytes / 16 ? line : (record_bytes + 7) / 8 * 8;
}

class Cache {
 public:
  // Reserves address space for `max_frames`; memory is taken as frames are first used. With record_bytes 0 the records
  // are elsewhere (a device cache) and pins are counted.
  Cache(size_t record_bytes, size_t max_frames);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  static constexpr uint8_t kHit = 32;        // passes of the hand that a use is worth
  static constexpr uint8_t kReturn = 16;     // initial count of a row that was evicted recently
  static constexpr uint8_t kMaxCount = 127;  // about four uses, so that a hot set that has passed is soon evicted
  // Bytes a frame costs: its record, padded for alignment, its FrameInfo, heat, dirty bit and ghost.
  static size_t frame_cost(size_t record_bytes) { return padded_record(record_bytes) + kInfoBytes; }

  std::byte* record(uint32_t frame) const { return records_ + size_t{frame} * stride_; }
  size_t stride() const { return stride_; }  // bytes from one frame's record to the next
  FrameInfo& info(uint32_t frame) const { return infos_[frame]; }
  void prefetch(uint32_t frame) const { __builtin_prefetch(&infos_[frame]); }
  void prefetch_ghost(int64_t row) const { __builtin_prefetch(ghost_of(row).place); }
  void prefetch_record(uint32_t frame, size_t bytes) const {
    for (size_t at = 0; at < bytes && at < 1024; at += 64) __builtin_prefetch(record(frame) + at, 0, 2);
    prefetch(frame);
  }
  void prefetch_heat(uint32_t frame) const { __builtin_prefetch(&heats_[frame]); }

  size_t max_frames() const { return max_frames_; }
  // Frames that may be in use; lowering it leaves frames above it in place until the table evicts them.
  size_t capacity() const { return capacity_; }
  void set_capacity(size_t frames) { capacity_ = frames; }
  size_t resident() const { return resident_; }
  size_t resident_bytes() const { return resident_ * (stride_ + kInfoBytes); }
  // One past the highest frame ever used since the last trim().
  uint32_t high_water() const { return high_water_; }

  // Takes a free frame, which is pinned and has no row until admit(). False when the capacity is reached: then evict a
  // victim first.
  bool allocate(uint32_t* frame);
  // Gives the frame a row, which counts as wanted in this step.
  void admit(uint32_t frame, int64_t row);
  // ---- Counted pins, only of a cache without record bytes, in addition to the pin bit of one operation. A frame that
  // is pinned so has no next use; the caller of the last unpin() sets it. Apart from FrameInfo for the reason that
  // heats are.
  void pin(uint32_t frame) {
    if (pins_[frame]++ > 0) return;
    ++num_pinned_;
    if (num_wanted_ > 0) forget_use(frame);
  }
  // Returns whether that was the last pin.
  bool unpin(uint32_t frame) {
    if (--pins_[frame] > 0) return false;
    --num_pinned_;
    return true;
  }
  uint16_t pins(uint32_t frame) const { return pins_[frame]; }
  size_t num_pinned() const { return num_pinned_; }
  // Prefetches what touch_alone() and pin() access.
  void prefetch_pin(uint32_t frame) const {
    prefetch_heat(frame);
    __builtin_prefetch(&pins_[frame], 1);
    if (num_wanted_ > 0) prefetch(frame);
  }
  // Gives another row to a frame that victim() chose and pin() took: release(), allocate() and admit() in one call.
  void reassign(uint32_t frame, int64_t row) {
    infos_[frame].row = row;
    infos_[frame].position = kNoPosition;
    set_dirty(frame, false);
    heats_[frame] = static_cast<uint16_t>(step_ << kStepShift);
    admit(frame, row);
  }

  // Chooses the next frame to evict, never a pinned one nor one that a batch up to `keep_until` wants. False when there
  // is none. The caller writes it back if it is dirty, updates the directory, and calls release().
  bool victim(uint32_t* frame, uint32_t keep_until = kNoUse);
  // Chooses up to `n` victims, which then have no next use. Fewer where there are no more.
  std::vector<uint32_t> victims(size_t n, uint32_t keep_until);
  // Frames that the hand has passed so far.
  uint64_t frames_passed() const { return frames_passed_; }
  void release(uint32_t frame);
  // Returns memory above the capacity to the system. Requires that the frames there were released.
  void trim();
  void clear();

  // Begins a step. Within one step a row counts as wanted once.
  void begin_step();
  // The number of the step, from 1 on.
  uint64_t step() const { return steps_; }
  // Counts the row as wanted now. Returns true where neither an earlier call in this step nor mark_staged() has counted
  // it. Safe from several threads at once.
  bool touch(uint32_t frame) {
    std::atomic_ref<uint16_t> heat(heats_[frame]);
    uint16_t seen = heat.load(std::memory_order_relaxed);
    if (seen >> kStepShift == step_) return false;
    // The first use of a staged row is the use that it was loaded for, and adds no count.
    const uint32_t count = (seen & kMaxCount) + ((seen & kStagedBit) != 0 ? 0 : kHit);
    const auto raised = static_cast<uint16_t>(step_ << kStepShift | (count < kMaxCount ? count : kMaxCount));
    // A failed exchange: another thread touched the row in this step.
    return heat.compare_exchange_strong(seen, raised, std::memory_order_relaxed) && (seen & kStagedBit) == 0;
  }
  // touch() without the exchange, which waits for every load and store before it. For frames that no other thread
  // touches meanwhile.
  bool touch_alone(uint32_t frame) {
    uint16_t& heat = heats_[frame];
    const uint16_t seen = heat;
    if (seen >> kStepShift == step_) return false;
    const uint32_t count = (seen & kMaxCount) + ((seen & kStagedBit) != 0 ? 0 : kHit);
    heat = static_cast<uint16_t>(step_ << kStepShift | (count < kMaxCount ? count : kMaxCount));
    return (seen & kStagedBit) == 0;
  }
  // The row was prefetched for a coming step, and counted.
  void mark_staged(uint32_t frame) { heats_[frame] = static_cast<uint16_t>(kStagedBit | count(frame)); }
  // Returns whether this is the first use since mark_staged(). Safe from several threads at once.
  bool take_staged(uint32_t frame) {
    std::atomic_ref<uint16_t> heat(heats_[frame]);
    if ((heat.load(std::memory_order_relaxed) & kStagedBit) == 0) return false;
    return (heat.fetch_and(static_cast<uint16_t>(~kStagedBit), std::memory_order_relaxed) & kStagedBit) != 0;
  }
  uint8_t count(uint32_t frame) const { return heats_[frame] & kMaxCount; }
  void set_count(uint32_t frame, uint8_t count) {
    heats_[frame] = static_cast<uint16_t>((heats_[frame] & ~uint16_t{kMaxCount}) | count);
  }

  // Whether the record in the frame is newer than the log's. A bit outside FrameInfo: an update of rows that are dirty
  // already, as nearly all are in a warm step, touches no other metadata of their frames.
  bool is_dirty(uint32_t frame) const { return (dirty_[frame / 64] >> frame % 64 & 1) != 0; }
  void set_dirty(uint32_t frame, bool dirty) {
    const uint64_t bit = uint64_t{1} << frame % 64;
    dirty_[frame / 64] = dirty ? dirty_[frame / 64] | bit : dirty_[frame / 64] & ~bit;
  }
  // The first dirty frame from this one on, or the first frozen one; high_water() where there is none.
  uint32_t next_unwritten(uint32_t frame, bool is_frozen) const;

  // ---- A commit. freeze() makes every dirty frame frozen and returns their number. The commit appends a frozen record
  // to the log before the record changes or its frame is evicted. Requires that no frame is frozen.
  size_t freeze();
  bool is_frozen(uint32_t frame) const { return (frozen_[frame / 64] >> frame % 64 & 1) != 0; }
  void set_written(uint32_t frame) { frozen_[frame / 64] &= ~(uint64_t{1} << frame % 64); }
  // After a failed commit: makes the frozen frames dirty again.
  void thaw();

  // ---- Coming uses. Batches are numbered from 1 upwards; `first_batch` is the oldest that is not over. A frame with
  // an earlier next use is unwanted.
  void set_first_batch(uint32_t batch);
  void set_next_use(uint32_t frame, uint32_t batch);
  // For a frame without a next use that no coming batch wants, when its last pin is taken back.
  void set_unwanted(uint32_t frame) {
    // victim() uses the list only where few frames are unwanted: more entries would be of no use.
    if (num_wanted_ > 0 && unwanted_.size() < resident_ / 8 + 16) unwanted_.push_back(frame);
  }
  bool is_wanted(uint32_t frame) const { return infos_[frame].next_use >= first_batch_; }
  size_t uses_bytes() const;  // of the lists of coming uses, in addition to the frames

 private:
  // A frame's heat: the step in which its row was last wanted (1 to kSteps in turn; 0 when that is long ago, see
  // begin_step), whether it was staged and not used since, its count. Two bytes outside FrameInfo: lookups and the hand
  // touch nothing else of most frames, and 8 MB for 4M frames stay in the processor's cache.
  static constexpr uint16_t kStagedBit = 128;
  static constexpr unsigned kStepShift = 8;
  static constexpr uint32_t kSteps = 255;
  static constexpr size_t kInfoBytes =
      sizeof(FrameInfo) + sizeof(uint16_t) + 1 /*ghost*/ + 1 /*dirty and frozen bits, rounded up*/;
  static constexpr uint32_t kBlock = 32;       // frames that the hand passes at once
  static constexpr uint32_t kCandidates = 96;  // frames at zero when the hand passed them
  bool lately_unwanted(uint32_t* frame);
  bool take_by_hand(uint32_t* frame);
  void walk(size_t* in_vain);
  struct Ghost {
    uint8_t* place;  // in ghosts_
    uint8_t print;   // the value there when this row has a ghost; never 0
  };
  Ghost ghost_of(int64_t row) const;
  bool furthest(uint32_t* frame, uint32_t keep_until);
  void forget_use(uint32_t frame);
  bool is_pinned(uint32_t frame) const { return infos_[frame].pinned || (pins_ != nullptr && pins_[frame] > 0); }

  size_t stride_;
  size_t max_frames_;
  size_t capacity_;
  size_t resident_ = 0;
  uint32_t high_water_ = 0;
  uint32_t hand_ = 0;
  uint64_t frames_passed_ = 0;
  size_t walked_ = 0;  // frames that the hand has passed since take_by_hand() reset both
  size_t taken_ = 0;   // frames that it has taken since then
  uint32_t num_candidates_ = 0, next_candidate_ = 0;
  uint32_t candidates_[kCandidates + 1];
  uint32_t sweep_ = 0;  // where begin_step() goes on
  uint32_t free_head_;  // released frames form a list through FrameInfo::position
  uint32_t step_ = 1;
  uint64_t steps_ = 1;
  std::byte* records_ = nullptr;
  FrameInfo* infos_ = nullptr;
  uint16_t* heats_ = nullptr;
  uint16_t* pins_ = nullptr;
  uint64_t* dirty_ = nullptr;
  uint64_t* frozen_ = nullptr;
  uint8_t* ghosts_ = nullptr;  // fingerprints of evicted rows, 0: none
  size_t records_bytes_;
  size_t infos_bytes_;
  size_t heats_bytes_;
  size_t dirty_bytes_;
  size_t ghosts_bytes_;

  uint32_t first_batch_ = 1;
  size_t num_wanted_ = 0;  // frames with a next use
  size_t num_pinned_ = 0;  // by pin()
  size_t num_chosen_ = 0;  // by victims(), while it chooses more
  // Frames by the batch that wants them next, [i] of batch first_batch_ + i. An entry is valid while the frame's
  // next_use agrees: moving a frame to another batch leaves the old entry behind.
  std::deque<BlockVector<uint32_t>> uses_;
  BlockVector<uint32_t> unwanted_;  // frames that lost their last use; valid while that is so
};

}  // namespace bunkbed
