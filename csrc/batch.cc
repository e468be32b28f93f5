#include "batch.h"

#include <algorithm>
#include <bit>

#include "directory.h"

namespace bunkbed {

void Batch::assign(const int64_t* ids, size_t n, const uint32_t* members) {
  const size_t capacity = std::bit_ceil(std::max<size_t>(16, n * 2));
  const size_t mask = capacity - 1;
  table_.assign(capacity, 0);
  inverse_.resize(n);
  unique_.clear();
  unique_.reserve(n);
  constexpr size_t kAhead = 8;
  const auto id_at = [&](size_t i) { return members == nullptr ? ids[i] : ids[members[i]]; };
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&table_[mix_id(id_at(i + kAhead)) & mask]);
    const int64_t id = id_at(i);
    size_t slot = mix_id(id) & mask;
    for (;;) {
      const uint32_t known = table_[slot];
      if (known == 0) {
        unique_.push_back(id);
        table_[slot] = static_cast<uint32_t>(unique_.size());
        inverse_[i] = static_cast<uint32_t>(unique_.size() - 1);
        break;
      }
      if (unique_[known - 1] == id) {
        inverse_[i] = known - 1;
        break;
      }
      slot = (slot + 1) & mask;
    }
  }
}

void Batch::group() {
  // Counting sort: stable, so each row's places stay in batch order.
  offsets_.assign(unique_.size() + 1, 0);
  for (const uint32_t u : inverse_) ++offsets_[u + 1];
  for (size_t u = 1; u < offsets_.size(); ++u) offsets_[u] += offsets_[u - 1];
  order_.resize(inverse_.size());
  // offsets_ serves as the write cursors and is shifted back afterwards.
  for (size_t i = 0; i < inverse_.size(); ++i) order_[offsets_[inverse_[i]]++] = static_cast<uint32_t>(i);
  for (size_t u = unique_.size(); u > 0; --u) offsets_[u] = offsets_[u - 1];
  offsets_[0] = 0;
}

size_t Batch::bytes() const {
  return unique_.capacity() * 8 + (inverse_.capacity() + order_.capacity() + offsets_.capacity() + table_.capacity()) * 4;
}

}  // namespace bunkbed
