#include "window.h"

#include "directory.h"

namespace bunkbed {

namespace {
constexpr size_t kAhead = 12;  // rows whose place is asked for in advance: each is a miss of the processor's cache
}  // namespace

size_t Window::home(int64_t row) const { return mix_id(row) & (entries_.size() - 1); }

void Window::prefetch(int64_t row) const {
  if (!entries_.empty()) __builtin_prefetch(&entries_[home(row)]);
}

const Window::Entry* Window::find(int64_t row) const {
  if (num_rows_ == 0) return nullptr;
  for (size_t place = home(row);; place = (place + 1) & (entries_.size() - 1)) {
    if (entries_[place].uses == 0) return nullptr;
    if (entries_[place].row == row) return &entries_[place];
  }
}

void Window::grow(size_t capacity) {
  BlockVector<Entry> old(capacity, Entry{0, 0});
  old.swap(entries_);
  for (const Entry& entry : old) {
    if (entry.uses == 0) continue;
    size_t place = home(entry.row);
    while (entries_[place].uses != 0) place = (place + 1) & (entries_.size() - 1);
    entries_[place] = entry;
  }
}

uint32_t Window::push(const int64_t* rows, size_t n) {
  if (const size_t capacity = capacity_for(num_rows_ + n); capacity > entries_.size()) grow(capacity);
  const uint32_t batch = next_batch();
  batches_.push_back({BlockVector<int64_t>(rows, rows + n), false});
  ++num_unfinished_;
  list_bytes_ += n * sizeof(int64_t);
  const uint64_t bit = uint64_t{1} << (batch % kMaxBatches);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch(rows[i + kAhead]);
    size_t place = home(rows[i]);
    while (entries_[place].uses != 0 && entries_[place].row != rows[i]) place = (place + 1) & (entries_.size() - 1);
    if (entries_[place].uses == 0) {
      entries_[place].row = rows[i];
      ++num_rows_;
    }
    entries_[place].uses |= bit;
  }
  return batch;
}

// Moves later entries of the run back, so that no probe ends at the hole too early.
void Window::erase(size_t place) {
  const size_t mask = entries_.size() - 1;
  for (size_t next = (place + 1) & mask; entries_[next].uses != 0; next = (next + 1) & mask) {
    if (((next - home(entries_[next].row)) & mask) >= ((next - place) & mask)) {
      entries_[place] = entries_[next];
      place = next;
    }
  }
  entries_[place].uses = 0;
  --num_rows_;
}

const BlockVector<int64_t>& Window::finish(uint32_t batch) {
  Batch& over = batches_[batch - first_batch_];
  const uint64_t bit = uint64_t{1} << (batch % kMaxBatches);
  finished_ = std::move(over.rows);
  over.rows = {};
  over.is_over = true;
  --num_unfinished_;
  list_bytes_ -= finished_.size() * sizeof(int64_t);
  for (size_t i = 0; i < finished_.size(); ++i) {
    if (i + kAhead < finished_.size()) prefetch(finished_[i + kAhead]);
    size_t place = home(finished_[i]);
    while (entries_[place].row != finished_[i] || entries_[place].uses == 0) place = (place + 1) & (entries_.size() - 1);
    entries_[place].uses &= ~bit;
    if (entries_[place].uses == 0) erase(place);
  }
  while (!batches_.empty() && batches_.front().is_over) {
    batches_.pop_front();
    ++first_batch_;
  }
  return finished_;
}

void Window::clear() {
  first_batch_ = next_batch();
  batches_.clear();
  entries_ = BlockVector<Entry>();
  finished_ = BlockVector<int64_t>();
  num_rows_ = num_unfinished_ = list_bytes_ = 0;
}

size_t Window::bytes() const {
  return entries_.capacity() * sizeof(Entry) + list_bytes_ + finished_.capacity() * sizeof(int64_t);
}

size_t Window::bytes_after(size_t n) const {
  const size_t capacity = capacity_for(num_rows_ + n);
  // While the entries grow, both arrays exist.
  const size_t entries = capacity > entries_.size() ? capacity + entries_.size() : entries_.size();
  return entries * sizeof(Entry) + list_bytes_ + (n + finished_.capacity()) * sizeof(int64_t);
}

}  // namespace bunkbed
