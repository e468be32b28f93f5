#include "store/store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/fault.h"

namespace bunkbed {

namespace {

constexpr size_t kAppendBatch = 1024;  // records appended at once
constexpr size_t kFlushBytes = 1u << 20;

std::string held_entries(const Directory& directory) {
  const size_t counted = directory.counted_rows();
  return std::to_string(directory.stored_rows()) + " stored rows" +
         (counted > 0 ? " and counts of " + std::to_string(counted) + " other ids" : "");
}

// Sorts by the upper halves, by one digit of 11 bits after the other: in a tenth of std::sort()'s time for 16k numbers.
void sort_by_upper_half(std::vector<uint64_t>* numbers) {
  constexpr int kBits = 11;
  constexpr size_t kDigits = size_t{1} << kBits;
  if (numbers->size() < kDigits) return std::sort(numbers->begin(), numbers->end());
  std::vector<uint64_t> sorted(numbers->size());
  for (int shift = 32; shift < 64; shift += kBits) {
    const auto digit = [&](uint64_t number) { return number >> shift & (kDigits - 1); };
    size_t starts[kDigits + 1] = {};
    for (const uint64_t number : *numbers) ++starts[digit(number) + 1];
    for (size_t d = 0; d < kDigits; ++d) starts[d + 1] += starts[d];
    for (const uint64_t number : *numbers) sorted[starts[digit(number)]++] = number;
    numbers->swap(sorted);
  }
}

}  // namespace

Store::Store(std::string name, size_t frame_bytes, size_t max_frames, std::unique_ptr<Directory> directory,
             std::unique_ptr<Log> log, const MemoryPlan& plan)
    : name_(std::move(name)),
      frame_bytes_(frame_bytes),
      plan_(plan),
      directory_(std::move(directory)),
      cache_(frame_bytes, max_frames),
      log_(std::move(log)),
      compactor_(directory_.get(), &cache_, log_.get()),
      compaction_(log_.get(), &compactor_, &plan_),
      disk_(log_.get(), directory_.get(), &cache_, &compactor_, &plan_, &unwritten_),
      rows_(*directory_, cache_, log_ != nullptr, &stats_),
      counts_(directory_.get(), log_.get(), &plan_, &unwritten_) {
  cache_.set_capacity(capacity_for(directory_->bytes()));
}

size_t Store::capacity_for(size_t directory_bytes) const {
  if (plan_.total_bytes == 0) return cache_.max_frames();
  const size_t taken = plan_.fixed_bytes + directory_bytes + window_bytes_;
  const size_t left = plan_.total_bytes > taken ? plan_.total_bytes - taken : 0;
  return std::min(cache_.max_frames(), left / Cache::frame_cost(frame_bytes_));
}

size_t Store::ram_bytes() const {
  return plan_.fixed_bytes + directory_->bytes() + window_bytes_ + cache_.resident_bytes();
}

size_t Store::budget_for(size_t directory_bytes) const {
  return smallest_budget(directory_bytes + kMinFrames * Cache::frame_cost(frame_bytes_), plan_.payload_bytes,
                         plan_.slots_per_segment, plan_.read_unit, plan_.has_log);
}

void Store::check_budget() const {
  if (plan_.total_bytes == 0 || plan_.fixed_bytes + minimum_bytes() <= plan_.total_bytes) return;
  throw Error(ErrorKind::kMemory, "table '" + name_ + "': a RAM budget of " + std::to_string(plan_.total_bytes) +
                                      " bytes is too small for a directory of " + held_entries(*directory_) +
                                      "; it needs ram=" + std::to_string(budget_for(directory_->bytes())) +
                                      " at least");
}

void Store::evict(uint32_t frame) {
  FrameInfo& info = cache_.info(frame);
  if (cache_.is_frozen(frame)) {
    append_batch(&frame, 1, true);
  } else if (cache_.is_dirty(frame)) {
    if (log_ == nullptr) {
      const size_t needed = ram_bytes() + ram_bytes() / 4;
      throw Error(ErrorKind::kMemory, "table '" + name_ + "' lives in RAM only and its budget of " +
                                          std::to_string(plan_.total_bytes) + " bytes is full after " +
                                          std::to_string(directory_->stored_rows()) +
                                          " rows; give it a path, or ram=" + std::to_string(needed) + " or more");
    }
    // Seeded bug for the exactness tests: the row's newest value is dropped.
    if (fault_is("lost_write_back")) initial_(info.row, frame_bytes_, cache_.record(frame));
    failpoint("evict");
    info.position = fault_is("evict_into_old_epoch") && unwritten_.frozen > 0
                        ? log_->append_ending(info.row, cache_.record(frame))
                        : log_->append(info.row, cache_.record(frame));
    cache_.set_dirty(frame, false);
    --unwritten_.dirty;
    ++stats_.written_back;
  }
  directory_->set(info.row, entry_of_position(info.position));
  cache_.release(frame);
  ++stats_.evictions;
}

// Victims are appended in the order of their ids' hash. Rows of a cell, which is a range of that hash (docs/design/
// engine.md, rule 25), are so side by side in the log, and a block of cells is loaded with large reads.
std::vector<uint32_t> Store::take_frames(size_t n, uint32_t batch) {
  constexpr size_t kAhead = 4, kRowsAhead = 16;
  std::vector<uint32_t> frames;
  frames.reserve(n);
  try {
    for (uint32_t frame; frames.size() < n && cache_.allocate(&frame);) frames.push_back(frame);
    std::vector<uint64_t> victims;  // the upper half of the hash, and the frame
    for (const uint32_t frame : cache_.victims(n - frames.size(), batch)) {
      victims.push_back(mix_id(cache_.info(frame).row) >> 32 << 32 | frame);
    }
    sort_by_upper_half(&victims);
    const auto frame_at = [&](size_t v) { return static_cast<uint32_t>(victims[v]); };
    for (size_t v = 0; v < victims.size(); ++v) {
      if (v + kAhead < victims.size()) cache_.prefetch_record(frame_at(v + kAhead), frame_bytes_);
      if (v + kRowsAhead < victims.size()) directory_->prefetch(cache_.info(frame_at(v + kRowsAhead)).row);
      evict(frame_at(v));
      uint32_t frame;
      if (cache_.allocate(&frame)) frames.push_back(frame);
    }
  } catch (...) {
    release_unused(frames, 0);
    throw;
  }
  return frames;
}

void Store::release_unused(const std::vector<uint32_t>& frames, size_t used) {
  for (size_t i = used; i < frames.size(); ++i) cache_.release(frames[i]);
}

// Admits a row to a frame. The caller fills in the record later.
void Store::hold_row(uint32_t frame, int64_t row) {
  cache_.admit(frame, row);
  if (!window_.is_empty()) cache_.set_next_use(frame, window_.next_use(row));
}

void Store::reserve(const Directory::NewRows& coming) {
  if (coming.empty()) return;
  const size_t bytes = directory_->bytes_after(coming);
  if (plan_.total_bytes != 0) {
    if (bytes > directory_->bytes() && bytes > most_directory_bytes(plan_, frame_bytes_)) {
      size_t rows = 0;
      for (const auto& [part, count] : coming) rows += count;
      throw Error(ErrorKind::kMemory,
                  "table '" + name_ + "': " + std::to_string(rows) + " new rows would make its directory " +
                      std::to_string(bytes) + " bytes (it has " + held_entries(*directory_) +
                      "), more than its RAM budget of " + std::to_string(plan_.total_bytes) +
                      " bytes allows; nothing was changed; open it with ram=" + std::to_string(budget_for(bytes)) +
                      " or more");
    }
    const size_t capacity = capacity_for(bytes);
    // Shrinks by some more, so that a growing directory does not evict rows in every step; in RAM only none is evicted.
    const size_t spare = log_ == nullptr ? 0 : capacity / 64;
    if (capacity < cache_.capacity()) shrink_to(std::max(kMinFrames, capacity - spare));
  }
  directory_->reserve(coming);
}

void Store::shrink_to(size_t capacity) {
  // In RAM only, a row moves to a frame that a deleted one left, because it cannot be evicted.
  const bool moves = log_ == nullptr && cache_.resident() <= capacity;
  if (moves) cache_.set_capacity(capacity);
  for (uint32_t frame = static_cast<uint32_t>(capacity); frame < cache_.high_water(); ++frame) {
    const int64_t row = cache_.info(frame).row;
    if (row >= 0 && !moves) evict(frame);
    if (row < 0 || !moves) continue;
    uint32_t to;
    cache_.release(frame);
    cache_.allocate(&to);
    std::memcpy(cache_.record(to), cache_.record(frame), frame_bytes_);
    hold_row(to, row);
    cache_.info(to).pinned = 0;
    cache_.set_dirty(to, true);
    directory_->set(row, entry_of_frame(to));
  }
  cache_.set_capacity(capacity);
  cache_.trim();
}

bool Store::must_shrink_for(const int64_t* rows, size_t n) const {
  if (!directory_->grows()) return false;
  const std::vector<int64_t> absent = absent_rows(*directory_, rows, n);
  if (absent.empty()) return false;
  return capacity_for(directory_->bytes_after(directory_->new_rows(absent.data(), absent.size()))) < cache_.capacity();
}

Directory::NewRows Store::new_rows(const int64_t* rows, size_t n, const Admission* admission) const {
  if (!directory_->grows()) return {};
  std::vector<int64_t> absent = absent_rows(*directory_, rows, n);  // of rows that are counted, none gets a new entry
  if (admission != nullptr && !admission->counts() && !fault_is("admission_by_place"))
    admission->remove_refused(&absent);
  return directory_->new_rows(absent.data(), absent.size());
}

// The log's record of a stored row, or its frame, is not needed any more. A frozen frame must be written before.
void Store::give_up_record(Entry entry) {
  uint64_t position = position_of(entry);
  if (is_frame(entry)) {
    const uint32_t frame = frame_of(entry);
    position = cache_.info(frame).position;
    if (cache_.is_dirty(frame)) --unwritten_.dirty;
    cache_.release(frame);
  }
  if (position != kNoPosition) --log_->segment_of(position).live;
}

void Store::append_records(const int64_t* rows, size_t n, const std::byte* records, bool* wrote) {
  Entry entries[kAppendBatch];
  uint32_t frames[kAppendBatch];
  Log::Source sources[kAppendBatch];
  uint64_t positions[kAppendBatch];
  for (size_t begin = 0; begin < n;) {
    const size_t count = std::min(kAppendBatch, n - begin);
    for (size_t i = 0; i < count; ++i) sources[i] = {rows[begin + i], records + (begin + i) * plan_.payload_bytes};
    const size_t taken = log_->append(sources, count, positions);
    *wrote = true;
    directory_->locate(rows + begin, taken, entries);
    for (size_t i = 0; i < taken; ++i) frames[i] = is_frame(entries[i]) ? frame_of(entries[i]) : kNoFrame;
    write_frozen_frames(frames, taken);  // the commit under way has these rows
    for (size_t i = 0; i < taken; ++i) {
      if (is_stored(entries[i])) give_up_record(entries[i]);
      directory_->set(rows[begin + i], entry_of_position(positions[i]));
    }
    begin += taken;
    compaction_.compact_some();
  }
}

void Store::erase(const int64_t* rows, size_t n, bool* wrote) {
  constexpr size_t kAtOnce = 4096;
  std::vector<int64_t> stored;
  std::vector<Entry> entries(std::min(n, kAtOnce));
  std::vector<uint32_t> frames;
  compactor_.set_goal();
  const auto forget = [this](int64_t row) {
    const Entry entry = directory_->find(row);
    if (!is_count(entry)) {
      give_up_record(entry);
    } else if (fault_is("count_survives_delete")) {
      return;
    }
    directory_->set(row, kAbsent);
  };
  for (size_t begin = 0; begin < n; begin += kAtOnce) {
    const size_t count = std::min(kAtOnce, n - begin);
    directory_->locate(rows + begin, count, entries.data());
    stored.clear();
    frames.clear();
    for (size_t i = 0; i < count; ++i) {
      if (entries[i] == kAbsent) continue;
      stored.push_back(rows[begin + i]);
      if (is_frame(entries[i])) frames.push_back(frame_of(entries[i]));
    }
    if (stored.empty()) continue;
    *wrote = true;
    compactor_.set_deletions_from(std::max<uint64_t>(1, compactor_.deletions_from()));
    write_frozen_frames(frames.data(), frames.size());  // the commit under way has these rows
    if (log_ != nullptr && !fault_is("lost_tombstone"))
      log_->append_others(stored.data(), nullptr, nullptr, stored.size());
    for (const int64_t row : stored) forget(row);
  }
  cache_.set_capacity(std::max(cache_.capacity(), capacity_for(directory_->bytes())));
}

bool Store::place_for_update(const Batch& batch) {
  if (!rows_.is_placed(batch)) return false;
  rows_.place(batch, true);
  write_frozen_frames(batch.placement().frames.data(), batch.num_unique());
  return true;
}

uint32_t Store::expect(const int64_t* rows, size_t n, size_t most_bytes) {
  if (!window_.has_room()) return kNoUse;
  window_.tidy();  // its memory counts in the budget
  if (window_must_grow(n)) {
    const size_t needed = window_needs(n);
    if (needed > most_bytes) return kNoUse;
    const size_t before = window_bytes_;
    // Grows in few steps, first to four such batches: each step evicts frames, even those of wanted rows.
    window_bytes_ = std::min(most_bytes, window_.is_empty() ? window_needs(4 * n) : needed + needed / 4);
    const size_t capacity = capacity_for(directory_->bytes());
    if (capacity < kMinFrames) {
      window_bytes_ = before;
      return kNoUse;
    }
    if (capacity < cache_.capacity()) shrink_to(capacity);
  }
  const uint32_t first = window_.first_batch();
  const uint32_t batch = window_.push(rows, n);
  cache_.set_first_batch(first);
  // A row that an earlier batch wants keeps the next use that the cache has.
  entries_.resize(n);
  directory_->locate(rows, n, entries_.data());
  constexpr size_t kAhead = 12;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n && is_frame(entries_[i + kAhead])) cache_.prefetch(frame_of(entries_[i + kAhead]));
    if (!is_frame(entries_[i])) continue;
    const uint32_t frame = frame_of(entries_[i]);
    if (!cache_.is_wanted(frame)) cache_.set_next_use(frame, batch);
  }
  return batch;
}

