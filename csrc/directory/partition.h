#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "directory/packed_entry.h"

namespace bunkbed {

inline constexpr double kMaxLoad = 0.84;
inline constexpr double kGrowth = 1.125;  // little, because a table at its smallest budget pays for unused slots
inline constexpr size_t kLeastSlots = 4;
inline constexpr size_t kSlotBytes = sizeof(int64_t) + kEntryBytes;

inline size_t grown(size_t capacity, size_t count) {
  size_t needed = std::max(kLeastSlots, capacity);
  while (static_cast<double>(needed) * kMaxLoad < static_cast<double>(count)) {
    needed = static_cast<size_t>(static_cast<double>(needed) * kGrowth) + 1;
  }
  return needed;
}

// A hash table of some rows, with linear probing. An erased row leaves no mark: the rows behind it move up (Knuth, The
// Art of Computer Programming, vol. 3, 6.4, algorithm R).
class Partition {
 public:
  size_t capacity() const { return capacity_; }
  size_t count() const { return count_; }
  size_t bytes() const { return capacity_ * kSlotBytes; }
  // Slots with so many more rows.
  size_t capacity_after(size_t coming) const { return coming == 0 ? capacity_ : grown(capacity_, count_ + coming); }

  void prefetch(uint64_t hash) const {
    if (capacity_ == 0) return;
    const size_t slot = home(hash);
    __builtin_prefetch(&keys_[slot]);
    __builtin_prefetch(&values_[slot * kEntryBytes]);
  }
  Entry find(int64_t row, uint64_t hash) const {
    if (capacity_ == 0) return kAbsent;
    for (size_t slot = home(hash);; slot = after(slot)) {
      if (keys_[slot] == row) return load_entry(&values_[slot * kEntryBytes]);
      if (keys_[slot] < 0) return kAbsent;
    }
  }
  void set(int64_t row, uint64_t hash, Entry entry) { (void)exchange(row, hash, entry); }
  // Sets an entry, or erases the row's; returns what the row had.
  Entry exchange(int64_t row, uint64_t hash, Entry entry) {
    if (entry == kAbsent) {
      const Entry before = find(row, hash);
      if (before != kAbsent) erase(row, hash);
      return before;
    }
    Entry before = kAbsent;
    if (capacity_ == 0) grow(1);
    size_t slot = place(row, hash);
    if (keys_[slot] != row) {
      // Only a new row may grow the table: setting the entry of a known row must not fail.
      if (capacity_after(1) != capacity_) {
        grow(count_ + 1);
        slot = place(row, hash);
      }
      keys_[slot] = row;
      ++count_;
    } else {
      before = load_entry(&values_[slot * kEntryBytes]);
    }
    store_entry(&values_[slot * kEntryBytes], entry);
    return before;
  }
  void grow(size_t count) {
    const size_t capacity = grown(capacity_, count);
    if (capacity != capacity_) resize(capacity);
  }
  // Gives memory back where few rows are left.
  void erase(int64_t row, uint64_t hash) {
    if (capacity_ == 0) return;
    size_t hole = place(row, hash);
    if (keys_[hole] != row) return;
    --count_;
    for (size_t next = after(hole); keys_[next] >= 0; next = after(next)) {
      const size_t wanted = home(mix_id(keys_[next]));
      const bool is_reached = hole < next ? hole < wanted && wanted <= next : hole < wanted || wanted <= next;
      if (is_reached) continue;  // a search for this row does not pass the hole
      keys_[hole] = keys_[next];
      store_entry(&values_[hole * kEntryBytes], load_entry(&values_[next * kEntryBytes]));
      hole = next;
    }
    keys_[hole] = -1;
    if (capacity_ < kLeastToShrink || static_cast<double>(count_) > kShrinkLoad * static_cast<double>(capacity_))
      return;
    try {
      resize(grown(0, count_ + 1));
    } catch (const std::bad_alloc&) {  // it keeps its memory
    }
  }
  template <typename Visit>
  void each(const Visit& visit) const {
    for (size_t slot = 0; slot < capacity_; ++slot) {
      if (keys_[slot] >= 0) visit(keys_[slot], load_entry(&values_[slot * kEntryBytes]));
    }
  }

 private:
  static constexpr size_t kLeastToShrink = 64;
  static constexpr double kShrinkLoad = 0.52 * kMaxLoad;  // so that half the rows take little more than half the memory

  // By the high bits of the hash; its low ones choose a partition of the hashed directory.
  size_t home(uint64_t hash) const { return static_cast<size_t>(((hash >> 32) * capacity_) >> 32); }
  size_t after(size_t slot) const { return slot + 1 == capacity_ ? 0 : slot + 1; }

  void resize(size_t capacity) {
    auto keys = std::make_unique<int64_t[]>(capacity);
    auto values = std::make_unique<std::byte[]>(capacity * kEntryBytes + 8);
    std::fill_n(keys.get(), capacity, int64_t{-1});
    std::swap(keys, keys_);
    std::swap(values, values_);
    const size_t old = capacity_;
    capacity_ = capacity;
    for (size_t from = 0; from < old; ++from) {
      if (keys[from] < 0) continue;
      size_t slot = home(mix_id(keys[from]));
      while (keys_[slot] >= 0) slot = after(slot);
      keys_[slot] = keys[from];
      store_entry(&values_[slot * kEntryBytes], load_entry(&values[from * kEntryBytes]));
    }
  }

  // Where the row is, or the free slot where it belongs.
  size_t place(int64_t row, uint64_t hash) const {
    size_t slot = home(hash);
    while (keys_[slot] >= 0 && keys_[slot] != row) slot = after(slot);
    return slot;
  }

  std::unique_ptr<int64_t[]> keys_;      // -1: free
  std::unique_ptr<std::byte[]> values_;  // kEntryBytes each
  size_t capacity_ = 0;
  size_t count_ = 0;
};

}  // namespace bunkbed
