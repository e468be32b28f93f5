// What all parts of a table share: its identity, its lock, its last commit and its rows, and the checks that calls make
// first. The parts (jobs/, table/) keep their own state elsewhere and refer to this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "base/types.h"
#include "batch/batch.h"
#include "commit/manifests.h"
#include "format/format.h"
#include "state/table_lock.h"
#include "state/table_spec.h"
#include "store/store.h"
#include "vfs/vfs.h"

namespace bunkbed {

struct TableState {
  TableState(vfs::Vfs& vfs, std::string path, std::string name, const TableSpec& spec, OpenOptions options);
  TableState(const TableState&) = delete;
  TableState& operator=(const TableState&) = delete;

  // ---- Identity: set before the table is handed out. Readable without the lock, but for spec.optimizer and
  // options.ram_bytes, which change with it.
  vfs::Vfs& vfs;
  const std::string path;  // empty: a table in RAM only
  const std::string name;  // as errors give it
  TableSpec spec;
  OpenOptions options;
  Uuid uuid{};
  std::vector<Field> fields;  // of a record: weights, then the optimizer's slots
  size_t payload_bytes = 0;
  size_t weight_bytes = 0;
  size_t read_unit = 1;  // the alignment that reads of the files need

  mutable TableLock lock;  // guards everything below

  Manifests manifests;
  Manifest committed;  // the last one; of it only what describes the whole table
  std::unique_ptr<Store> store;
  int64_t step = 0;
  std::string meta = "{}";
  bool is_closed = false;
  bool is_changed = false;         // updated or set since the last commit began
  bool is_durable = true;          // what the last commit that began holds
  uint64_t changes = 0;            // counts updates, sets and reloads; a running scan must see none
  std::string broken;              // why the table refuses use until it is reopened
  std::string read_only_reason;    // why it refuses writes until it is reopened

  struct Counts {
    uint64_t lookups = 0, updates = 0, ids = 0, commits = 0;
    uint64_t indexed_records = 0;
    uint64_t staged_rows = 0;
    double stall_s = 0.0;
  } counts;

  // Memory kept between calls, so that a step allocates nothing once it is warm.
  struct Scratch {
    Batch batch;
    BlockVector<int64_t> missing_ids;
    BlockVector<uint32_t> missing;
    BlockVector<uint32_t> missing_counts;
    BlockVector<uint32_t> frames;
    BlockVector<uint32_t> members;
    BlockVector<float> sums;
    BlockVector<std::byte> records;
    BlockVector<size_t> pooled_to;    // per bag of a piece: the place up to which its rows were added
    BlockVector<int64_t> bag_starts;  // per bag of a piece, and the end of the last one
    BlockVector<int64_t> bag_ids;
  } scratch;

  // ---- All below require the lock, but for the checks of arguments.

  // Rows were updated or set.
  void mark_changed() {
    is_changed = true;
    ++changes;
  }
  bool has_files() const { return store->log() != nullptr && !spec.is_scratch; }
  // Whether a row in RAM may ever have to leave. When none may, a lookup need not note which rows it wanted.
  bool may_evict() const {
    const bool holds_all = spec.num_rows >= 0 && store->cache().capacity() >= static_cast<uint64_t>(spec.num_rows);
    return store->log() != nullptr && !holds_all;
  }
  // The most ids that one piece of a call takes; the scratch holds what it needs for so many.
  size_t piece_ids() const;
  size_t num_pieces(size_t n) const { return std::max<size_t>(1, (n + piece_ids() - 1) / piece_ids()); }
  uint64_t ids_end() const { return spec.num_rows < 0 ? uint64_t{1} << 63 : static_cast<uint64_t>(spec.num_rows); }
  uint64_t max_rows() const { return spec.num_rows < 0 ? ~uint64_t{0} : static_cast<uint64_t>(spec.num_rows); }

  void require_usable() const;
  void require_writable() const;
  void require_durable(const char* what) const;
  Error invalid(const std::string& what) const { return {ErrorKind::kInvalid, "table '" + name + "'" + what}; }
  // ENOSPC, which says that a limit of `needed` bytes would do.
  Error out_of_disk(const std::string& what, uint64_t needed) const;

  // ---- Checks of arguments. An error names the first bad value, its place and what to do.
  void check_ids(const int64_t* ids, size_t n) const;
  // batch->assign(), and the check of the rows that the batch holds: of a copy, so another thread that changes the caller's
  // ids meanwhile does no harm.
  void assign_checked(Batch* batch, const int64_t* ids, size_t n, const uint32_t* members = nullptr) const;
  // Checks the rows of a batch unless assign_checked() did that for this table or one of the same size.
  void check_batch(const Batch& batch) const;
  // The ids of part `part` of `parts`, split by hash: all places of an id are in one part.
  void assign_part(Batch* batch, const int64_t* ids, size_t n, size_t part, size_t parts);
  // Places in the ids of a call are kept in 32 bits.
  void require_places(size_t n) const;
  void check_finite(const int64_t* ids, size_t n, const float* values, size_t length, const char* what) const;
  // A finite value beyond the type of the field would be stored as infinity.
  void check_fits(const int64_t* ids, size_t n, const float* values, const Field& field) const;

  [[noreturn]] void refuse_id(int64_t id, size_t position) const;

  // Writes the first `record_bytes` (the weights or everything) of the record of a row that was never stored.
  void initial_record(int64_t row, size_t record_bytes, std::byte* record) const;
};

}  // namespace bunkbed
