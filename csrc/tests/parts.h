// The parts of a table, for tests that call one of its parts (table/parts.h has the same parts for Table).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

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
#include "table/table.h"
#include "tests/check.h"

namespace bunkbed::test {

struct TableParts {
  TableState state;
  DeviceLink device{state};
  RamSnapshots ram{state};
  IndexSnapshots index{state, device};
  FileCollector collector{state, index};
  CompactionJob compaction{state};
  Prefetcher prefetcher{state, compaction};
  DiskRoom disk{state, device, collector, prefetcher};
  Committer committer{state, device, disk, collector, index, compaction, ram};
  Loader loader{state, device, index, collector, prefetcher, disk};
  RowReader reader{state, device, prefetcher};
  RowWriter writer{state, device, prefetcher, disk};

  // A new table in RAM only.
  explicit TableParts(const TableSpec& spec, size_t ram_bytes = 0)
      : state(vfs::posix(), "", "t", spec, with_ram(ram_bytes)) {
    loader.start_in_ram(Uuid{1});
  }
  // The newest commit of the table at `path`, which `spec` describes.
  TableParts(vfs::Vfs& vfs, const std::string& path, const TableSpec& spec, const OpenOptions& options)
      : state(vfs, path, "t", spec, options) {
    loader.load(Manifests(vfs, path).load_newest());
    loader.finish_opening();
  }
  // Without a commit.
  ~TableParts() {
    index.prepare_to_close(false);
    const auto guard = state.lock.exclusive();
    committer.join();
    loader.drop_store();
  }
  TableParts(const TableParts&) = delete;
  TableParts& operator=(const TableParts&) = delete;

  // Adds 1 to each element of a row for each time that `ids` names it (for the spec of model.h: SGD with lr 1).
  void add_one(const std::vector<int64_t>& ids) {
    const std::vector<float> grads(ids.size() * state.spec.dim, -1.0f);
    writer.update(ids.data(), ids.size(), grads.data(), std::nullopt, std::nullopt);
  }
  // The value of a row, whose elements are all equal.
  float value(int64_t id) {
    std::vector<float> row(state.spec.dim);
    reader.lookup(&id, 1, false, row.data());
    for (const float element : row) CHECK_EQ(element, row[0]);
    return row[0];
  }

  static OpenOptions with_ram(size_t ram_bytes) {
    OpenOptions options;
    options.ram_bytes = ram_bytes;
    return options;
  }
};

// The parts of a new table at `path`.
inline std::unique_ptr<TableParts> new_parts(vfs::Vfs& vfs, const std::string& path, const TableSpec& spec,
                                             const OpenOptions& options) {
  Table::create(vfs, path, "t", spec, options.ram_bytes, options.disk_bytes).reset();
  return std::make_unique<TableParts>(vfs, path, spec, options);
}

}  // namespace bunkbed::test
