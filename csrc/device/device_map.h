// Maps the rows of a device cache to frames and makes the plans that executors follow (docs/design/architecture.md,
// "Plan, then execute"). The map itself is in host memory. Knows no device, no records and no files.
//
//   1. expect() enters the rows of a coming batch into the window, which ranks eviction and does nothing else.
//   2. plan() gives every row of a batch a frame and pins it. The plan lists which rows to load into which frames, and
//      which dirty rows were evicted: their records are written back before the frames are loaded. On return the map is
//      in the state after the plan's execution, so executors must follow the plans in order.
//   3. mark_dirty() once the frames hold newer values than the table.
//   4. Plan::release() takes the pins back.
// Cache, here without records, chooses victims by the same rule as in RAM: a frame that no coming batch wants, by aged
// counts; else the frame whose next use is furthest. A pinned frame is no victim and has no next use; unpin() looks the
// next use up when it takes the last pin back.
//
// The row of a dirty victim is *leaving* until arrived(). Until then the row is held as if it still had its frame, so
// that a table with this cache refuses to return its old value. The map's memory grows with the frames and the leaving
// rows, not with the table.
//
// Thread-safe; one mutex guards all of it.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/mutex.h"
#include "batch/batch.h"
#include "cache/cache.h"
#include "cache/window.h"
#include "device/device_cache.h"

namespace bunkbed {

struct DeviceStats {
  uint64_t hits = 0, misses = 0;  // unique rows of plans
  uint64_t evictions = 0;         // rows that were evicted
  uint64_t write_backs = 0;       // evictions of dirty rows
  size_t frames = 0, resident = 0, pinned = 0, dirty = 0, leaving = 0;
  size_t plans = 0;  // that hold pins
  size_t window_batches = 0, bytes = 0;
};

class DeviceMap final : public DeviceCache, public std::enable_shared_from_this<DeviceMap> {
  struct Private {};

 public:
  class Plan;
  struct PlanArrays;
  // `name`: the table's, for error messages.
  static std::shared_ptr<DeviceMap> make(const std::string& name, size_t frames) {
    return std::make_shared<DeviceMap>(Private{}, name, frames);
  }
  DeviceMap(Private, std::string name, size_t frames);

  size_t frames() const { return num_frames_; }
  static constexpr uint32_t kWindowFull = ~0u;  // as Table::kWindowFull
  // Returns the batch's number, from 1 on, or kWindowFull.
  uint32_t expect(const Batch& batch);
  // Removes a batch that will not come. Ignores unknown numbers.
  void forget(uint32_t number);

  // `number`: the result of expect() for the batch, which then leaves the window; 0 where it was not expected. Returns
  // null and changes nothing where the pins of other plans leave too few frames: release some and call again. A batch
  // with more rows than there are frames is an error.
  std::unique_ptr<Plan> plan(const Batch& batch, uint32_t number);

  // Finds the frames of these rows, -1 for a row that has none. Does not count as use.
  void find(const int64_t* rows, size_t n, int64_t* frames) const;
  void mark_dirty(const int64_t* frames, size_t n);
  void mark_clean(const int64_t* frames, size_t n);
  struct Dirty {
    ArrayVector<int64_t> rows, frames;  // in the order of the frames
  };
  Dirty dirty() const;
  // Frees every frame, written back or not; afterwards no row is leaving. An error while plans hold pins.
  void forget_all();
  DeviceStats stats() const;

  // ---- DeviceCache: called by the table.
  size_t num_held() const override;
  size_t max_held() const override { return num_frames_; }
  size_t num_in_use() const override;
  size_t first_held(const int64_t* rows, size_t n) const override;
  size_t first_not_held(const int64_t* rows, size_t n) const override;
  size_t give_up(const int64_t* rows, size_t n) override;
  size_t give_up_all() override;
  void arrived(const int64_t* rows, size_t n) override;

 private:
  struct Slot {
    int64_t row;       // kFree: none
    uint32_t frame;    // kNowhere: the row has no frame and is leaving
    uint32_t leaving;  // its records that are on their way to the table
  };
  static constexpr int64_t kFree = -1;
  static constexpr uint32_t kNowhere = ~0u;
  static constexpr uint32_t kMaxPins = 0xffff;

