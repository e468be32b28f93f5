// The parts of a table. Each part refers only to parts above it.
#pragma once

#include <memory>

#include "jobs/committer.h"
#include "jobs/compaction_job.h"
#include "jobs/disk_room.h"
#include "jobs/file_collector.h"
#include "jobs/index_snapshots.h"
#include "jobs/prefetcher.h"
#include "jobs/ram_snapshots.h"
#include "state/device_link.h"
#include "state/table_state.h"
#include "table/loader.h"
#include "table/row_reader.h"
#include "table/row_writer.h"
#include "table/snapshots.h"

namespace bunkbed {

struct TableParts {
  TableState state;
  std::unique_ptr<vfs::Lock> file_lock;  // null in a reader and in RAM
  DeviceLink device{state};
  RamSnapshots ram{state};
  IndexSnapshots index{state, device};
  FileCollector collector{state, index};
  CompactionJob compaction{state};
  Prefetcher prefetcher{state, compaction};
  DiskRoom disk{state, device, collector, prefetcher};
  Committer committer{state, device, disk, collector, index, compaction, ram};
  Loader loader{state, device, index, collector, prefetcher, disk};
  Snapshots snapshots{state, device, collector, committer, ram, loader};
  RowReader reader{state, device, prefetcher};
  RowWriter writer{state, device, prefetcher, disk};

  TableParts(vfs::Vfs& vfs, const std::string& path, const std::string& name, const TableSpec& spec,
             const OpenOptions& options)
      : state(vfs, path, name, spec, options) {}
  // Closes without a commit. Takes the lock.
  void close_files();
};

}  // namespace bunkbed
