// What a table asks before a tier above trains rows of it: see holder.h.
#include <algorithm>

#include "base/error.h"
#include "table/table.h"

namespace bunkbed {

// Rows that are stored nowhere yet get a place in the directory when they are written back, which would be too late to
// find that there is none. All the holder's rows may be such.
void Table::require_directory_above(const int64_t* ids, size_t n) const {
  const MemoryPlan& plan = store_->plan();
  if (holder_ == nullptr || plan.total_bytes == 0 || !store_->directory().grows()) return;
  const uint64_t most = spec_.num_rows < 0 ? ~uint64_t{0} : static_cast<uint64_t>(spec_.num_rows);
  const uint64_t stored = std::min(most, store_->directory().stored_rows() + rows_above());
  const size_t directory = std::max(store_->directory().bytes(), hashed_directory_bytes(stored));
  const size_t needed = plan.fixed_bytes + directory + kMinFrames * Cache::frame_cost(payload_bytes_);
  if (needed <= plan.total_bytes) return;
  Entry entries[256];
  for (size_t begin = 0; begin < n; begin += 256) {
    const size_t count = std::min<size_t>(256, n - begin);
    store_->directory().locate(ids + begin, count, entries);
    if (std::find(entries, entries + count, kAbsent) == entries + count) continue;
    throw Error(ErrorKind::kMemory,
                "table '" + name_ + "': with the " + std::to_string(rows_above()) + " rows of its device cache " +
                    std::to_string(stored) + " rows may be stored, whose directory of " + std::to_string(directory) +
                    " bytes is more than its RAM budget of " + std::to_string(plan.total_bytes) +
                    " bytes allows; nothing was changed; open it with ram=" + std::to_string(needed) +
                    " or more, or make the device cache smaller");
  }
}

}  // namespace bunkbed