void Store::finish(uint32_t batch) {
  if (!window_.holds(batch)) return;
  const size_t n = window_.num_rows(batch);
  finished_.resize(n);
  window_.copy_rows(batch, 0, n, finished_.data());
  const int64_t* const rows = finished_.data();
  window_.finish(batch);
  entries_.resize(n);
  directory_->locate(rows, n, entries_.data());
  constexpr size_t kAhead = 12;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      window_.prefetch(rows[i + kAhead]);
      if (is_frame(entries_[i + kAhead])) cache_.prefetch(frame_of(entries_[i + kAhead]));
    }
    if (is_frame(entries_[i])) cache_.set_next_use(frame_of(entries_[i]), window_.next_use(rows[i]));
  }
  cache_.set_first_batch(window_.first_batch());
  if (window_.is_empty()) forget_window();
}

void Store::forget_window() {
  window_.clear();
  cache_.set_first_batch(window_.first_batch());
  window_bytes_ = 0;
  cache_.set_capacity(std::max(cache_.capacity(), capacity_for(directory_->bytes())));
}

void Store::unpin(const uint32_t* frames, size_t n) {
  if (!has_pins_) return;
  has_pins_ = false;
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n && frames[i + kAhead] != kNoFrame) cache_.prefetch(frames[i + kAhead]);
    if (frames[i] != kNoFrame) cache_.info(frames[i]).pinned = 0;
  }
}

