// Fills a directory from the chunk indexes of the log: for each id the record with the highest version (ENGINE
// rule 12). Also counts each segment's records and live records.
#pragma once

#include <cstdint>
#include <string>

#include "directory.h"
#include "log.h"

namespace bunkbed {

// `num_rows` < 0: any non-negative id. `versions_end`: versions at or above it are damage. `scratch_bytes` bounds the
// memory for versions: more rows than fit are handled in several passes over the indexes.
void rebuild_directory(Log* log, Directory* directory, int64_t num_rows, uint64_t versions_end, size_t scratch_bytes);

}  // namespace bunkbed
