// The state that all parts of a table share: identity, lock, last commit and rows, with the checks that calls make
// first. The parts (jobs/, table/) have their own state and refer to this one.
#pragma once

#include <atomic>
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
#include "format/record.h"
#include "state/table_lock.h"
#include "state/table_spec.h"
#include "store/store.h"
#include "vfs/vfs.h"

namespace bunkbed {

struct TableState {
  TableState(vfs::Vfs& vfs, std::string path, std::string name, const TableSpec& spec, OpenOptions options);
  TableState(const TableState&) = delete;
  TableState& operator=(const TableState&) = delete;

  // ---- Identity: set before the table is handed out. Needs no lock, except spec.optimizer and options.ram_bytes,
  // which change under the lock, as rules of spec.retention do.
  vfs::Vfs& vfs;
  const std::string path;  // empty: a table in RAM only
  const std::string name;  // for errors
  TableSpec spec;
  const bool has_usage;  // of each row, at the end of its record
  OpenOptions options;
  Uuid uuid{};
  std::vector<Field> fields;  // of a record: weights, then the optimizer's slots
  size_t payload_bytes = 0;
  size_t weight_bytes = 0;
  size_t usage_offset() const { return payload_bytes - kUsageBytes; }
  // The field with this number. The one after the last is the usage, whose bytes are moved as floats by those who copy
  // rows.
  Field field(size_t number) const {
    if (number < fields.size() || !has_usage) return fields.at(number);
    return {"usage", static_cast<uint8_t>(DType::kFloat32), kUsageBytes / sizeof(float),
            static_cast<uint32_t>(usage_offset())};
  }
  Manifests manifests;   // has a lock of its own; changes of the commits run one at a time
  size_t read_unit = 1;  // the alignment that reads of the files need

  mutable TableLock lock;

  // Of the last commit; without files only its epoch and optimizer are kept up to date
  Manifest committed GUARDED_BY(lock);
  std::unique_ptr<Store> store GUARDED_BY(lock);
  int64_t step GUARDED_BY(lock) = 0;
  int64_t event_clock GUARDED_BY(lock) = 0;  // AgeClock::kEvent: what the caller last set
  std::string meta GUARDED_BY(lock) = "{}";
  std::atomic<bool> is_closed{false};          // readable without the lock
  bool is_changed GUARDED_BY(lock) = false;    // updated or set since the last commit began
  bool is_compacted GUARDED_BY(lock) = false;  // by a call; the next commit frees files, and is made for that alone
  bool is_durable GUARDED_BY(lock) = true;     // whether the last commit that began is durable
  uint64_t changes GUARDED_BY(lock) = 0;       // counts updates, sets and reloads; a scan fails when it changes
  // The reason why the table refuses use until it is reopened; empty: none
  std::string broken GUARDED_BY(lock);
  // The reason why it refuses writes until it is reopened; empty: none
  std::string read_only_reason GUARDED_BY(lock);

  struct Counts {
    uint64_t lookups = 0, updates = 0, ids = 0, commits = 0;
    uint64_t indexed_records = 0;
    uint64_t staged_rows = 0;
    double stall_s = 0.0;
  } counts GUARDED_BY(lock);

  // Memory kept between calls, so that a warm step allocates nothing.
  struct Scratch {
    Batch batch;
    BlockVector<int64_t> missing_ids;
    BlockVector<uint32_t> missing;
    BlockVector<uint32_t> missing_counts;
    BlockVector<uint64_t> is_missing;  // a bit for each id of a lookup in pieces
    BlockVector<uint32_t> frames;
    BlockVector<uint32_t> members;
    BlockVector<float> sums;
    BlockVector<std::byte> records;
    BlockVector<size_t> pooled_to;    // per bag of a piece: the index of the first id that is not added yet
    BlockVector<int64_t> bag_starts;  // per bag of a piece, with the end of the last one
    BlockVector<int64_t> bag_ids;
  } scratch GUARDED_BY(lock);