void Store::mark_dirty(const uint32_t* frames, size_t n) {
  // The first steps after a commit make nearly all their rows dirty, and their frames are far apart in memory.
  constexpr size_t kAhead = 16;
  Segment* segment = nullptr;  // neighbouring rows are mostly in one segment
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n && frames[i + kAhead] != kNoFrame && !cache_.is_dirty(frames[i + kAhead])) {
      cache_.prefetch(frames[i + kAhead]);
    }
    if (frames[i] == kNoFrame || cache_.is_dirty(frames[i])) continue;
    cache_.set_dirty(frames[i], true);
    ++unwritten_.dirty;
    FrameInfo& info = cache_.info(frames[i]);
    if (info.position == kNoPosition) continue;
    const uint64_t id = info.position / log_->slots_per_segment();
    if (segment == nullptr || segment->id != id) segment = &log_->segment_of(info.position);
    --segment->live;
    info.position = kNoPosition;
  }
}

void Store::flush() {
  while (log_ != nullptr && write_dirty(kFlushBytes)) {
  }
}

bool Store::write_dirty(size_t most_bytes) {
  uint32_t batch[kAppendBatch];
  size_t left = std::min(unwritten_.dirty, std::max<size_t>(1, most_bytes / frame_bytes_));
  while (left > 0) {
    const size_t most = std::min(left, kAppendBatch);
    size_t count = 0;
    uint32_t next = next_dirty_;
    for (; count < most; ++count) {
      batch[count] = cache_.next_unwritten(next, false);
      if (batch[count] == cache_.high_water()) break;
      next = batch[count] + 1;
    }
    if (count > 0) append_batch(batch, count, false);
    left -= count;
    next_dirty_ = count < most ? 0 : next;  // starts again at 0 for frames that became dirty before next_dirty_
  }
  return unwritten_.dirty > 0;
}

