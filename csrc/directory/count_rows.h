// How many rows a commit's segments hold, without the directory that opening the table would build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "log/log.h"

namespace bunkbed {

// Reads the ids and versions of every chunk of `log`'s segments, in as many passes as `ram_bytes` asks for: one where
// a bit for each of `num_rows` rows fits, otherwise one for each share of the ids that does. Error when an id or a
// version cannot be the commit's. `at` is called now and then and may throw.
uint64_t count_rows(Log* log, int64_t num_rows, uint64_t versions_end, size_t ram_bytes,
                    const std::function<void()>& at);

}  // namespace bunkbed
