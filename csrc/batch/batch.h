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
  // Dedupes ids[0..n), none negative. With `members` the batch is ids[members[0]], ids[members[1]], ... instead; places
  // are then those in `ids`, and there is no inverse(). Each id is read once. If another thread changes `ids`
  // meanwhile, the batch may hold other ids than the caller checked: check unique() again.
  void assign(const int64_t* ids, size_t n, const uint32_t* members = nullptr);

  size_t size() const { return order_.size(); }
  size_t num_unique() const { return unique_.size(); }
  const ArrayVector<int64_t>& unique() const { return unique_; }     // in order of first occurrence
  const ArrayVector<uint32_t>& inverse() const { return inverse_; }  // index into unique() per place in the batch
  const ArrayVector<uint32_t>& order() const { return order_; }      // places grouped by unique row, ascending in each
  const ArrayVector<uint32_t>& offsets() const { return offsets_; }  // (num_unique + 1) starts into order()

  // Where the rows were at their last use. The store fills it, so that the next operation on the batch need not locate
  // them again. Only one table at a time may use a batch.
  struct Placement {
    ArrayVector<uint32_t> frames;  // of unique()
    uint64_t version = 0;          // of the directory at that time
    uint64_t step = 0;             // in which the rows were touched; 0: none
  };
  Placement& placement() const { return placement_; }

 private:
  void assign_whole(const int64_t* ids, size_t n, const uint32_t* members);
  void assign_parts(const int64_t* ids, size_t n, const uint32_t* members);

  ArrayVector<int64_t> unique_;
  ArrayVector<uint32_t> inverse_;
  ArrayVector<uint32_t> order_;
  ArrayVector<uint32_t> offsets_;
  mutable Placement placement_;
};

}  // namespace bunkbed
