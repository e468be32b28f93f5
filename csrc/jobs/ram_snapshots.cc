#include "jobs/ram_snapshots.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace bunkbed {

std::vector<Manifests::Snapshot> RamSnapshots::list() const {
  std::vector<Manifests::Snapshot> found;
  for (const RamSnapshot& snapshot : snapshots_) found.push_back({snapshot.name, snapshot.epoch});
  return found;
}

void RamSnapshots::drop(const std::string& name) {
  const size_t dropped =
      std::erase_if(snapshots_, [&name](const RamSnapshot& snapshot) { return snapshot.name == name; });
  if (dropped == 0) throw Error(ErrorKind::kInvalid, "table '" + table_.name + "' has no snapshot '" + name + "'");
}

void RamSnapshots::keep(const std::string& name) {
  RamSnapshot snapshot{name,        table_.committed.epoch,
                       table_.step, table_.event_clock,
                       table_.meta, {},
                       {},          table_.store->counts().since(),
                       {},          {}};
  Cache& cache = table_.store->cache();
  for (uint32_t frame = 0; frame < cache.high_water(); ++frame) {
    if (cache.info(frame).row < 0) continue;
    snapshot.rows.push_back(cache.info(frame).row);
    snapshot.records.insert(snapshot.records.end(), cache.record(frame), cache.record(frame) + table_.payload_bytes);
  }
  table_.store->counts().each([&](int64_t row, Entry count) {
    snapshot.counted.push_back(row);
    snapshot.counts.push_back(count);
  });
  std::erase_if(snapshots_, [&name](const RamSnapshot& old) { return old.name == name; });
  snapshots_.push_back(std::move(snapshot));
}

const RamSnapshot& RamSnapshots::find(const std::string& name, std::optional<uint64_t> epoch) const {
  const auto found = std::find_if(snapshots_.begin(), snapshots_.end(), [&](const RamSnapshot& snapshot) {
    return epoch.has_value() ? snapshot.epoch == *epoch : snapshot.name == name;
  });
  if (found == snapshots_.end() && epoch == uint64_t{0}) return start_;
  if (found == snapshots_.end()) {
    std::string known;
    for (const RamSnapshot& snapshot : snapshots_) {
      known += (known.empty() ? "'" : ", '") + snapshot.name + "' (commit " + std::to_string(snapshot.epoch) + ")";
    }
    throw Error(ErrorKind::kInvalid,
                "table '" + table_.name + "' has no snapshot " +
                    (epoch.has_value() ? "of commit " + std::to_string(*epoch) : "'" + name + "'") +
                    "; it lives in RAM only, where " + (known.empty() ? "none is kept" : "these are kept: " + known));
  }
  return *found;
}

}  // namespace bunkbed