  // Slots come in lines of kLine: a row is in the line of its hash or, where that is full, in the next line that is
  // not. So a line with a free slot ends every search, and nearly every search ends in its first line.
  static constexpr size_t kLine = 4;
  size_t home(int64_t row) const REQUIRES(mutex_);  // the first slot of its line
  size_t line_after(size_t line) const REQUIRES(mutex_) { return line + kLine == slots_.size() ? 0 : line + kLine; }
  // Returns a bit for each slot of the line that holds `row`; with `row` = kFree, for each free slot.
  unsigned slots_with(size_t line, int64_t row) const REQUIRES(mutex_) {
    const Slot* const slots = &slots_[line];
    unsigned found = 0;
    for (unsigned i = 0; i < kLine; ++i) found |= unsigned{slots[i].row == row} << i;
    return found;
  }
  // the row's, or the free one it would get
  size_t slot_of(int64_t row) const REQUIRES(mutex_) { return slot_from(home(row), row); }
  size_t slot_from(size_t line, int64_t row) const REQUIRES(mutex_) {
    for (;; line = line_after(line)) {
      if (const unsigned own = slots_with(line, row); own != 0)
        return line + static_cast<size_t>(std::countr_zero(own));
      if (const unsigned free = slots_with(line, kFree); free != 0)
        return line + static_cast<size_t>(std::countr_zero(free));
    }
  }
  template <typename Visit>
  void visit_slots(const int64_t* rows, size_t n, const Visit& visit) const REQUIRES(mutex_);
  struct Located;
  size_t locate(const int64_t* rows, size_t n, uint32_t* frames, Located* out = nullptr) const REQUIRES(mutex_);
  void reserve(size_t more) REQUIRES(mutex_);
  void grow(size_t capacity) REQUIRES(mutex_);
  void insert(size_t place, int64_t row, uint32_t frame) REQUIRES(mutex_);
  void leave_frame(size_t place, bool is_dirty) REQUIRES(mutex_);
  void take_frames(size_t n, uint32_t* frames, size_t* num_fresh) REQUIRES(mutex_);
  void evict(const uint32_t* frames, size_t n, PlanArrays* arrays) REQUIRES(mutex_);
  void erase(size_t place) REQUIRES(mutex_);
  bool is_held(const Slot& slot) const REQUIRES(mutex_) {
    return slot.leaving > 0 || (slot.frame != kNowhere && cache_.is_dirty(slot.frame));
  }
  size_t first_of(const int64_t* rows, size_t n, bool held) const;
  void set_dirty(uint32_t frame, bool dirty) REQUIRES(mutex_);
  void check_frames(const int64_t* frames, size_t n) const REQUIRES(mutex_);
  void finish(uint32_t number) REQUIRES(mutex_);
  void clear() REQUIRES(mutex_);
  void release(const Plan& plan);
  void unpin(const Plan& plan) REQUIRES(mutex_);
  void undo(const Plan& plan);
  void mark_dirty(const Plan& plan);

  const std::string name_;
  const size_t num_frames_;
  mutable Mutex mutex_;
  Cache cache_ GUARDED_BY(mutex_);
  Window window_ GUARDED_BY(mutex_);
  BlockVector<Slot> slots_ GUARDED_BY(mutex_);  // whole lines
  size_t used_ GUARDED_BY(mutex_) = 0;          // slots that are not free
  size_t dirty_ GUARDED_BY(mutex_) = 0;         // frames
  size_t leaving_ GUARDED_BY(mutex_) = 0;
  size_t plans_ GUARDED_BY(mutex_) = 0;           // that hold pins
  DeviceStats counts_ GUARDED_BY(mutex_);         // only hits, misses, evictions and write_backs
  std::vector<int64_t> rows_ GUARDED_BY(mutex_);  // scratch of forget() and evict()
};

// int64, the index type of the frameworks.
struct DeviceMap::PlanArrays {
  ArrayVector<int64_t> frames;                    // of batch.unique(), in that order
  ArrayVector<int64_t> load_rows, load_frames;    // rows that were in no frame
  ArrayVector<int64_t> evict_rows, evict_frames;  // dirty victims: written back before the frame is loaded
};

// The frames, loads and evictions of one batch. The destructor takes the pins back unless release() or undo() did. A
// plan keeps its map alive.
class DeviceMap::Plan {
 public:
  ~Plan() { is_done_ ? release() : undo(); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Shared, so that a caller can keep an array without keeping the pins.
  using Arrays = PlanArrays;
  const std::shared_ptr<Arrays>& arrays() const { return arrays_; }
  const Batch& batch() const { return *batch_; }  // must outlive the plan
  // Writes the frame of every id of the batch, in the batch's order.
  void positions(int64_t* out) const;
  // Writes all that a device needs to know of the batch: frames, load_frames, evict_frames, and what
  // Batch::write_numbers() writes, with positions() in place of inverse(). Returns what that returns.
  size_t write_numbers(size_t most, int64_t* out) const;
  size_t max_numbers(size_t most) const {
    return arrays_->frames.size() + arrays_->load_frames.size() + arrays_->evict_frames.size() +
           batch_->max_numbers(most);
  }
  // Takes the pins back; later calls do nothing.
  void release();
  // Call after the loads were executed. A plan that is destroyed before done() or release() was abandoned by an error
  // or an interrupt, and is undone.
  void done() { is_done_ = true; }
  // Reverts a plan that could not be executed, and releases it: rows to be loaded have no frame again, and evicted
  // dirty rows get their frames back unless the table has received them meanwhile. Evicted clean rows were only copies
  // and stay evicted. Does nothing after release(). Requires that no other plan was made since.
  void undo();
  // Marks every frame of the plan as newer than the table. An error after release(): other rows may be in the frames.
  void mark_dirty();

 private:
  friend class DeviceMap;
  Plan(std::shared_ptr<DeviceMap> map, const Batch* batch)
      : map_(std::move(map)), batch_(batch), arrays_(std::make_shared<Arrays>()) {}
  const std::shared_ptr<DeviceMap> map_;
  const Batch* const batch_;
  std::shared_ptr<Arrays> arrays_;
  ArrayVector<uint32_t> pinned_;         // a copy that no caller of arrays() can change
  std::atomic<bool> is_released_{true};  // true until plan() takes the pins
  std::atomic<bool> is_done_{false};
};

}  // namespace bunkbed
