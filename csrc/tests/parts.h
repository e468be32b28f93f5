// The parts of a table, for tests that call one of them.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "table/parts.h"
#include "table/table.h"
#include "tests/check.h"

namespace bunkbed::test {

struct Parts : TableParts {
  // A new table in RAM only.
  explicit Parts(const TableSpec& spec, size_t ram_bytes = 0)
      : TableParts(vfs::posix(), "", "t", spec, with_ram(ram_bytes)) {
    loader.start_in_ram(Uuid{1});
  }
  // The newest commit of the table at `path`, which `spec` describes.
  Parts(vfs::Vfs& vfs, const std::string& path, const TableSpec& spec, const OpenOptions& options)
      : TableParts(vfs, path, "t", spec, options) {
    loader.load(Manifests(vfs, path).load_newest());
    loader.finish_opening();
  }
  ~Parts() {
    index.prepare_to_close(false);
    close_files();
  }

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
inline std::unique_ptr<Parts> new_parts(vfs::Vfs& vfs, const std::string& path, const TableSpec& spec,
                                        const OpenOptions& options) {
  Table::create(vfs, path, "t", spec, options.ram_bytes, options.disk_bytes).reset();
  return std::make_unique<Parts>(vfs, path, spec, options);
}

}  // namespace bunkbed::test
