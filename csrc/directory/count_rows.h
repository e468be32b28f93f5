// How many rows and counts a commit's segments hold, without the directory that opening the table would build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "directory/directory.h"
#include "log/log.h"

namespace bunkbed {

// Reads the ids and versions of every chunk of `log`'s segments. One pass where there are no tombstones and a bit for
// each of `num_rows` rows fits `ram_bytes`; otherwise one pass for each share of the ids whose versions fit. Error when
// an id or a version cannot be the commit's. Calls `at` after each chunk; it may throw.
struct CountedRows {
  uint64_t rows = 0;
  uint64_t counted = 0;  // ids that have a count by `rule`
};
CountedRows count_rows(Log* log, int64_t num_rows, uint64_t versions_end, size_t ram_bytes, const CountRule& rule,
                       const std::function<void()>& at);

// Returns the counts of the ids whose hash is `part` modulo `parts`, by id. Takes memory for the counts in the log
// alone.
std::vector<std::pair<int64_t, Entry>> counts_in(Log* log, int64_t num_rows, uint64_t versions_end,
                                                 const CountRule& rule, uint64_t part, uint64_t parts);

}  // namespace bunkbed
