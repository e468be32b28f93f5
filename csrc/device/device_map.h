// Which row lies in which frame of a device cache: the id map that never lives in device memory, and the plans that
// executors follow (docs/design/architecture.md, "Plan, then execute"). Knows no device, no records and no files.
//
//   1. expect() enters the rows of a coming batch into the window, which ranks eviction and does nothing else.
//   2. plan() gives every row of a batch a frame and pins it. It says which rows to load into which frames, and which
//      dirty rows gave way: their records are written back before the frame is loaded. When it returns the map is as it
//      will be once all that is done: executors follow the plans in order.
//   3. mark_dirty() once the frames hold newer values than the table.
//   4. Plan::release() takes the pins back.
// Victims are chosen by Cache (which here holds no records), so by the same rule as in RAM: what no coming batch wants, by
// aged counts; else what is wanted last. A pinned frame is no victim, and nobody asks for its next use before the last
// pin goes: that is when it is looked up.
//
// A dirty victim is on its way down until arrived(): until then its row is held as if it still had its frame, so that a
// table with this holder refuses to give its old value to anyone. The memory follows the frames and what is under way,
// never the table.
//
// Any thread; one mutex guards all of it.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/memory.h"
#include "batch/batch.h"
#include "cache/cache.h"
#include "cache/window.h"
#include "device/holder.h"

namespace bunkbed {

struct DeviceStats {
  uint64_t hits = 0, misses = 0;  // unique rows of plans
  uint64_t evictions = 0;         // frames that rows gave way in
  uint64_t write_backs = 0;       // of them, dirty ones
  size_t frames = 0, resident = 0, pinned = 0, dirty = 0, leaving = 0;
  size_t plans = 0;  // with pins
  size_t window_batches = 0, bytes = 0;
};

class DeviceMap final : public Holder, public std::enable_shared_from_this<DeviceMap> {
  struct Private {};

 public:
  class Plan;
  struct PlanArrays;
  // `name`: of the table, for errors.
  static std::shared_ptr<DeviceMap> make(const std::string& name, size_t frames) {
    return std::make_shared<DeviceMap>(Private{}, name, frames);
  }
  DeviceMap(Private, std::string name, size_t frames);

  size_t frames() const { return num_frames_; }
  static constexpr uint32_t kWindowFull = ~0u;  // as Table's
  // The batch's number, from 1 on, or kWindowFull.
  uint32_t expect(const Batch& batch);
  // The batch will not come. Unknown numbers mean nothing.
  void forget(uint32_t number);

  // `number`: what expect() said of the batch, which then leaves the window; 0 where it was not expected. Null, and nothing
  // changed, where the batch would fit but for the pins of other plans: release some and call again. A batch of more rows
  // than there are frames is an error.
  std::unique_ptr<Plan> plan(const Batch& batch, uint32_t number);

  // The frames of these rows, -1 for rows that have none. Does not count as use.
  void find(const int64_t* rows, size_t n, int64_t* frames) const;
  void mark_dirty(const int64_t* frames, size_t n);
  void mark_clean(const int64_t* frames, size_t n);
  struct Dirty {
    ArrayVector<int64_t> rows, frames;  // in the order of the frames
  };
  Dirty dirty() const;
  // Every frame is free, written back or not, and nothing is on its way down. Refused while plans hold pins.
  void forget_all();
  DeviceStats stats() const;

  // ---- As a table sees it.
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
    uint32_t frame;    // kNowhere: the row is on its way down only
    uint32_t leaving;  // records of it on their way down
  };
  static constexpr int64_t kFree = -1;
  static constexpr uint32_t kNowhere = ~0u;
  static constexpr uint32_t kMaxPins = 0xffff;

