// One embedding table: what users call. Every public method takes the lock (state/table_lock.h), so a table may be used from any
// number of threads, one call at a time. A commit holds it for moments only. table/parts.h lists the parts that do the work.
//
// Values: a lookup copies, after all earlier updates. An update sums the gradients of each row in batch order and
// applies the optimizer once per row; it validates everything and makes every row resident before its first write.
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
#include "device/holder.h"
#include "format/format.h"
#include "jobs/prefetcher.h"
#include "state/table_spec.h"
#include "store/store.h"
#include "table/row_reader.h"
#include "vfs/vfs.h"

namespace bunkbed {

struct TableStats {
  StoreStats store;
  LogStats log;
  uint64_t lookups = 0, updates = 0, ids = 0, commits = 0;
  uint64_t compactions = 0, compacted_records = 0;
  uint64_t ram_bytes = 0, ram_budget_bytes = 0, frames = 0, frame_capacity = 0, dirty_rows = 0, stored_rows = 0, directory_bytes = 0;
  uint64_t disk_bytes = 0, disk_limit_bytes = 0, snapshot_bytes = 0;
  uint64_t live_bytes = 0, segments = 0, open_files = 0, checkpoint_bytes = 0;
  uint64_t indexed_records = 0;  // looked at to know where rows are: by opening, refreshing, going back
  uint64_t staged_rows = 0, window_batches = 0, window_bytes = 0, staging_depth = 0;
  double stall_s = 0.0;  // that lookups and updates waited for rows to be read, staged or not
};

class Table {
 public:
  // A new table: in `path`, or in RAM only when `path` is empty.
  static std::unique_ptr<Table> create(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                       const TableSpec& spec, size_t ram_bytes, uint64_t disk_bytes = 0);
  static std::unique_ptr<Table> open(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                     const OpenOptions& options);
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // ---- Rows. ids: int64[n]; the errors name the first bad id and its place.
  void lookup(const int64_t* ids, size_t n, bool touch, float* out);  // out: (n, dim)
  // Ids deduped once for all that a training step does with them: the overloads that take a Batch.
  Batch batch(const int64_t* ids, size_t n) const;
  void lookup(const Batch& batch, bool touch, float* out);
  // offsets: int64[num_bags], where each bag starts; weights: float32[n] or null; out: (num_bags, dim)
  void lookup_bags(const int64_t* ids, size_t n, const int64_t* offsets, size_t num_bags, Pooling pooling,
                   const float* weights, bool touch, float* out);
  // grads: (n, dim). `lr` overrides the optimizer's for this step. `step` imposes the step number (a shard).
  void update(const int64_t* ids, size_t n, const float* grads, std::optional<double> lr, std::optional<int64_t> step);
  // One step with sums that are known to be finite: (batch.num_unique(), dim), in the order of batch.unique().
  void update(const Batch& batch, const float* sums, std::optional<double> lr, std::optional<int64_t> step);
  void stage(const int64_t* ids, size_t n);
  // ---- The window; see jobs/prefetcher.h. expect() returns the batch's number, kNoUse when there is nothing to plan (every
  // row is in RAM), or kWindowFull. `most` batches at once; 0: as many as are of use. advance() takes those numbers,
  // kNoUse for none. `depth` 0: chosen from measured times.
  static constexpr uint32_t kWindowFull = Prefetcher::kWindowFull;
  uint32_t expect(const int64_t* ids, size_t n, uint32_t most);
  void advance(uint32_t over, uint32_t begun, uint32_t depth);
  // The batch will not come.
  void forget(uint32_t batch);
  void get(const int64_t* ids, size_t n, size_t field, float* out);           // out: (n, length of the field)
  void set(const int64_t* ids, size_t n, size_t field, const float* values);  // the last of equal ids wins
  void contains(const int64_t* ids, size_t n, bool* out);

  // ---- For a tier above (a device cache): whole records, and rows whose newest value lies there (see holder.h). A
  // commit, scan or rewind first asks for them.
  void gather_records(const int64_t* ids, size_t n, std::byte* records);         // (n, payload_bytes)
  // ids distinct; all held, where the holder writes back, or none.
  void scatter_records(const int64_t* ids, size_t n, const std::byte* records);
  // Attaches what lies above, one at a time; null detaches it, with whatever it holds. `write_back`, called without the
  // lock, has every row it holds scattered before it returns.
  void set_holder(std::shared_ptr<Holder> holder, std::function<void()> write_back);

  // ---- Durability
  // Durable when it returns; other threads' calls go on meanwhile. See jobs/committer.h. A table in RAM only and a scratch
  // table count the epoch and remember `meta`; the former keeps copies under a name, the latter refuses to.
  uint64_t commit(const std::optional<std::string>& meta, const std::string& keep);
  // Begins to write what a commit would: dirty records go to the log as far as its buffers take them without a wait.
  // Nothing is durable by it, and nothing is written where the files are limited. For who sets rows that will not change
  // again before the commit.
  void write_dirty();
  // commit(), and returns as soon as it is settled what the commit holds: everything before this call, nothing after
  // it. A thread does the rest. A failure that nobody waited for is thrown by the next commit.
  std::shared_ptr<PendingCommit> begin_commit(const std::optional<std::string>& meta, const std::string& keep);
  std::vector<Manifests::Snapshot> snapshots();
  void drop(const std::string& name);
  void rewind(const std::string& name, std::optional<uint64_t> epoch);
  uint64_t refresh();
  // Epochs a run's manifests name: never collected. `kept`: of them, those of its snapshots.
  void set_pinned_epochs(std::set<uint64_t> epochs, std::set<uint64_t> kept);
  // `newest`: commits that stay though nobody named or pinned them.
  void collect(size_t newest = 2);
  uint64_t compact();
  // What commit(keep=) asks where the files are limited, for a run, which keeps commits under names of its own.
  void require_disk_to_keep(const std::string& keep);
  void close();  // without a commit

  // ---- Facts
  void set_ram(size_t bytes);
  void set_optimizer(const OptimizerSpec& optimizer);
  OptimizerSpec optimizer() const;
  TableStats stats();
  int64_t step();
  uint64_t epoch();
  // What would be lost without a commit. Rows are counted to the row while none of them has left RAM, and at most that
  // many afterwards: what compaction moved counts too then.
  struct Uncommitted {
    uint64_t rows = 0;
    bool is_exact = true;
    int64_t steps = 0;
  };
  Uncommitted uncommitted();
  bool is_changed();  // anything updated or set since the last commit
  std::string meta();
  // Of the spec, all but the optimizer stays as it is.
  const TableSpec& spec() const;
  const std::vector<Field>& fields() const;
  const std::string& name() const;
  const Uuid& uuid() const;
  bool is_writable() const;
  bool is_closed() const;
  size_t payload_bytes() const;

 private:
  friend class Scan;
  struct Parts;
  explicit Table(std::unique_ptr<Parts> parts);
  // `made`: the lock of a table that was just made; only then may it be a scratch table.
  static std::unique_ptr<Table> open_or_made(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                             const OpenOptions& options, std::unique_ptr<vfs::Lock> made);
  const TableState& state() const;

  std::unique_ptr<Parts> parts_;
};

}  // namespace bunkbed
