// How many rows a commit's segments hold, without the directory that opening the table would build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "log/log.h"

namespace bunkbed {

// Reads the ids and versions of every chunk of `log`'s segments. One pass where there are no tombstones and a bit for
// each of `num_rows` rows fits `ram_bytes`; otherwise one pass for each share of the ids whose versions fit. Error when
// an id or a version cannot be the commit's. Calls `at` after each chunk; it may throw.
uint64_t count_rows(Log* log, int64_t num_rows, uint64_t versions_end, size_t ram_bytes,
                    const std::function<void()>& at);

}  // namespace bunkbed
