// The rows that coming batches want: ids only, so that looking far ahead is cheap. Knows no frames and no disk.
//
// Each row has a set of batches that want it, one bit each: at most kMaxBatches batches are in the window at once, and a
// batch's bit is its number modulo that. A row's next use is the lowest set bit, counted from the oldest batch.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "memory.h"

namespace bunkbed {

class Window {
 public:
  static constexpr uint32_t kMaxBatches = 64;

  // Adds the next batch and returns its number: 1, 2, ... . Distinct rows; there must be room() for it.
  uint32_t push(const int64_t* rows, size_t n);
  // The batch is over (batches may end in any order): its rows no longer count. Their list stays valid until the next
  // push().
  const BlockVector<int64_t>& finish(uint32_t batch);
  // Forgets every batch and gives the memory back; numbers go on.
  void clear();

  bool has_room() const { return batches_.size() < kMaxBatches; }
  bool is_empty() const { return num_unfinished_ == 0; }
  // The oldest batch that is not over, or the next number when there is none.
  uint32_t first_batch() const { return first_batch_; }
  uint32_t next_batch() const { return first_batch_ + static_cast<uint32_t>(batches_.size()); }
  bool holds(uint32_t batch) const {
    return batch >= first_batch_ && batch < next_batch() && !batches_[batch - first_batch_].is_over;
  }
  const BlockVector<int64_t>& rows(uint32_t batch) const { return batches_[batch - first_batch_].rows; }

  // The first batch that wants the row; 0 when none does.
  uint32_t next_use(int64_t row) const {
    const Entry* entry = find(row);
    if (entry == nullptr) return 0;
    const int rotated = std::countr_zero(std::rotr(entry->uses, static_cast<int>(first_batch_ % kMaxBatches)));
    return first_batch_ + static_cast<uint32_t>(rotated);
  }
  void prefetch(int64_t row) const;

  size_t bytes() const;
  // What bytes() may be after another batch of n rows, at most.
  size_t bytes_after(size_t n) const;

 private:
  struct Entry {
    int64_t row;
    uint64_t uses;  // 0: the place is free
  };
  struct Batch {
    BlockVector<int64_t> rows;
    bool is_over = false;
  };
  static size_t capacity_for(size_t rows) { return std::bit_ceil(rows + rows / 2 + 64); }
  size_t home(int64_t row) const;
  const Entry* find(int64_t row) const;
  void grow(size_t capacity);
  void erase(size_t place);

  BlockVector<Entry> entries_;  // open addressing, linear probing; a power of two places
  size_t num_rows_ = 0;
  std::deque<Batch> batches_;   // [i] is batch first_batch_ + i; the first is not over
  BlockVector<int64_t> finished_;
  uint32_t first_batch_ = 1;
  size_t num_unfinished_ = 0;
  size_t list_bytes_ = 0;
};

}  // namespace bunkbed
