// The ids of a table that steps have named and not stored, with the counts of these steps.
#pragma once

#include <cstdint>
#include <vector>

#include "table/table.h"

namespace bunkbed {

class CountedIds {
 public:
  // The table outlives this.
  explicit CountedIds(Table* table) : table_(table) {}

  // The ids whose hash is `part` modulo `parts`, their counts, and the latest times when these can have been raised.
  // `since`: of the last forget(). A reader finds them in the files of its commit.
  struct Found {
    std::vector<int64_t> ids, counts, times;
    int64_t since = 0;
  };
  Found find(uint64_t part, uint64_t parts);
  // Gives ids these counts, for a table that takes over the rows of another one. Ids of rows that are stored are
  // skipped. Throws before anything changes where a count or a time is out of range.
  void set(const int64_t* ids, const int64_t* counts, const int64_t* times, size_t n);
  // Forgets the counts of ids that were last named before this time. Returns how many.
  uint64_t forget(int64_t before);

 private:
  Table* const table_;
};

}  // namespace bunkbed