  // ---- All below require the lock, but for the checks of arguments, which need only the identity.

  // Called after rows were updated or set.
  void mark_changed() REQUIRES(lock) {
    is_changed = true;
    ++changes;
  }
  // The time of the table's clock: rows that a step names have it as their last_step.
  int64_t now() const REQUIRES(lock) { return spec.retention.clock == AgeClock::kStep ? step : event_clock; }
  // Writes what may change of the definition, and the clock, to a manifest.
  void define(Manifest* manifest) const REQUIRES(lock) {
    manifest->optimizer = spec.optimizer;
    manifest->retention = spec.retention;
    manifest->clock = event_clock;
  }
  bool is_definition_committed() const REQUIRES(lock) {
    return spec.optimizer == committed.optimizer && spec.retention == committed.retention &&
           event_clock == committed.clock;
  }
  // Whether the table has counts, or its files may have some, so that releases without these must not open it.
  bool has_counts() const REQUIRES(lock) {
    return committed.has_counts || spec.retention.admit_from > 0 || store->directory().counted_rows() > 0 ||
           store->counts().since() > 0 || (store->log() != nullptr && store->compactor().counts() > 0);
  }
  bool has_files() const REQUIRES(lock) { return store->log() != nullptr && !spec.is_scratch; }
  // Whether a row may be evicted. If not, a lookup need not touch frames.
  bool may_evict() const REQUIRES(lock) {
    const bool holds_all = spec.num_rows >= 0 && store->cache().capacity() >= static_cast<uint64_t>(spec.num_rows);
    return store->log() != nullptr && !holds_all;
  }
  // The most ids of one piece of a call. The scratch has room for a piece.
  size_t piece_ids() const REQUIRES(lock);
  size_t num_pieces(size_t n) const REQUIRES(lock) { return std::max<size_t>(1, (n + piece_ids() - 1) / piece_ids()); }
  uint64_t ids_end() const { return spec.num_rows < 0 ? uint64_t{1} << 63 : static_cast<uint64_t>(spec.num_rows); }
  uint64_t max_rows() const { return spec.num_rows < 0 ? ~uint64_t{0} : static_cast<uint64_t>(spec.num_rows); }

  void require_usable() const REQUIRES(lock);
  void require_writable() const REQUIRES(lock);
  void require_durable(const char* what) const;
  // An error with ENOSPC that names `needed` as a sufficient limit.
  Error out_of_disk(const std::string& what, uint64_t needed) const;

  // ---- Checks of arguments. An error names the first bad value, its place and what to do.
  void check_ids(const int64_t* ids, size_t n) const;
  // Assigns ids to a batch and checks the batch's rows. These are a copy, so another thread that changes the caller's
  // ids meanwhile does no harm.
  void assign_checked(Batch* batch, const int64_t* ids, size_t n, const uint32_t* members = nullptr) const;
  // Checks the rows of a batch unless assign_checked() did that for this table or one of the same size.
  void check_batch(const Batch& batch) const;
  // Assigns the ids of part `part` of `parts`, which are cells: each part reads its own places of the log. Requires the
  // lock (scratch).
  void assign_part(Batch* batch, const int64_t* ids, size_t n, size_t part, size_t parts) REQUIRES(lock);
  // Throws when a call has too many ids: their places are kept in 32 bits.
  void require_places(size_t n) const;
  void check_finite(const int64_t* ids, size_t n, const float* values, size_t length, const char* what) const;
  // Throws when a finite value is too large for the type of the field, which would store it as infinity.
  void check_fits(const int64_t* ids, size_t n, const float* values, const Field& field) const;

  [[noreturn]] void refuse_id(int64_t id, size_t position) const;

  // Writes the first `record_bytes` (the weights, or everything) of the record of a row that is not stored.
  void initial_record(int64_t row, size_t record_bytes, std::byte* record) const;
};

}  // namespace bunkbed
