#include "device/device_map.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/mutex.h"
#include "directory/directory.h"

namespace bunkbed {

namespace {
constexpr size_t kAhead = 32;  // how many rows or frames ahead their memory is prefetched

// Slots for so many rows: at most half are in use.
size_t slots_for(size_t rows) { return 2 * rows + 16; }
}  // namespace

DeviceMap::DeviceMap(Private, std::string name, size_t frames)
    : name_(std::move(name)), num_frames_(frames), cache_(0, frames) {
  if (frames == 0 || frames != cache_.max_frames()) {
    throw Error(ErrorKind::kInvalid,
                "table '" + name_ + "': a device cache has 1 to 2**32 - 2 frames, got " + std::to_string(frames));
  }
}

// ---- The id map

size_t DeviceMap::home(int64_t row) const {
  return kLine * static_cast<size_t>((static_cast<unsigned __int128>(mix_id(row)) * (slots_.size() / kLine)) >> 64);
}

// Calls visit(i, place) with the slot of rows[i], or the free one it would get. Prefetches lines one run ahead, as each
// is a miss of the processor's cache. visit() may change slots of the same run.
template <typename Visit>
void DeviceMap::visit_slots(const int64_t* rows, size_t n, const Visit& visit) const {
  constexpr size_t kRun = 16;
  size_t homes[2 * kRun];  // of a run and of the next one
  const auto ask = [&](size_t begin) REQUIRES(mutex_) {
    for (size_t i = begin; i < std::min(n, begin + kRun); ++i) {
      homes[i % (2 * kRun)] = home(rows[i]);
      __builtin_prefetch(&slots_[homes[i % (2 * kRun)]], 1);
    }
  };
  ask(0);
  for (size_t begin = 0; begin < n; begin += kRun) {
    ask(begin + kRun);
    for (size_t i = begin; i < std::min(n, begin + kRun); ++i) visit(i, slot_from(homes[i % (2 * kRun)], rows[i]));
  }
}

// The result of locate() for plan(): lists, so that the loops of plan() need no branch on whether a row is missing.
struct DeviceMap::Located {
  explicit Located(size_t n) : hits(n), missing(n), lines(n) {}
  ArrayVector<uint32_t> hits;     // frames of the rows that have one, in any order
  ArrayVector<uint32_t> missing;  // indexes of the rows that have none, in order
  ArrayVector<size_t> lines;      // of the missing rows: where to search for their slots, or for free ones
};

// Finds the rows' frames, kNowhere for a row that has none. Returns the number of rows without a frame.
size_t DeviceMap::locate(const int64_t* rows, size_t n, uint32_t* frames, Located* out) const {
  if (slots_.empty()) {
    std::fill_n(frames, n, kNowhere);
    return n;
  }
  constexpr size_t kRun = 32;
  size_t homes[2][kRun];  // of a run and of the next one
  const auto ask = [&](size_t begin) REQUIRES(mutex_) {
    size_t* const home_of = homes[begin / kRun % 2];
    for (size_t i = begin; i < std::min(n, begin + kRun); ++i) {
      home_of[i - begin] = home(rows[i]);
      __builtin_prefetch(&slots_[home_of[i - begin]]);
    }
  };
  size_t num_missing = 0, num_hits = 0;
  ask(0);
  for (size_t begin = 0; begin < n; begin += kRun) {
    ask(begin + kRun);
    const size_t* const home_of = homes[begin / kRun % 2];
    const size_t count = std::min(n - begin, kRun);
    // Most rows are in the first line of their search. A branch on the slot would be mispredicted for many.
    uint32_t others[kRun];
    size_t num_others = 0;
    uint32_t* const found = frames + begin;
    for (size_t j = 0; j < count; ++j) {
      const Slot* const line = &slots_[home_of[j]];
      const int64_t row = rows[begin + j];
      uint32_t frame = kNowhere;
      for (size_t i = 0; i < kLine; ++i) frame &= line[i].frame | (uint32_t{line[i].row == row} - 1);
      found[j] = frame;
      others[num_others] = static_cast<uint32_t>(j);
      num_others += frame == kNowhere;
    }
    if (out != nullptr) {
      for (size_t j = 0; j < count; ++j) {
        out->hits[num_hits] = found[j];
        num_hits += found[j] != kNowhere;
      }
    }
    for (size_t k = 0; k < num_others; ++k) {
      const uint32_t j = others[k];
      const size_t place = slot_from(home_of[j], rows[begin + j]);
      found[j] = slots_[place].frame;
      if (out != nullptr) {
        out->missing[num_missing] = static_cast<uint32_t>(begin + j);
        out->lines[num_missing] = place / kLine * kLine;
        if (found[j] != kNowhere) out->hits[num_hits++] = found[j];
      }
      num_missing += found[j] == kNowhere;
    }
  }
  return num_missing;
}

// Makes room for `more` rows, so that insert() cannot fail. At most num_frames_ rows have a frame, so the slots stop
// growing unless leaving rows never arrive.
void DeviceMap::reserve(size_t more) {
  if (slots_for(used_ + more) <= slots_.size()) return;
  const size_t all = slots_for(num_frames_);  // rounded up by grow(), to whole lines
  const size_t wanted = slots_for(used_ + more);
  grow(wanted <= all ? std::min(all, 2 * wanted) : wanted + wanted / 4);
}

void DeviceMap::grow(size_t capacity) {
  BlockVector<Slot> before((capacity + kLine - 1) / kLine * kLine, Slot{kFree, kNowhere, 0});
  before.swap(slots_);
  for (const Slot& slot : before) {
    if (slot.row != kFree) slots_[slot_of(slot.row)] = slot;
  }
}

void DeviceMap::insert(size_t place, int64_t row, uint32_t frame) {
  Slot& slot = slots_[place];
  if (slot.row == kFree) {
    slot = {row, frame, 0};
    ++used_;
  } else {
    slot.frame = frame;
  }
}

void DeviceMap::leave_frame(size_t place, bool is_dirty) {
  slots_[place].frame = kNowhere;
  if (is_dirty) {
    ++slots_[place].leaving;
    ++leaving_;
  }
  if (slots_[place].leaving == 0) erase(place);
}

// Rows of a full line may be in later lines: one of these moves back, so that no search ends too early at the hole.
void DeviceMap::erase(size_t place) {
  const auto distance = [this](size_t from, size_t to)
                            REQUIRES(mutex_) { return to >= from ? to - from : to + slots_.size() - from; };
  size_t line = place / kLine * kLine;
  bool is_full = slots_with(line, kFree) == 0;
  for (size_t next = line; is_full;) {
    next = line_after(next);
    is_full = slots_with(next, kFree) == 0;
    for (size_t i = next; i < next + kLine; ++i) {
      if (slots_[i].row == kFree || distance(home(slots_[i].row), next) < distance(line, next)) continue;
      slots_[place] = slots_[i];
      place = i;
      line = next;
      break;
    }
  }
  slots_[place] = {kFree, kNowhere, 0};
  --used_;
}

void DeviceMap::find(const int64_t* rows, size_t n, int64_t* frames) const {
  const MutexLock guard(mutex_);
  ArrayVector<uint32_t> found(n);
  locate(rows, n, found.data());
  for (size_t i = 0; i < n; ++i) frames[i] = found[i] == kNowhere ? -1 : int64_t{found[i]};
}

// ---- The window

uint32_t DeviceMap::expect(const Batch& batch) {
  const MutexLock guard(mutex_);
  if (!window_.has_room()) return kWindowFull;
  const size_t n = batch.num_unique();
  const int64_t* const rows = batch.unique().data();
  const uint32_t first = window_.first_batch();
  const uint32_t number = window_.push(rows, n);
  cache_.set_first_batch(first);
  ArrayVector<uint32_t> frames(n);
  locate(rows, n, frames.data());
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n && frames[i + kAhead] != kNowhere) cache_.prefetch(frames[i + kAhead]);
    if (frames[i] == kNowhere || cache_.is_wanted(frames[i]) || cache_.pins(frames[i]) > 0) continue;
    cache_.set_next_use(frames[i], number);
  }
  return number;
}

