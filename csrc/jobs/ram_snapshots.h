// The kept commits of a table in RAM only: copies of its rows, which do not count in its RAM budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "commit/manifests.h"
#include "state/table_state.h"

namespace bunkbed {

struct RamSnapshot {
  std::string name;
  uint64_t epoch = 0;
  int64_t step = 0;
  int64_t clock = 0;
  std::string meta;
  std::vector<int64_t> rows;
  std::vector<std::byte> records;
  int64_t counts_since = 0;
  std::vector<int64_t> counted;
  std::vector<Entry> counts;
};

class RamSnapshots {
 public:
  explicit RamSnapshots(TableState& table)
      : table_(table), start_{"", 0, 0, table.spec.retention.first_time(), "{}", {}, {}, 0, {}, {}} {}
  RamSnapshots(const RamSnapshots&) = delete;
  RamSnapshots& operator=(const RamSnapshots&) = delete;

  // All require the lock.
  std::vector<Manifests::Snapshot> list() const REQUIRES(table_.lock);
  // Copies the present state under a name. Replaces an earlier copy of that name.
  void keep(const std::string& name) REQUIRES(table_.lock);
  // Both throw Error(kInvalid) when there is no such copy. Epoch 0, the table as it was made, is always there.
  void drop(const std::string& name) REQUIRES(table_.lock);
  const RamSnapshot& find(const std::string& name, std::optional<uint64_t> epoch) const REQUIRES(table_.lock);

 private:
  TableState& table_;
  std::vector<RamSnapshot> snapshots_ GUARDED_BY(table_.lock);
  const RamSnapshot start_;
};

}  // namespace bunkbed
