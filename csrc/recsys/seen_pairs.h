// A set of (user, item) pairs, for the sampling of negatives: is a pair in it, and which of these users has which of
// those items. The training loop samples in another thread during a step. In C++ both run at once, as the GIL is
// released.
//
// A one-hash Bloom filter of 16 to 32 bits a pair answers most questions from the processor's cache. Only a pair that
// it cannot exclude is searched in the sorted pairs. Where one bit for each user and item fits into that size, the
// filter is that bitmap, and exact.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/memory.h"

namespace bunkbed {

// About 12 bytes a pair and, once `clashes` was called, 4 more and 12 bytes a user and an item. Not thread-safe.
class SeenPairs {
 public:
  // Copies ascending keys user * num_items + item, also repeated ones. Error(kInvalid) where they do not ascend.
  SeenPairs(const int64_t* keys, size_t n, int64_t num_items);

  // Users and items must not be negative, items must be below num_items. Users after the last one with pairs have none.
  void contains(size_t n, const int64_t* users, const int64_t* items, bool* found) const;

  // Finds which of the items, all different, which of the users has: places in a matrix (num_users, num_items), row by
  // row, each once, unordered in a row. A user may occur more than once. `places` has room for 1 more than
  // most_clashes(), which checks the arguments.
  size_t most_clashes(size_t num_users, const int64_t* users, size_t num_items, const int64_t* items);
  size_t clashes(size_t num_users, const int64_t* users, size_t num_items, const int64_t* items, int64_t* places);

  // The items of a user, ascending.
  struct Items {
    const int64_t* keys;  // (n) user * num_items + item
    size_t n;
  };
  Items items_of(int64_t user) const;

  int64_t num_items() const { return num_items_; }

 private:
  uint64_t hash(int64_t key) const;
  void make_lists();
  size_t items_asked(size_t num_users, const int64_t* users) const;
  size_t owners_asked(size_t num_items, const int64_t* items) const;

  const int64_t num_items_;
  BlockVector<int64_t> keys_;
  bool is_exact_ = false;
  uint64_t last_bit_ = 0;  // stays 0; all keys after the last one use it
  unsigned shift_ = 0;
  BlockVector<uint8_t> bits_;
  // Made by the first clashes().
  BlockVector<int64_t> user_starts_;  // of each user in keys_, and the end
  BlockVector<int64_t> item_starts_;  // of each item in owners_, and the end
  BlockVector<int32_t> owners_;       // users, grouped by item
  BlockVector<int32_t> columns_;      // scratch: item -> its place in the arguments, or -1
  BlockVector<int32_t> rows_;         // scratch: user -> its last place in the arguments, or -1
  BlockVector<int32_t> before_;       // scratch: place in the arguments -> the same user's place before it, or -1
  struct Place {
    int32_t row;
    int32_t column;
  };
  BlockVector<Place> found_;  // scratch: clashes in the order of items
  BlockVector<size_t> ends_;  // scratch: where the clashes of each row are written
};

}  // namespace bunkbed