void DeviceMap::forget(uint32_t number) {
  const MutexLock guard(mutex_);
  if (!window_.holds(number)) return;
  const size_t n = window_.num_rows(number);
  rows_.resize(n);
  window_.copy_rows(number, 0, n, rows_.data());
  finish(number);
  ArrayVector<uint32_t> frames(n);
  locate(rows_.data(), n, frames.data());
  for (size_t i = 0; i < n; ++i) {
    if (frames[i] == kNowhere || cache_.pins(frames[i]) > 0) continue;
    cache_.set_next_use(frames[i], window_.next_use(rows_[i]));
  }
}

void DeviceMap::finish(uint32_t number) {
  window_.finish(number);
  cache_.set_first_batch(window_.first_batch());
}

// ---- Plans

std::unique_ptr<DeviceMap::Plan> DeviceMap::plan(const Batch& batch, uint32_t number) {
  const MutexLock guard(mutex_);
  const size_t n = batch.num_unique();
  const int64_t* const rows = batch.unique().data();
  if (n > num_frames_) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': a batch of " + std::to_string(n) +
                                         " rows does not fit its device cache of " + std::to_string(num_frames_) +
                                         " frames; nothing was changed");
  }
  std::unique_ptr<Plan> made(new Plan(shared_from_this(), &batch));
  Plan::Arrays& arrays = *made->arrays_;
  ArrayVector<uint32_t>& frames = made->pinned_;
  frames.resize(n);
  reserve(n);
  Located located(n);
  const size_t missing = locate(rows, n, frames.data(), &located);
  const size_t num_hits = n - missing;
  const uint32_t* const hits = located.hits.data();
  // Where the batch fits in addition to all pinned frames, it does not matter which of its own rows are pinned.
  if (cache_.num_pinned() + n > num_frames_ || plans_ >= kMaxPins) {
    size_t own_pins = 0;  // frames of the batch that are pinned already
    for (size_t i = 0; i < num_hits; ++i) {
      if (i + kAhead < num_hits) cache_.prefetch_pin(hits[i + kAhead]);
      const uint16_t pins = cache_.pins(hits[i]);
      if (pins == kMaxPins) {
        throw Error(ErrorKind::kInvalid, "table '" + name_ + "': too many plans hold row " +
                                             std::to_string(cache_.info(hits[i]).row) + "; release them");
      }
      own_pins += pins > 0;
    }
    if (cache_.num_pinned() - own_pins + n > num_frames_) return nullptr;
  }

  // Nothing has changed so far. All memory is taken before anything does.
  arrays.frames.resize(n);
  arrays.load_rows.resize(missing);
  arrays.load_frames.resize(missing);
  arrays.evict_rows.resize(missing);
  arrays.evict_frames.resize(missing);
  rows_.resize(missing);
  ArrayVector<uint32_t> taken(missing);
  size_t num_fresh = 0;
  cache_.begin_step();
  // Pins the residents first: a row of this batch must not be evicted for another one.
  for (size_t i = 0; i < num_hits; ++i) {
    if (i + kAhead < num_hits) cache_.prefetch_pin(hits[i + kAhead]);
    cache_.touch_alone(hits[i]);
    cache_.pin(hits[i]);
  }
  if (window_.holds(number)) finish(number);  // cheap: its pinned frames have no next use any more
  take_frames(missing, taken.data(), &num_fresh);
  for (size_t i = 0; i < missing; ++i) {
    const uint32_t at = located.missing[i];
    frames[at] = taken[i];
    arrays.load_rows[i] = rows[at];
    arrays.load_frames[i] = taken[i];
  }
  std::copy(frames.begin(), frames.end(), arrays.frames.begin());
  // Inserts before evict(): until then a free place is where locate() found it, or further on if another row took it.
  for (size_t i = 0; i < missing; ++i) {
    if (i + kAhead < missing) __builtin_prefetch(&slots_[located.lines[i + kAhead]], 1);
    insert(slot_from(located.lines[i], arrays.load_rows[i]), arrays.load_rows[i], taken[i]);
  }
  evict(taken.data() + num_fresh, missing - num_fresh, &arrays);
  for (size_t i = 0; i < missing; ++i) {
    if (i + kAhead < missing) {
      cache_.prefetch(taken[i + kAhead]);
      cache_.prefetch_ghost(arrays.load_rows[i + kAhead]);
    }
    cache_.reassign(taken[i], arrays.load_rows[i]);
  }
  counts_.hits += n - missing;
  counts_.misses += missing;
  counts_.write_backs += arrays.evict_rows.size();
  ++plans_;
  made->is_released_ = false;
  return made;
}

