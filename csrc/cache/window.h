// The rows that coming batches want: ids only, so that looking far ahead is cheap. Knows no frames and no disk.
//
// Each row has a set of batches that want it, one bit each: at most kMaxBatches batches are in the window at once, and
// a batch's bit is its number modulo that. A row's next use is the lowest set bit, counted from the oldest batch.
//
// Small rather than exact: an entry has 32 bits of the row's hash, and eight bytes in all. Two rows with the same bits
// count as one. That may keep an unwanted row in the cache and does no other harm: the window only ranks eviction.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "base/memory.h"

namespace bunkbed {

class Window {
 public:
  static constexpr uint32_t kMaxBatches = 32;

  // Adds the next batch and returns its number: 1, 2, ... . Distinct rows; there must be room() for it.
  uint32_t push(const int64_t* rows, size_t n);
  // Ends a batch; batches may end in any order. Its rows no longer count. tidy() frees their places; push() calls it
  // where it needs places.
  void finish(uint32_t batch);
  void tidy();
  // Removes every batch and frees the memory. Later batches get later numbers.
  void clear();

  bool has_room() const { return batches_.size() < kMaxBatches; }
  bool is_empty() const { return num_unfinished_ == 0; }
  // The oldest batch that is not over, or the next number when there is none.
  uint32_t first_batch() const { return first_batch_; }
  uint32_t next_batch() const { return first_batch_ + static_cast<uint32_t>(batches_.size()); }
  bool holds(uint32_t batch) const {
    return batch >= first_batch_ && batch < next_batch() && !batches_[batch - first_batch_].is_over;
  }
  // Both require holds(batch). copy_rows() copies rows [from, to).
  size_t num_rows(uint32_t batch) const { return batches_[batch - first_batch_].rows.size(); }
  void copy_rows(uint32_t batch, size_t from, size_t to, int64_t* out) const;

  // The first batch that wants the row; 0 when none does.
  uint32_t next_use(int64_t row) const {
    const size_t place = find(row);
    const uint32_t uses = place == kNowhere ? 0 : entries_[place].uses & unfinished_;
    if (uses == 0) return 0;
    const int rotated = std::countr_zero(std::rotr(uses, static_cast<int>(first_batch_ % kMaxBatches)));
    return first_batch_ + static_cast<uint32_t>(rotated);
  }
  void prefetch(int64_t row) const;

  size_t bytes() const;
  // Upper bound of bytes() after another batch of n rows.
  size_t bytes_after(size_t n) const;

 private:
  struct Entry {
    uint32_t tag;   // of the row
    uint32_t uses;  // 0: the place is free. Bits of batches that are over are stale
  };
  // Rows of one batch, in four bytes each where that is enough.
  class Rows {
   public:
    Rows(const int64_t* rows, size_t n);
    size_t size() const { return narrow_.size() + wide_.size(); }
    int64_t operator[](size_t i) const { return wide_.empty() ? int64_t{narrow_[i]} : wide_[i]; }
    size_t bytes() const { return narrow_.capacity() * sizeof(uint32_t) + wide_.capacity() * sizeof(int64_t); }

   private:
    BlockVector<uint32_t> narrow_;
    BlockVector<int64_t> wide_;
  };
  struct Batch {
    Rows rows;
    bool is_over = false;
  };
  static constexpr size_t kNowhere = ~size_t{0};
  static uint32_t bit_of(uint32_t batch) { return uint32_t{1} << (batch % kMaxBatches); }
  static size_t capacity_for(size_t rows) { return rows + rows / 4 + 16; }
  static uint32_t tag_of(int64_t row);
  size_t home(uint32_t tag) const { return static_cast<size_t>(uint64_t{tag} * entries_.size() >> 32); }
  size_t after(size_t place) const { return place + 1 == entries_.size() ? 0 : place + 1; }
  size_t distance(size_t from, size_t to) const { return to >= from ? to - from : to + entries_.size() - from; }
  size_t find(int64_t row) const;
  void add(const Rows& rows, uint32_t batch);
  void grow(size_t capacity);
  void erase(size_t place);

  BlockVector<Entry> entries_;  // open addressing, linear probing
  size_t num_rows_ = 0;         // places that are not free
  uint32_t unfinished_ = 0;     // bits of the batches that are not over
  uint32_t untidied_ = 0;       // bits of batches that are over and may still be in entries
  std::deque<Batch> batches_;   // [i] is batch first_batch_ + i; the first is not over
  uint32_t first_batch_ = 1;
  size_t num_unfinished_ = 0;
  size_t list_bytes_ = 0;
};

}  // namespace bunkbed
