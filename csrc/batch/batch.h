// From a batch of ids to unique rows and, for each, its places in the batch in order.
//
// Rows are numbered in order of first occurrence, in the whole batch: rows and gradients are then visited nearly in the
// order they lie in memory (numbering them by partition made sums twice as slow). One thread does all of it, by one hash
// table, or, where the batch is large, all of them:
//   1. The ids are dealt to partitions by hash, in batch order: so many that the hash table of one stays in the
//      processor's first cache.
//   2. Each partition is deduped by itself and its places grouped by row.
//   3. The rows of all partitions are numbered.
// Which of the two it was shows nowhere: the result is a function of the batch alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/memory.h"

namespace bunkbed {

class Batch {
 public:
  // Dedupes ids[0..n), none negative. With `members` the batch is ids[members[0]], ids[members[1]], ... instead; places
  // are then those in `ids`, and there is no inverse(). Each id is read once: where another thread changes them meanwhile,
  // the batch is one of ids that were there, and unique() is to be checked again.
  void assign(const int64_t* ids, size_t n, const uint32_t* members = nullptr);

  size_t size() const { return order_.size(); }
  size_t num_unique() const { return unique_.size(); }
  const ArrayVector<int64_t>& unique() const { return unique_; }     // in order of first occurrence
  const ArrayVector<uint32_t>& inverse() const { return inverse_; }  // index into unique() per place in the batch
  const ArrayVector<uint32_t>& order() const { return order_; }      // places grouped by unique row, ascending in each
  const ArrayVector<uint32_t>& offsets() const { return offsets_; }  // (num_unique + 1) starts into order()

  // Where the rows were when they were last wanted: the store's to fill, so that the next operation on the batch need
  // not look for them again. One table at a time may be given a batch.
  struct Placement {
    ArrayVector<uint32_t> frames;  // of unique()
    uint64_t version = 0;          // of the directory that said so
    uint64_t step = 0;             // in which they were counted as wanted; 0: none
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
