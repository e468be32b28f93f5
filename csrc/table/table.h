// One embedding table: the calls of users. Every public method takes the lock (state/table_lock.h), except batch() and
// the facts that never change. So any number of threads may use a table, one call at a time. A commit holds the lock
// for moments only. table/parts.h lists the parts that do the work.
//
// A lookup copies rows as all earlier updates left them. An update sums the gradients of each row in batch order and
// applies the optimizer once per row. It validates everything before its first write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/types.h"
#include "batch/batch.h"
#include "commit/manifests.h"
#include "commit/pending_commit.h"
#include "device/device_cache.h"
#include "format/format.h"
#include "jobs/prefetcher.h"
#include "state/table_spec.h"
#include "store/store.h"
#include "table/row_reader.h"
#include "table/row_writer.h"
#include "vfs/vfs.h"

namespace bunkbed {

struct TableStats {
  StoreStats store;
  LogStats log;
  uint64_t lookups = 0, updates = 0, ids = 0, commits = 0;
  uint64_t compactions = 0, compacted_records = 0;
  uint64_t ram_bytes = 0, ram_budget_bytes = 0, frames = 0, frame_capacity = 0, dirty_rows = 0, stored_rows = 0,
           directory_bytes = 0;
  uint64_t disk_bytes = 0, disk_limit_bytes = 0, snapshot_bytes = 0;
  uint64_t tombstones = 0;      // in the log
  uint64_t counted_ids = 0;     // ids that steps have named and not stored yet; of a reader, those of its commit
  uint64_t written_counts = 0;  // to the log
  uint64_t live_bytes = 0, segments = 0, open_files = 0, index_snapshot_bytes = 0;
  uint64_t indexed_records = 0;  // records that opening, refresh() and rewind() replayed to find the rows
  uint64_t staged_rows = 0, window_batches = 0, window_bytes = 0, staging_depth = 0;
  double stall_s = 0.0;  // time that lookups and updates waited for reads, staged or not
};

struct TableParts;

// What a checkpoint of a framework names a commit by.
struct Identity {
  Uuid uuid;
  uint64_t epoch;  // from 1
};

class Table {
 public:
  // Makes a new table: in `path`, or in RAM only when `path` is empty. `identity`: of the table that a new one in files
  // replaces; then the first commit is its last one.
  static std::unique_ptr<Table> create(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                       const TableSpec& spec, size_t ram_bytes, uint64_t disk_bytes = 0,
                                       const std::optional<Identity>& identity = std::nullopt);
  static std::unique_ptr<Table> open(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                     const OpenOptions& options);
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // ---- Rows. ids: int64[n]; the errors name the first bad id and its place.
  void lookup(const int64_t* ids, size_t n, bool touch, float* out);  // out: (n, dim)
  // Finds the unique ids once for all calls of a training step: the overloads that take a Batch.
  Batch batch(const int64_t* ids, size_t n) const;
  void lookup(const Batch& batch, bool touch, float* out);
  // offsets: int64[num_bags], where each bag starts; weights: float32[n] or null; out: (num_bags, dim)
  void lookup_bags(const int64_t* ids, size_t n, const int64_t* offsets, size_t num_bags, Pooling pooling,
                   const float* weights, bool touch, float* out);
  // grads: (n, dim). `lr` overrides the optimizer's for this step. `step` imposes the step number (a shard).
  void update(const int64_t* ids, size_t n, const float* grads, std::optional<double> lr, std::optional<int64_t> step);
  // One step with sums that are known to be finite: (batch.num_unique(), dim), in the order of batch.unique().
  void update(const Batch& batch, const float* sums, std::optional<double> lr, std::optional<int64_t> step);
  // For calls of several tables (many.h, shards), before one of them changes: make the checks of lookup(), or those of
  // update() or set() and their room in memory and on disk. Change no row.
  void check_lookup(const int64_t* ids, size_t n) const;
  void check_change(const Batch& batch, bool is_step, std::optional<double> lr, std::optional<int64_t> step);
  void stage(const int64_t* ids, size_t n);
  // ---- The window; see jobs/prefetcher.h. expect() returns the batch's number, kNoUse when there is nothing to plan
  // (every stored row has room in RAM, or the batch is larger than the cache), or kWindowFull. `most`: the most batches
  // in the window; 0: as many as are useful. advance() takes the numbers of the batch that is over and of the one that
  // starts; kNoUse: none. `depth` 0: chosen from times.
  static constexpr uint32_t kWindowFull = Prefetcher::kWindowFull;
  uint32_t expect(const int64_t* ids, size_t n, uint32_t most);
  void advance(uint32_t over, uint32_t current, uint32_t depth);
  // Removes a batch that will not come.
  void forget(uint32_t batch);
  void get(const int64_t* ids, size_t n, size_t field, float* out);           // out: (n, length of the field)
  void set(const int64_t* ids, size_t n, size_t field, const float* values);  // the last of equal ids wins
  void contains(const int64_t* ids, size_t n, bool* out);
  // Deletes rows: each looks up as its initial row again, with fresh optimizer state. Ids may be repeated; those of
  // rows that are not stored are skipped. `changes`: throws if the number of changes is another one by now.
  Erased erase(const int64_t* ids, size_t n, std::optional<uint64_t> changes = std::nullopt);

