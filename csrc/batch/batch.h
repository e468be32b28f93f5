// From a batch of ids to its unique rows and, for each row, its places in the batch in order.
//
// Rows are numbered in order of first occurrence in the whole batch: rows and gradients are then visited nearly in the
// order of memory (numbering by partition made sums twice as slow). One thread and one hash table do this for a small
// batch. For a large one all threads do:
//   1. The ids are distributed to partitions by hash, in batch order. The hash table of one partition fits into the
//      processor's first-level cache.
//   2. Each partition is deduped alone, and its places are grouped by row.
//   3. The rows of all partitions are numbered.
// The result is the same for both ways: a function of the batch alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/memory.h"

namespace bunkbed {

class Batch {
 public:
  // Dedupes ids[0..n). With `members` the batch is ids[members[0]], ids[members[1]], ... instead; places
  // are then those in `ids`, and there is no inverse(). Each id is read once. If another thread changes `ids`
  // meanwhile, the batch may hold other ids than the caller checked: check unique() instead.
  void assign(const int64_t* ids, size_t n, const uint32_t* members = nullptr);

  // unique() was checked: every row is in [0, end). Holds until the next assign(), which sets 0.
  void set_checked(uint64_t end) { checked_end_ = end; }
  uint64_t checked_end() const { return checked_end_; }

  size_t size() const { return order_.size(); }
  size_t num_unique() const { return unique_.size(); }
  const ArrayVector<int64_t>& unique() const { return unique_; }     // in order of first occurrence
  const ArrayVector<uint32_t>& inverse() const { return inverse_; }  // index into unique() per place in the batch
  const ArrayVector<uint32_t>& order() const { return order_; }      // places grouped by unique row, ascending in each
  const ArrayVector<uint32_t>& offsets() const { return offsets_; }  // (num_unique + 1) starts into order()

  // Writes what a device needs for lookups and sums of gradients: inverse() [N], order() [N], the start of each row in
  // it [U] and, where a row has more than `most` places, the first piece of each row [U] and the first place of each
  // piece [P]. A piece has at most `most` places of one row. Returns P, or 0 where no row is cut. `out` has room for
  // max_numbers(most) numbers.
  size_t write_numbers(size_t most, int64_t* out) const;
  size_t max_numbers(size_t most) const { return 2 * size() + 3 * num_unique() + size() / most; }

  // Where the rows were when the directory last had `version`. The store fills it, so that no later operation on the
  // batch locates them again while that version stands. Only one table at a time may use a batch.
  struct Placement {
    ArrayVector<uint32_t> frames;   // of unique(), or no frame
    ArrayVector<uint64_t> entries;  // of the directory, for the rows without a frame; the others are undefined
    size_t missing = 0;             // rows without a frame
    uint64_t version = 0;
    uint64_t step = 0;  // in which the rows were touched; 0: none
  };
  Placement& placement() const { return placement_; }

 private:
  void assign_whole(const int64_t* ids, size_t n, const uint32_t* members);
  void assign_parts(const int64_t* ids, size_t n, const uint32_t* members);

  ArrayVector<int64_t> unique_;
  ArrayVector<uint32_t> inverse_;
  ArrayVector<uint32_t> order_;
  ArrayVector<uint32_t> offsets_;
  uint64_t checked_end_ = 0;
  mutable Placement placement_;
};

}  // namespace bunkbed