// Takes and pins n frames: `num_fresh` free ones, then victims, which keep their rows until evict(). Requires that
// there are enough.
void DeviceMap::take_frames(size_t n, uint32_t* frames, size_t* num_fresh) {
  size_t taken = 0;
  for (; taken < n && cache_.allocate(&frames[taken]); ++taken) {
    cache_.info(frames[taken]).pinned = 0;  // allocate() pins without counting
    cache_.pin(frames[taken]);
  }
  *num_fresh = taken;
  for (; taken < n; ++taken) {
    if (!cache_.victim(&frames[taken])) {
      throw Error(ErrorKind::kBroken, "table '" + name_ + "': no frame of its device cache can be given up");
    }
    cache_.pin(frames[taken]);  // so that victim() does not choose it again
  }
}

// Takes these frames from their rows and lists the dirty ones.
void DeviceMap::evict(const uint32_t* frames, size_t n, PlanArrays* arrays) {
  rows_.resize(n);
  for (size_t i = 0; i < n; ++i) rows_[i] = cache_.info(frames[i]).row;
  size_t num_dirty = 0;
  visit_slots(rows_.data(), n, [&](size_t i, size_t place) REQUIRES(mutex_) {
    const bool is_dirty = cache_.is_dirty(frames[i]);
    arrays->evict_rows[num_dirty] = rows_[i];
    arrays->evict_frames[num_dirty] = frames[i];
    num_dirty += is_dirty;
    leave_frame(place, is_dirty);
  });
  dirty_ -= num_dirty;
  arrays->evict_rows.resize(num_dirty);
  arrays->evict_frames.resize(num_dirty);
  counts_.evictions += n;
}

