// Lists, drops and goes back to kept commits. The public methods take the lock. Table declares them for users.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "commit/manifests.h"
#include "jobs/committer.h"
#include "jobs/file_collector.h"
#include "jobs/ram_snapshots.h"
#include "state/device_link.h"
#include "state/table_state.h"
#include "table/loader.h"

namespace bunkbed {

class Snapshots {
 public:
  Snapshots(TableState& table, DeviceLink& device, FileCollector& collector, Committer& committer, RamSnapshots& ram,
            Loader& loader)
      : table_(table), device_(device), collector_(collector), committer_(committer), ram_(ram), loader_(loader) {}
  Snapshots(const Snapshots&) = delete;
  Snapshots& operator=(const Snapshots&) = delete;

  std::vector<Manifests::Snapshot> list();
  void drop(const std::string& name);
  void rewind(const std::string& name, std::optional<uint64_t> epoch);

 private:
  // Both require the lock of exclusive().
  Manifest target_of(const std::string& name, std::optional<uint64_t> epoch) const REQUIRES(table_.lock);
  void rewind_in_ram(const std::string& name, std::optional<uint64_t> epoch) REQUIRES(table_.lock);

  TableState& table_;
  DeviceLink& device_;
  FileCollector& collector_;
  Committer& committer_;
  RamSnapshots& ram_;
  Loader& loader_;
};

}  // namespace bunkbed