void Store::freeze() {
  counts_.write();
  unwritten_.frozen = cache_.freeze();
  unwritten_.dirty = 0;
  next_to_write_ = 0;
  log_->begin_next_epoch(unwritten_.frozen);
}

// Appends the records of frames, all frozen or all dirty, in this order. After a failure the earlier ones are written.
void Store::append_batch(const uint32_t* frames, size_t n, bool are_frozen) {
  Log::Source sources[kAppendBatch];
  uint64_t positions[kAppendBatch];
  for (size_t i = 0; i < n; ++i) sources[i] = {cache_.info(frames[i]).row, cache_.record(frames[i])};
  for (size_t done = 0; done < n;) {
    const size_t taken = are_frozen ? log_->append_ending(sources + done, n - done, positions)
                                    : log_->append(sources + done, n - done, positions);
    for (size_t i = 0; i < taken; ++i) {
      cache_.info(frames[done + i]).position = positions[i];
      if (are_frozen) {
        cache_.set_written(frames[done + i]);
      } else {
        cache_.set_dirty(frames[done + i], false);
      }
    }
    done += taken;
    (are_frozen ? unwritten_.frozen : unwritten_.dirty) -= taken;
    stats_.written_back += taken;
    if (are_frozen) compaction_.add_commit_debt(taken);  // count_debt() counts appends to the running epoch
  }
}