  // Slots come in lines of kLine: a row is in the line its hash says or, where that is full, in the next that is not. So a
  // line with a free slot ends every search, and nearly every search ends in the line where it began.
  static constexpr size_t kLine = 4;
  size_t home(int64_t row) const;  // the first slot of its line
  size_t line_after(size_t line) const { return line + kLine == slots_.size() ? 0 : line + kLine; }
  // Bits of the line's slots that hold `row`, kFree for those that are free.
  unsigned slots_with(size_t line, int64_t row) const {
    const Slot* const slots = &slots_[line];
    unsigned found = 0;
    for (unsigned i = 0; i < kLine; ++i) found |= unsigned{slots[i].row == row} << i;
    return found;
  }
  size_t slot_of(int64_t row) const { return slot_from(home(row), row); }  // the row's, or the free one it would get
  size_t slot_from(size_t line, int64_t row) const {
    for (;; line = line_after(line)) {
      if (const unsigned own = slots_with(line, row); own != 0) return line + static_cast<size_t>(std::countr_zero(own));
      if (const unsigned free = slots_with(line, kFree); free != 0) return line + static_cast<size_t>(std::countr_zero(free));
    }
  }
  template <typename Visit>
  void visit_slots(const int64_t* rows, size_t n, const Visit& visit) const;
  struct Located;
  size_t locate(const int64_t* rows, size_t n, uint32_t* frames, Located* out = nullptr) const;
  void reserve(size_t more);
  void grow(size_t capacity);
  void insert(size_t place, int64_t row, uint32_t frame);
  void leave_frame(size_t place, bool is_dirty);
  void take_frames(size_t n, uint32_t* frames, size_t* num_fresh);
  void evict(const uint32_t* frames, size_t n, PlanArrays* arrays);
  void erase(size_t place);
  bool is_held(const Slot& slot) const { return slot.leaving > 0 || (slot.frame != kNowhere && cache_.is_dirty(slot.frame)); }
  size_t first_of(const int64_t* rows, size_t n, bool held) const;
  void set_dirty(uint32_t frame, bool dirty);
  void check_frames(const int64_t* frames, size_t n) const;
  void finish(uint32_t number);
  void clear();
  void release(const Plan& plan);
  void unpin(const Plan& plan);
  void undo(const Plan& plan);
  void mark_dirty(const Plan& plan);

  const std::string name_;
  const size_t num_frames_;
  mutable std::mutex mutex_;  // guards everything below
  Cache cache_;
  Window window_;
  BlockVector<Slot> slots_;  // whole lines
  size_t used_ = 0;          // slots that are not free
  size_t dirty_ = 0;         // frames
  size_t leaving_ = 0;
  size_t plans_ = 0;         // that hold pins
  DeviceStats counts_;       // of it, what only ever grows
  std::vector<int64_t> rows_;  // scratch of finish()
};

// int64, as the frameworks index.
struct DeviceMap::PlanArrays {
  ArrayVector<int64_t> frames;                    // of batch.unique(), in that order
  ArrayVector<int64_t> load_rows, load_frames;    // rows that were in no frame
  ArrayVector<int64_t> evict_rows, evict_frames;  // dirty victims: written back before the frame is loaded
};

// What becomes of one batch's rows. Its pins go with it, or earlier; the map lives as long as a plan of it.
class DeviceMap::Plan {
 public:
  ~Plan() { is_done_ ? release() : undo(); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Shared: an array that a caller keeps must not keep the pins.
  using Arrays = PlanArrays;
  const std::shared_ptr<Arrays>& arrays() const { return arrays_; }
  const Batch& batch() const { return *batch_; }  // which must live as long
  // The frame of every id of the batch, in its order.
  void positions(int64_t* out) const;
  // Gives the pins back; only the first call does.
  void release();
  // It was carried out: its frames hold what they should. A plan that goes before that, or before release(), was given up
  // by an error or an interrupt, and is undone.
  void done() { is_done_ = true; }
  // It could not be carried out. Rows that were to be loaded are in none again, and dirty rows that
  // gave way are back in theirs, unless the table has got them meanwhile; clean ones stay away, being no more than copies.
  // Releases the plan; nothing once that has happened. No other plan may have been made since.
  void undo();
  // Every frame of the plan holds a newer value than the table. An error once the plan is released: its frames may be
  // others' by then.
  void mark_dirty();

 private:
  friend class DeviceMap;
  Plan(std::shared_ptr<DeviceMap> map, const Batch* batch)
      : map_(std::move(map)), batch_(batch), arrays_(std::make_shared<Arrays>()) {}
  const std::shared_ptr<DeviceMap> map_;
  const Batch* const batch_;
  std::shared_ptr<Arrays> arrays_;
  ArrayVector<uint32_t> pinned_;  // a copy that no caller of arrays() can change
  std::atomic<bool> is_released_{true};  // until the pins are taken
  std::atomic<bool> is_done_{false};
};

}  // namespace bunkbed
