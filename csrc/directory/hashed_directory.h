#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "directory/packed_entry.h"

namespace bunkbed {

// Open addressing with linear probing in kPartitions independent tables. Keys are never erased: a deleted row keeps its
// key, with the entry kAbsent.
constexpr size_t kPartitionBits = 8;
inline constexpr size_t kPartitions = 1u << kPartitionBits;
inline constexpr double kMaxLoad = 0.84;
inline constexpr double kGrowth = 1.125;  // little, because a table at its smallest budget pays for unused slots
constexpr size_t kLeastSlots = 4;
constexpr size_t kSlotBytes = sizeof(int64_t) + kEntryBytes;

inline size_t grown(size_t capacity, size_t count) {
  size_t needed = std::max(kLeastSlots, capacity);
  while (static_cast<double>(needed) * kMaxLoad < static_cast<double>(count)) {
    needed = static_cast<size_t>(static_cast<double>(needed) * kGrowth) + 1;
  }
  return needed;
}

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
    for (size_t slot = home(hash);; slot = slot + 1 == capacity_ ? 0 : slot + 1) {
      if (keys_[slot] == row) return load_entry(&values_[slot * kEntryBytes]);
      if (keys_[slot] < 0) return kAbsent;
    }
  }
  void set(int64_t row, uint64_t hash, Entry entry) {
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
    }
    store_entry(&values_[slot * kEntryBytes], entry);
  }
  void grow(size_t count) {
    const size_t capacity = grown(capacity_, count);
    if (capacity == capacity_) return;
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
      while (keys_[slot] >= 0) slot = slot + 1 == capacity_ ? 0 : slot + 1;
      keys_[slot] = keys[from];
      store_entry(&values_[slot * kEntryBytes], load_entry(&values[from * kEntryBytes]));
    }
  }
  template <typename Visit>
  void each(const Visit& visit) const {
    for (size_t slot = 0; slot < capacity_; ++slot) {
      if (keys_[slot] >= 0) visit(keys_[slot], load_entry(&values_[slot * kEntryBytes]));
    }
  }

 private:
  // The partition is chosen by the hash's low bits, the slot by its high ones.
  size_t home(uint64_t hash) const { return static_cast<size_t>(((hash >> 32) * capacity_) >> 32); }

  // Where the row is, or the free slot where it belongs.
  size_t place(int64_t row, uint64_t hash) const {
    size_t slot = home(hash);
    while (keys_[slot] >= 0 && keys_[slot] != row) slot = slot + 1 == capacity_ ? 0 : slot + 1;
    return slot;
  }

  std::unique_ptr<int64_t[]> keys_;       // -1: free
  std::unique_ptr<std::byte[]> values_;   // kEntryBytes each
  size_t capacity_ = 0;
  size_t count_ = 0;
};

class HashedDirectory final : public Directory {
 public:
  HashedDirectory() : partitions_(kPartitions) {}