void DeviceMap::Plan::positions(int64_t* out) const {
  const uint32_t* const inverse = batch_->inverse().data();
  for (size_t i = 0; i < batch_->size(); ++i) out[i] = pinned_[inverse[i]];
}

size_t DeviceMap::Plan::write_numbers(size_t most, int64_t* out) const {
  for (const ArrayVector<int64_t>* frames : {&arrays_->frames, &arrays_->load_frames, &arrays_->evict_frames}) {
    out = std::copy(frames->begin(), frames->end(), out);
  }
  const size_t pieces = batch_->write_numbers(most, out);
  positions(out);
  return pieces;
}

void DeviceMap::Plan::release() {
  if (is_released_.exchange(true)) return;
  map_->release(*this);
}

void DeviceMap::Plan::mark_dirty() {
  if (is_released_) {
    throw Error(ErrorKind::kInvalid,
                "table '" + map_->name_ + "': rows of a released plan cannot be marked dirty; release it afterwards");
  }
  is_done_ = true;  // the values were computed, so the loads were executed
  map_->mark_dirty(*this);
}

void DeviceMap::Plan::undo() {
  if (is_released_.exchange(true)) return;
  map_->undo(*this);
}

void DeviceMap::release(const Plan& plan) {
  const MutexLock guard(mutex_);
  unpin(plan);
}

void DeviceMap::undo(const Plan& plan) {
  const MutexLock guard(mutex_);
  unpin(plan);
  const Plan::Arrays& arrays = *plan.arrays_;
  size_t evicted = 0;  // plan() lists victims in the order of the loads that took their frames
  for (size_t i = 0; i < arrays.load_rows.size(); ++i) {
    const auto frame = static_cast<uint32_t>(arrays.load_frames[i]);
    leave_frame(slot_of(arrays.load_rows[i]), false);
    cache_.release(frame);
    if (evicted == arrays.evict_rows.size() || arrays.evict_frames[evicted] != frame) continue;
    const int64_t victim = arrays.evict_rows[evicted++];
    Slot& slot = slots_[slot_of(victim)];
    if (slot.row == kFree || slot.leaving == 0) continue;  // the table has received it
    uint32_t same;
    cache_.allocate(&same);  // the frame that was released last
    cache_.info(same).pinned = 0;
    cache_.admit(same, victim);
    set_dirty(same, true);
    slot.frame = same;
    --slot.leaving;
    --leaving_;
    if (const uint32_t next = window_.next_use(victim); next != kNoUse) cache_.set_next_use(same, next);
  }
}

void DeviceMap::unpin(const Plan& plan) {
  const uint32_t* const frames = plan.pinned_.data();
  const size_t n = plan.pinned_.size();
  const bool has_window = !window_.is_empty();
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) cache_.prefetch_pin(frames[i + kAhead]);
    if (has_window && i + kAhead / 2 < n) window_.prefetch(cache_.info(frames[i + kAhead / 2]).row);
    if (!cache_.unpin(frames[i]) || !has_window) continue;
    if (const uint32_t next = window_.next_use(cache_.info(frames[i]).row); next != kNoUse) {
      cache_.set_next_use(frames[i], next);
    } else {
      cache_.set_unwanted(frames[i]);
    }
  }
  --plans_;
}

// ---- Dirty frames

void DeviceMap::set_dirty(uint32_t frame, bool dirty) {
  if (cache_.is_dirty(frame) == dirty) return;
  cache_.set_dirty(frame, dirty);
  dirty ? ++dirty_ : --dirty_;
}

void DeviceMap::mark_dirty(const Plan& plan) {
  const MutexLock guard(mutex_);
  for (const uint32_t frame : plan.pinned_) set_dirty(frame, true);
}

void DeviceMap::check_frames(const int64_t* frames, size_t n) const {
  for (size_t i = 0; i < n; ++i) {
    const bool is_frame = frames[i] >= 0 && frames[i] < int64_t{cache_.high_water()};
    if (is_frame && cache_.info(static_cast<uint32_t>(frames[i])).row >= 0) continue;
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': frame " + std::to_string(frames[i]) + " at position " +
                                         std::to_string(i) + " of its device cache holds no row; nothing was changed");
  }
}

