#include "cache/window.h"

#include <algorithm>
#include <limits>

#include "directory/directory.h"

namespace bunkbed {

namespace {
constexpr size_t kAhead = 12;  // rows whose places are prefetched: each is a miss of the processor's cache
}  // namespace

Window::Rows::Rows(const int64_t* rows, size_t n) {
  if (std::all_of(rows, rows + n, [](int64_t row) { return row <= std::numeric_limits<uint32_t>::max(); })) {
    narrow_.assign(rows, rows + n);
  } else {
    wide_.assign(rows, rows + n);
  }
}

uint32_t Window::tag_of(int64_t row) { return static_cast<uint32_t>(mix_id(row) >> 16); }

void Window::prefetch(int64_t row) const {
  if (!entries_.empty()) __builtin_prefetch(&entries_[home(tag_of(row))]);
}

size_t Window::find(int64_t row) const {
  if (num_rows_ == 0) return kNowhere;
  const uint32_t tag = tag_of(row);
  size_t place = home(tag);
  for (; entries_[place].uses != 0; place = after(place)) {
    if (entries_[place].tag == tag) return place;
  }
  return kNowhere;
}

void Window::add(const Rows& rows, uint32_t batch) {
  const uint32_t bit = bit_of(batch);
  constexpr size_t kRun = 16;
  uint32_t tags[2 * kRun];  // of a run and of the next one
  const auto ask = [&](size_t begin) {
    for (size_t i = begin; i < std::min(rows.size(), begin + kRun); ++i) {
      tags[i % (2 * kRun)] = tag_of(rows[i]);
      __builtin_prefetch(&entries_[home(tags[i % (2 * kRun)])], 1);
    }
  };
  ask(0);
  for (size_t begin = 0; begin < rows.size(); begin += kRun) {
    ask(begin + kRun);
    for (size_t i = begin; i < std::min(rows.size(), begin + kRun); ++i) {
      const uint32_t tag = tags[i % (2 * kRun)];
      size_t place = home(tag);
      while (entries_[place].uses != 0 && entries_[place].tag != tag) place = after(place);
      num_rows_ += entries_[place].uses == 0;
      entries_[place] = {tag, entries_[place].uses | bit};
    }
  }
}

// Rebuilds the entries from the lists, so that old and new entries never exist at the same time.
void Window::grow(size_t capacity) {
  entries_ = BlockVector<Entry>();
  entries_.assign(capacity, Entry{0, 0});
  num_rows_ = untidied_ = 0;
  for (uint32_t batch = first_batch_; batch < next_batch(); ++batch) {
    if (holds(batch)) add(batches_[batch - first_batch_].rows, batch);
  }
}

uint32_t Window::push(const int64_t* rows, size_t n) {
  const uint32_t batch = next_batch();
  if ((untidied_ & bit_of(batch)) != 0 || capacity_for(num_rows_ + n) > entries_.size()) tidy();
  if (capacity_for(num_rows_ + n) > entries_.size()) grow(capacity_for(num_rows_ + num_rows_ / 4 + n));
  batches_.push_back({Rows(rows, n), false});
  ++num_unfinished_;
  unfinished_ |= bit_of(batch);
  list_bytes_ += batches_.back().rows.bytes();
  add(batches_.back().rows, batch);
  return batch;
}

// Moves later entries of the run back, so that no probe ends at the hole too early.
void Window::erase(size_t place) {
  for (size_t next = after(place); entries_[next].uses != 0; next = after(next)) {
    if (distance(home(entries_[next].tag), next) >= distance(place, next)) {
      entries_[place] = entries_[next];
      place = next;
    }
  }
  entries_[place].uses = 0;
  --num_rows_;
}

void Window::finish(uint32_t batch) {
  Batch& over = batches_[batch - first_batch_];
  list_bytes_ -= over.rows.bytes();
  over.rows = Rows(nullptr, 0);
  over.is_over = true;
  --num_unfinished_;
  unfinished_ &= ~bit_of(batch);
  untidied_ |= bit_of(batch);
  while (!batches_.empty() && batches_.front().is_over) {
    batches_.pop_front();
    ++first_batch_;
  }
}

// In memory order, for all batches that ended since the last call: a search for each row took several times as long.
void Window::tidy() {
  if (untidied_ == 0) return;
  for (size_t place = 0; place < entries_.size(); ++place) {
    // The entry that erase() moves into the place may be stale too.
    while (entries_[place].uses != 0 && (entries_[place].uses & unfinished_) == 0) erase(place);
    entries_[place].uses &= unfinished_;
  }
  untidied_ = 0;
}

void Window::copy_rows(uint32_t batch, size_t from, size_t to, int64_t* out) const {
  const Rows& rows = batches_[batch - first_batch_].rows;
  for (size_t i = from; i < to; ++i) out[i - from] = rows[i];
}

void Window::clear() {
  first_batch_ = next_batch();
  batches_.clear();
  entries_ = BlockVector<Entry>();
  num_rows_ = num_unfinished_ = list_bytes_ = 0;
  unfinished_ = untidied_ = 0;
}

size_t Window::bytes() const { return entries_.capacity() * sizeof(Entry) + list_bytes_; }

size_t Window::bytes_after(size_t n) const {
  const size_t capacity =
      capacity_for(num_rows_ + n) > entries_.size() ? capacity_for(num_rows_ + num_rows_ / 4 + n) : entries_.size();
  return capacity * sizeof(Entry) + list_bytes_ + n * sizeof(int64_t);
}

}  // namespace bunkbed
