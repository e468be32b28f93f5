#include "directory/directory.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "directory/flat_directory.h"
#include "directory/hashed_directory.h"

namespace bunkbed {

Directory::Directory() {
  static std::atomic<uint64_t> directories{0};
  version_ = ++directories << 40;
}

// A partition takes up to kGrowth times what its rows need and one slot, but kLeastSlots at least, and is copied while
// it grows. The chance of a partition that needs fewer slots than the least falls with its expected rows.
size_t hashed_directory_bytes(uint64_t stored_rows) {
  const double rows = static_cast<double>(stored_rows);
  const double even = rows / kPartitions;  // rows of a partition: binomially distributed
  const double used = std::min(rows, static_cast<double>(kPartitions));
  const double slots = rows / kMaxLoad * kGrowth + used * (1 + kLeastSlots * std::exp(-even / 5));
  const double largest = std::max<double>(kLeastSlots, std::min(rows, even + 6 * std::sqrt(even) + 6) / kMaxLoad * kGrowth + 1);
  const double bytes = (slots + largest) * kSlotBytes;
  return kPartitions * sizeof(Partition) + static_cast<size_t>(std::min(bytes, 0x1p60));
}

std::unique_ptr<Directory> make_flat_directory(uint64_t num_rows) { return std::make_unique<FlatDirectory>(num_rows); }
std::unique_ptr<Directory> make_hashed_directory() { return std::make_unique<HashedDirectory>(); }

std::vector<int64_t> absent_rows(const Directory& directory, const int64_t* rows, size_t n) {
  constexpr size_t kBlock = 256;
  std::vector<int64_t> absent;
  Entry entries[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    directory.locate(rows + begin, count, entries);
    for (size_t i = 0; i < count; ++i) {
      if (entries[i] == kAbsent) absent.push_back(rows[begin + i]);
    }
  }
  return absent;
}

}  // namespace bunkbed
