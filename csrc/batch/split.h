// The ids and gradients of a batch, divided among shards or processes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bunkbed {

// The part of an id is that of its shard: parts[shard], for each of `shards` shards, below num_parts.
struct PartRule {
  const uint16_t* parts;
  uint32_t shards;
  size_t num_parts;
};

// Writes the places of ids[0..n) grouped by part, ascending in each, to order[0..n), and where the parts start to
// bounds[0..num_parts]. Returns n, or the place of the first id without a part, whose shard has num_parts or more.
size_t split_ids(const int64_t* ids, size_t n, const PartRule& rule, int64_t* order, int64_t* bounds);

// Writes rows[places[i]] * factor, each of `dim` values, to out + i * dim.
void gather_scaled(const float* rows, const int64_t* places, size_t n, size_t dim, float factor, float* out);

}  // namespace bunkbed