// Appends the records of frozen frames, before the caller changes these frames.
void Store::write_frozen_frames(const uint32_t* frames, size_t n) {
  if (unwritten_.frozen == 0 || fault_is("update_before_copy")) return;
  uint32_t batch[kAppendBatch];
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    if (frames[i] == kNoFrame || !cache_.is_frozen(frames[i])) continue;
    cache_.prefetch(frames[i]);
    batch[count++] = frames[i];
    if (count == kAppendBatch) append_batch(batch, std::exchange(count, 0), true);
  }
  if (count > 0) append_batch(batch, count, true);
}

bool Store::write_frozen(size_t most_bytes) {
  uint32_t batch[kAppendBatch];
  size_t left = std::min(unwritten_.frozen, std::max<size_t>(1, most_bytes / frame_bytes_));
  while (left > 0) {
    const size_t count = std::min(left, kAppendBatch);
    uint32_t next = next_to_write_;
    for (size_t i = 0; i < count; ++i) {
      batch[i] = cache_.next_unwritten(next, true);
      next = batch[i] + 1;
    }
    append_batch(batch, count, true);
    next_to_write_ = next;
    left -= count;
  }
  return unwritten_.frozen > 0;
}

void Store::thaw() {
  cache_.thaw();
  unwritten_.dirty += std::exchange(unwritten_.frozen, 0);
}