  // ---- For a device cache: whole records, and rows whose newest value it has (see device_cache.h). A commit, scan or rewind
  // first makes it write these rows back.
  void gather_records(const int64_t* ids, size_t n, std::byte* records);  // (n, payload_bytes)
  // The ids are distinct. The device cache holds all of these rows (a write-back) or none.
  void scatter_records(const int64_t* ids, size_t n, const std::byte* records);
  // Attaches a device cache, one at a time. Null detaches it, and drops the rows that it holds. `write_back` is called
  // without the lock, and scatters every row that the cache holds before it returns.
  void set_device_cache(std::shared_ptr<DeviceCache> cache, std::function<void()> write_back);

  // ---- For a new table with the rows of another: whole records, appended to the log, which take no frames. The ids are
  // distinct. Throws for a table in RAM only.
  void append_records(const int64_t* ids, size_t n, const std::byte* records);

  // ---- Durability
  // The commit is durable when it returns. Other threads' calls go on meanwhile. See jobs/committer.h. A table in RAM
  // only and a scratch table count the epoch and store `meta`. The former keeps copies under a name, the latter
  // refuses.
  uint64_t commit(const std::optional<std::string>& meta, const std::string& keep);
  // Starts the writes of the next commit: appends dirty records to the log while its buffers have room. Makes nothing
  // durable. Does nothing with a disk limit. Useful after set() of rows that will not change again before the commit.
  void write_dirty();
  // The same, but returns as soon as the contents of the commit are fixed: all changes before this call, none after it.
  // A thread does the rest. The next commit throws a failure that no caller waited for.
  std::shared_ptr<PendingCommit> begin_commit(const std::optional<std::string>& meta, const std::string& keep);
  std::vector<Manifests::Snapshot> snapshots();
  void drop(const std::string& name);
  void rewind(const std::string& name, std::optional<uint64_t> epoch);
  // Moves a reader to the newest commit, to the one that has its snapshot's name, or to commit `to`; returns its epoch.
  uint64_t refresh(std::optional<uint64_t> to = std::nullopt);
  // Pins the epochs that a run's manifests name: they are not collected. `kept`: those of its snapshots.
  void set_pinned_epochs(std::set<uint64_t> epochs, std::set<uint64_t> kept);
  // Removes files that no commit needs. `newest`: the number of commits that stay without a name or a pin.
  void collect(size_t newest = 2);
  uint64_t compact();
  // Makes the check of commit(keep=) against the disk limit, for a run, which keeps commits under names of its own.
  void require_disk_to_keep(const std::string& keep);
  void close();  // without a commit

  // ---- Facts
  void set_ram(size_t bytes);
  // The most bytes between two records that share a read (RecordReads). Changes no value.
  void set_read_gap(size_t bytes);
  void set_optimizer(const OptimizerSpec& optimizer);
  // What of the definition may change, as it is now.
  struct Changeable {
    OptimizerSpec optimizer;
    Retention retention;
  };
  Changeable changeable() const;
  // Replaces the rules of a table that has some. The clock stays the same.
  void set_retention(const Retention& retention);
  // The present time of the table's clock. Only a clock of the caller's events can be set, and not back.
  int64_t clock();
  void set_clock(int64_t now);
  TableStats stats();
  int64_t step();
  uint64_t changes();  // the number of changes of rows, for comparison
  uint64_t epoch();
  // The changes since the last commit. `rows` is exact while no changed row was evicted, otherwise an upper bound,
  // because it then counts rows that compaction moved, too. Deleted rows count, too.
  struct Uncommitted {
    uint64_t rows = 0;
    bool is_exact = true;
    int64_t steps = 0;
  };
  Uncommitted uncommitted();
  bool is_changed();  // whether a row was updated or set since the last commit
  std::string meta();
  // These never change, except spec().optimizer, spec().retention and is_closed(). They take no lock.
  const TableSpec& spec() const;
  const std::vector<Field>& fields() const;
  const std::string& name() const;
  const Uuid& uuid() const;
  bool is_closed() const;
  size_t payload_bytes() const;

 private:
  friend class Scan;
  friend class CountedIds;
  explicit Table(std::unique_ptr<TableParts> parts);
  // `made`: the lock of a table that create() has just made, or null. Only a table just made may be a scratch table.
  static std::unique_ptr<Table> open_or_made(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                             const OpenOptions& options, std::unique_ptr<vfs::Lock> made);
  const TableState& state() const;

  std::unique_ptr<TableParts> parts_;
};

}  // namespace bunkbed
