// Sizes that the row operations share. Work larger than the scratch memory or the cache is done in exact pieces:
// lookups by ranges of the batch, updates by parts of the ids (all places of an id are in one part).
#pragma once

#include <algorithm>
#include <cstddef>

namespace bunkbed {

// Scratch bytes for each id of a batch: the dedupe, entries, frames and read requests.
inline constexpr size_t kScratchPerId = 96;
inline constexpr size_t kBlockIds = 1024;  // ids of one block of a parallel loop over the batch

// Rows of one block of a parallel loop over unique rows: about 64 KiB of weights, so that a small batch stays on the
// caller's thread and a large one is distributed evenly.
inline size_t row_grain(size_t dim) { return std::max<size_t>(8, 16384 / std::max<size_t>(1, dim)); }

}  // namespace bunkbed