void Store::apply(const MemoryPlan& plan) {
  forget_window();  // its size follows the old budget
  const MemoryPlan before = plan_;
  plan_ = plan;
  try {
    check_budget();
    const size_t capacity = capacity_for(directory_->bytes());
    if (capacity < cache_.capacity()) {
      shrink_to(capacity);
    } else {
      cache_.set_capacity(capacity);
    }
    if (log_ != nullptr) log_->set_memory(plan.log);
  } catch (...) {
    plan_ = before;
    throw;
  }
}

// ---- Counts

void Counts::make_room(size_t n) {
  if (log_ == nullptr) return;
  if (listed_.size() + n > room()) write();
  if (listed_.empty() && listed_.capacity() > room()) listed_ = {};
  listed_.reserve(room());
}

void Counts::list(int64_t row) {
  if (log_ == nullptr) return;
  listed_.push_back(row);
  unwritten_->counts = listed_.size();
}

void Counts::raise(int64_t row, Entry before, int64_t now) {
  directory_->set(row, raised_count(before, std::max(now, since_)));
  list(row);
}

// Rows that were stored or deleted since they were listed have no count.
void Counts::write() {
  std::sort(listed_.begin(), listed_.end());
  listed_.erase(std::unique(listed_.begin(), listed_.end()), listed_.end());
  std::vector<int64_t> rows;
  std::vector<Entry> counts;
  const size_t most = std::min<size_t>(4096, room());
  std::vector<Entry> entries(std::min(most, listed_.size()));
  size_t written = 0;
  try {
    for (; written < listed_.size(); written += std::min(most, listed_.size() - written)) {
      const size_t count = std::min(most, listed_.size() - written);
      const int64_t* const listed = listed_.data() + written;
      directory_->locate(listed, count, entries.data());
      rows.clear();
      counts.clear();
      for (size_t i = 0; i < count; ++i) {
        if (!is_count(entries[i]) || (listed[i] % 4 == 0 && fault_is("lost_count"))) continue;
        rows.push_back(listed[i]);
        counts.push_back(entries[i]);
      }
      log_->append_others(rows.data(), nullptr, counts.data(), rows.size());
    }
  } catch (...) {
    listed_.erase(listed_.begin(), listed_.begin() + static_cast<ptrdiff_t>(written));
    unwritten_->counts = listed_.size();
    throw;
  }
  listed_.clear();
  unwritten_->counts = 0;
}

void Counts::each(const std::function<void(int64_t row, Entry count)>& visit) const {
  std::vector<int64_t> rows;
  std::vector<Entry> entries;
  for (size_t part = 0; part < directory_->num_parts() && directory_->counted_rows() > 0; ++part) {
    rows.clear();
    entries.clear();
    directory_->part(part, &rows, &entries);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (is_count(entries[i])) visit(rows[i], entries[i]);
    }
  }
}

uint64_t Counts::forget(int64_t before) {
  since_ = std::max(since_, before);
  if (fault_is("old_counts_stay")) return 0;
  std::vector<int64_t> old;
  const auto is_old = [this](Entry count) { return time_of_count(count) < since_; };
  each([&](int64_t row, Entry count) {
    if (is_old(count)) old.push_back(row);
  });
  for (const int64_t row : old) directory_->set(row, kAbsent);
  return old.size();
}

void Counts::set(const int64_t* rows, const Entry* counts, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (is_stored(directory_->find(rows[i]))) continue;
    make_room(1);
    directory_->set(rows[i], counts[i]);
    list(rows[i]);
  }
}

}  // namespace bunkbed