void DeviceMap::mark_dirty(const int64_t* frames, size_t n) {
  const MutexLock guard(mutex_);
  check_frames(frames, n);
  for (size_t i = 0; i < n; ++i) set_dirty(static_cast<uint32_t>(frames[i]), true);
}

void DeviceMap::mark_clean(const int64_t* frames, size_t n) {
  const MutexLock guard(mutex_);
  check_frames(frames, n);
  for (size_t i = 0; i < n; ++i) set_dirty(static_cast<uint32_t>(frames[i]), false);
}

DeviceMap::Dirty DeviceMap::dirty() const {
  const MutexLock guard(mutex_);
  Dirty found;
  found.rows.reserve(dirty_);
  found.frames.reserve(dirty_);
  for (uint32_t frame = cache_.next_unwritten(0, false); frame < cache_.high_water();
       frame = cache_.next_unwritten(frame + 1, false)) {
    found.rows.push_back(cache_.info(frame).row);
    found.frames.push_back(frame);
  }
  return found;
}

void DeviceMap::forget_all() {
  const MutexLock guard(mutex_);
  if (plans_ > 0) {
    throw Error(ErrorKind::kBroken, "table '" + name_ + "': " + std::to_string(plans_) +
                                        " plans of its device cache still hold frames; release them first");
  }
  clear();
}

// Requires that no plan holds pins. Coming batches stay expected.
void DeviceMap::clear() {
  cache_.clear();
  slots_ = BlockVector<Slot>();
  used_ = dirty_ = leaving_ = 0;
}

DeviceStats DeviceMap::stats() const {
  const MutexLock guard(mutex_);
  DeviceStats s = counts_;
  s.frames = num_frames_;
  s.resident = cache_.resident();
  s.pinned = cache_.num_pinned();
  s.dirty = dirty_;
  s.leaving = leaving_;
  s.plans = plans_;
  s.window_batches = window_.next_batch() - window_.first_batch();
  s.bytes = cache_.resident_bytes() + cache_.uses_bytes() + window_.bytes() + slots_.capacity() * sizeof(Slot);
  return s;
}

// ---- DeviceCache

size_t DeviceMap::num_held() const {
  const MutexLock guard(mutex_);
  return dirty_ + leaving_;
}

size_t DeviceMap::num_in_use() const {
  const MutexLock guard(mutex_);
  return cache_.num_pinned();
}

size_t DeviceMap::first_of(const int64_t* rows, size_t n, bool held) const {
  const MutexLock guard(mutex_);
  if (dirty_ + leaving_ == 0) return held ? n : 0;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&slots_[home(rows[i + kAhead])]);
    const Slot& slot = slots_[slot_of(rows[i])];
    if ((slot.row != kFree && is_held(slot)) == held) return i;
  }
  return n;
}

size_t DeviceMap::first_held(const int64_t* rows, size_t n) const { return first_of(rows, n, true); }
size_t DeviceMap::first_not_held(const int64_t* rows, size_t n) const { return first_of(rows, n, false); }

size_t DeviceMap::give_up(const int64_t* rows, size_t n) {
  const MutexLock guard(mutex_);
  if (used_ == 0) return n;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&slots_[home(rows[i + kAhead])]);
    const Slot& slot = slots_[slot_of(rows[i])];
    if (slot.row != kFree && (is_held(slot) || cache_.pins(slot.frame) > 0)) return i;
  }
  for (size_t i = 0; i < n; ++i) {
    const size_t place = slot_of(rows[i]);
    if (slots_[place].row == kFree) continue;
    const uint32_t frame = slots_[place].frame;
    leave_frame(place, false);
    cache_.release(frame);
  }
  return n;
}

size_t DeviceMap::give_up_all() {
  const MutexLock guard(mutex_);
  if (plans_ > 0 || dirty_ + leaving_ > 0) return std::max<size_t>(1, cache_.num_pinned() + dirty_ + leaving_);
  clear();
  return 0;
}

void DeviceMap::arrived(const int64_t* rows, size_t n) {
  const MutexLock guard(mutex_);
  if (leaving_ == 0) return;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&slots_[home(rows[i + kAhead])]);
    const size_t place = slot_of(rows[i]);
    Slot& slot = slots_[place];
    if (slot.row == kFree || slot.leaving == 0) continue;
    --slot.leaving;
    --leaving_;
    if (slot.leaving == 0 && slot.frame == kNowhere) erase(place);
  }
}

}  // namespace bunkbed
