#include "batch/overlap.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace bunkbed {

void rows_in_other(const Batch& batch, const Batch& other, bool* in_other) {
  constexpr int64_t kFree = -1;
  const size_t capacity = std::bit_ceil(std::max<size_t>(16, 2 * other.num_unique()));
  const size_t mask = capacity - 1;
  const auto home = [&](int64_t row) {
    const auto x = static_cast<uint64_t>(row);
    return static_cast<size_t>(((x ^ (x >> 32)) * 0x9e3779b97f4a7c15ull) >> 32) & mask;
  };
  ArrayVector<int64_t> rows;
  rows.assign(capacity, kFree);
  for (const int64_t row : other.unique()) {
    size_t place = home(row);
    while (rows[place] != kFree) place = (place + 1) & mask;
    rows[place] = row;
  }
  for (size_t i = 0; i < batch.num_unique(); ++i) {
    const int64_t row = batch.unique()[i];
    size_t place = home(row);
    while (rows[place] != kFree && rows[place] != row) place = (place + 1) & mask;
    in_other[i] = rows[place] == row;
  }
}

}  // namespace bunkbed
