// From a batch of ids to unique rows and, for each, its places in the batch in order. The order is a function of
// the batch alone (first occurrence; then position), so sums come out the same whatever the threads do.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory.h"

namespace bunkbed {

class Batch {
 public:
  // Dedupes ids[0..n). With `members` the batch is ids[members[0]], ids[members[1]], ... instead.
  void assign(const int64_t* ids, size_t n, const uint32_t* members = nullptr);
  // Fills order()/offsets(); after assign().
  void group();

  size_t size() const { return inverse_.size(); }
  size_t num_unique() const { return unique_.size(); }
  const BlockVector<int64_t>& unique() const { return unique_; }    // in order of first occurrence
  const BlockVector<uint32_t>& inverse() const { return inverse_; } // index into unique() per place in the batch
  const BlockVector<uint32_t>& order() const { return order_; }     // places grouped by unique row, ascending in each
  const BlockVector<uint32_t>& offsets() const { return offsets_; } // (num_unique + 1) starts into order()

  // Scratch a batch of n ids takes at most; what a budget must hold.
  static constexpr size_t bytes_per_id() { return 8 /*unique*/ + 4 + 4 + 4 /*inverse, order, offsets*/ + 16 /*table*/; }
  size_t bytes() const;

 private:
  BlockVector<int64_t> unique_;
  BlockVector<uint32_t> inverse_;
  BlockVector<uint32_t> order_;
  BlockVector<uint32_t> offsets_;
  BlockVector<uint32_t> table_;  // open addressing: index into unique_ + 1
};

}  // namespace bunkbed
