#include "batch/split.h"

#include <algorithm>
#include <cstring>

#include "base/memory.h"
#include "base/workers.h"
#include "batch/pieces.h"
#include "format/shard_rule.h"
#include "kernels/kernels.h"

namespace bunkbed {

size_t split_ids(const int64_t* ids, size_t n, const PartRule& rule, int64_t* order, int64_t* bounds) {
  ArrayVector<uint16_t> parts(n);
  std::fill_n(bounds, rule.num_parts + 1, int64_t{0});
  for (size_t i = 0; i < n; ++i) {
    parts[i] = rule.parts[shard_of(ids[i], rule.shards)];
    if (parts[i] >= rule.num_parts) return i;
    ++bounds[parts[i] + 1];
  }
  for (size_t part = 0; part < rule.num_parts; ++part) bounds[part + 1] += bounds[part];
  // `bounds` serve as the write cursors and are shifted back afterwards.
  for (size_t i = 0; i < n; ++i) order[bounds[parts[i]]++] = static_cast<int64_t>(i);
  for (size_t part = rule.num_parts; part > 0; --part) bounds[part] = bounds[part - 1];
  bounds[0] = 0;
  return n;
}

void gather_scaled(const float* rows, const int64_t* places, size_t n, size_t dim, float factor, float* out) {
  constexpr size_t kBlockFloats = 1024;  // scaled while they are in the first-level cache
  const size_t block = std::max<size_t>(1, kBlockFloats / std::max<size_t>(1, dim));
  parallel_for(n, row_grain(dim), [&](size_t from, size_t to) {
    for (size_t begin = from; begin < to; begin += block) {
      const size_t end = std::min(to, begin + block);
      for (size_t i = begin; i < end; ++i) {
        std::memcpy(out + i * dim, rows + static_cast<size_t>(places[i]) * dim, dim * sizeof(float));
      }
      if (factor != 1.0f) kernels().scale_row(static_cast<int64_t>((end - begin) * dim), factor, out + begin * dim);
    }
  });
}

}  // namespace bunkbed