  void locate(const int64_t* rows, size_t n, Entry* entries) const override {
    uint64_t hashes[kHashesAhead];
    const size_t first = std::min(n, kHashesAhead);
    for (size_t i = 0; i < first; ++i) {
      hashes[i] = mix_id(rows[i]);
      of(hashes[i]).prefetch(hashes[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      const uint64_t hash = hashes[i % kHashesAhead];
      if (i + kHashesAhead < n) {
        const uint64_t ahead = mix_id(rows[i + kHashesAhead]);
        of(ahead).prefetch(ahead);
        hashes[i % kHashesAhead] = ahead;
      }
      entries[i] = of(hash).find(rows[i], hash);
    }
  }
  Entry find(int64_t row) const override {
    const uint64_t hash = mix_id(row);
    return of(hash).find(row, hash);
  }
  void set(int64_t row, Entry entry) override {
    const uint64_t hash = mix_id(row);
    Partition& partition = partitions_[hash % kPartitions];
    const size_t before = partition.bytes();
    const Entry old = partition.find(row, hash);
    if (old == kAbsent && entry == kAbsent) return;
    changed();
    stored_rows_ += (entry != kAbsent) - (old != kAbsent);
    partition.set(row, hash, entry);
    table_bytes_ += partition.bytes() - before;
  }
  bool grows() const override { return true; }
  size_t bytes_after(const int64_t* rows, size_t n) const override {
    const std::vector<uint32_t> coming = per_partition(rows, n);
    size_t bytes = kPartitions * sizeof(Partition);
    size_t largest = 0;  // one partition is copied while it grows
    for (size_t p = 0; p < kPartitions; ++p) {
      const size_t capacity = partitions_[p].capacity_after(coming[p]);
      bytes += capacity * kSlotBytes;
      if (capacity != partitions_[p].capacity()) largest = std::max(largest, partitions_[p].bytes());
    }
    return bytes + largest;
  }
  void reserve(const int64_t* rows, size_t n) override {
    const std::vector<uint32_t> coming = per_partition(rows, n);
    for (size_t p = 0; p < kPartitions; ++p) {
      if (coming[p] == 0) continue;
      const size_t before = partitions_[p].bytes();
      partitions_[p].grow(partitions_[p].count() + coming[p]);
      table_bytes_ += partitions_[p].bytes() - before;
    }
  }
  size_t bytes() const override { return kPartitions * sizeof(Partition) + table_bytes_; }
  size_t bytes_for(uint64_t stored_rows) const override {
    return std::max(bytes(), hashed_directory_bytes(stored_rows));
  }
  void clear() override {
    changed();
    partitions_ = std::vector<Partition>(kPartitions);
    stored_rows_ = 0;
    table_bytes_ = 0;
  }

  size_t num_parts() const override { return kPartitions; }
  bool has_ranges() const override { return false; }
  void part(size_t part, std::vector<int64_t>* rows, std::vector<Entry>* entries) const override {
    partitions_[part].each([&](int64_t row, Entry entry) {
      if (entry == kAbsent) return;
      rows->push_back(row);
      entries->push_back(entry);
    });
  }
  void begin_bulk(uint64_t rows) override {
    changed();
    // Less than any partition will have, so that each ends with the slots that it had when its rows came one by one.
    const double even = static_cast<double>(rows) / kPartitions;
    const auto least = static_cast<size_t>(std::max(0.0, even - 6 * std::sqrt(even)));
    for (Partition& partition : partitions_) partition.grow(least);
    bulk_locks_ = std::make_unique<LocalMutex[]>(kPartitions);
  }
  bool bulk_set(const int64_t* rows, const Entry* entries, size_t n) override {
    // By partition, so that each is locked once and its writes are close together. A checkpoint of a hashed directory
    // is in this order already.
    std::vector<uint32_t> ends = per_partition(rows, n);
    for (size_t p = 1; p < kPartitions; ++p) ends[p] += ends[p - 1];
    std::vector<uint32_t> order(n);
    for (size_t i = n; i-- > 0;) order[--ends[mix_id(rows[i]) % kPartitions]] = static_cast<uint32_t>(i);
    bool all_new = true;
    for (size_t at = 0; at < n;) {
      const size_t p = mix_id(rows[order[at]]) % kPartitions;
      const MutexLock guard(bulk_locks_[p]);
      for (; at < n; ++at) {
        const uint32_t i = order[at];
        const uint64_t hash = mix_id(rows[i]);
        if (hash % kPartitions != p) break;
        if (at + kHashesAhead < n) partitions_[p].prefetch(mix_id(rows[order[at + kHashesAhead]]));
        const size_t before = partitions_[p].count();
        partitions_[p].set(rows[i], hash, entries[i]);
        all_new &= partitions_[p].count() != before;
      }
    }
    return all_new;
  }
  bool bulk_copy(int64_t, const std::byte*, size_t) override { return false; }
  void end_bulk(size_t rows) override {
    bulk_locks_.reset();
    stored_rows_ = rows;
    table_bytes_ = 0;
    for (const Partition& partition : partitions_) table_bytes_ += partition.bytes();
  }

 private:
  static constexpr size_t kHashesAhead = 16;
  const Partition& of(uint64_t hash) const { return partitions_[hash % kPartitions]; }
  static std::vector<uint32_t> per_partition(const int64_t* rows, size_t n) {
    std::vector<uint32_t> counts(kPartitions, 0);
    for (size_t i = 0; i < n; ++i) ++counts[mix_id(rows[i]) % kPartitions];
    return counts;
  }

  std::vector<Partition> partitions_;
  size_t table_bytes_ = 0;
  struct LocalMutex : Mutex {
    LocalMutex() : Mutex(LockLevel::kLocal) {}
  };
  std::unique_ptr<LocalMutex[]> bulk_locks_;  // of partitions, while they are filled
};

}  // namespace bunkbed
