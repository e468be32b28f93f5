// One embedding table: what users call, in terms of the parts. Every public method takes the lock (jobs/table_lock.h), so a
// table may be used from any number of threads, one call at a time. A commit holds it for moments only.
//
// Values: a lookup copies, after all earlier updates. An update sums the gradients of each row in batch order and
// applies the optimizer once per row; it validates everything and makes every row resident before its first write.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "base/types.h"
#include "batch/batch.h"
#include "commit/manifests.h"
#include "commit/pending_commit.h"
#include "device/holder.h"
#include "format/format.h"
#include "jobs/table_lock.h"
#include "kernels/kernels.h"
#include "store/staging.h"
#include "store/store.h"
#include "vfs/vfs.h"

namespace bunkbed {

enum class Pooling : uint8_t { kSum, kMean, kSqrtN };

struct TableSpec {
  int64_t num_rows = -1;  // -1: any non-negative id
  uint32_t dim = 0;
  DType dtype = DType::kFloat32;
  InitSpec init;
  OptimizerSpec optimizer;
  bool belongs_to_run = false;
  bool is_scratch = false;  // nothing of it is made durable; see scratch.h
};

struct OpenOptions {
  bool writable = true;
  size_t ram_bytes = 0;             // 0: without bound (a table in RAM only)
  std::string snapshot;             // a kept name; then the table is read-only
  std::optional<uint64_t> epoch;    // exactly this commit; a writer discards newer ones (bb.Run)
  bool through_run = false;         // opened by the run it belongs to
  uint64_t disk_bytes = 0;          // most that the files may take, a writer's; 0: no limit
};

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

// Where the bytes of a budget go once some rows are stored.
struct MemoryUse {
  size_t record_bytes = 0;  // a row's weights and optimizer state
  size_t stored_bytes = 0;  // what one takes in the log: with its checksum, its id and its version
  size_t frame_bytes = 0;   // what one takes in RAM
  size_t frames = 0;
  size_t directory_bytes = 0;
  size_t fixed_bytes = 0;   // buffers and scratch
  uint64_t most_segments = 0;
};

class Scan;

// Tables of fewer rows take no directory checkpoints; tests of small tables lower it.
inline std::atomic<uint64_t> checkpoint_rows{100'000};
// They are taken within the commit that finds one due, so that tests know when; not on a thread beside it.
inline std::atomic<bool> checkpoints_in_line{false};

// A kept commit of a table that lives in RAM only: a copy of its rows, beside the RAM budget.
struct RamSnapshot {
  std::string name;
  uint64_t epoch = 0;
  int64_t step = 0;
  std::string meta;
  std::vector<int64_t> rows;
  std::vector<std::byte> records;
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

  // Bytes below which such a table, with so many rows stored, cannot be opened, and beyond which more is of no use
  // (0: unknown, num_rows is open).
  static size_t minimum_ram(const TableSpec& spec, uint64_t stored_rows, bool on_disk);
  static size_t wanted_ram(const TableSpec& spec, bool on_disk);
  // How the writer of such a table divides a budget; 0 bytes: without bound. `read_unit` is what reads need where its
  // files lie.
  static MemoryUse memory_use(const TableSpec& spec, uint64_t stored_rows, size_t ram_bytes, size_t read_unit,
                              bool on_disk);

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
  // ---- The window; see table/window.cc. expect() returns the batch's number, kNoUse when there is nothing to plan (every
  // row is in RAM), or kWindowFull. `most` batches at once; 0: as many as are of use. advance() takes those numbers,
  // kNoUse for none. `depth` 0: chosen from measured times.
  static constexpr uint32_t kWindowFull = ~0u;
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
  // Durable when it returns; other threads' calls go on meanwhile. See table/commit.cc. A table in RAM only and a scratch
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
  const TableSpec& spec() const { return spec_; }
  const std::vector<Field>& fields() const { return fields_; }
  const std::string& name() const { return name_; }
  const Uuid& uuid() const { return uuid_; }
  bool is_writable() const { return options_.writable; }
  bool is_closed() const { return closed_; }
  size_t payload_bytes() const { return payload_bytes_; }

 private:
  friend class Scan;
  Table(vfs::Vfs& vfs, std::string path, std::string name, TableSpec spec, OpenOptions options);
  // `made`: the lock of a table that was just made; only then may it be a scratch table.
  static std::unique_ptr<Table> open_or_made(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                             const OpenOptions& options, std::unique_ptr<vfs::Lock> made);

  void load(const Manifest& manifest);
  void start_in_ram();
  void remove_leftovers();
  void drop_store();
  void drop_scratch();
  bool replay_onto(const Manifest& newest);
  void load_directory(const Manifest& manifest, size_t scratch_bytes);
  uint64_t records_to_replay() const;
  std::set<uint64_t> checkpoints_in_use() const;
  // ---- The limit of the files; see table/disk.cc.
  void require_disk_limit();
  std::optional<MemoryPlan> plan_with_smaller_chunks(uint64_t rows) const;
  bool shrink_chunks(uint64_t rows);
  MemoryPlan plan_within_disk(const MemoryPlan& plan) const;
  bool has_disk_for(const int64_t* ids, size_t n);
  void make_disk_room(const int64_t* ids, size_t n);  // without the lock
  void make_room_for_stored(const int64_t* ids, size_t n);
  // The lock while a commit may run, and the checks of a call that sets these rows.
  TableLock::Guard lock_with_disk_for(const int64_t* ids, size_t n);
  TableLock::Guard lock_with_disk_above(size_t rows);
  void require_disk_above(const int64_t* ids, size_t n) const;
  // The holder's rows, of which any may be written back at any time.
  size_t rows_above() const;
  void require_directory_above(const int64_t* ids, size_t n) const;
  void make_commit_fit(const std::string& meta, const std::string& keep);
  void count_checkpoint_bytes();
  void consider_checkpoint();
  void take_checkpoint();
  void settle_checkpoint(bool may_take);
  void close_files();
  void make_store(const MemoryPlan& plan, std::unique_ptr<Log> log);
  Manifest manifest_now(uint64_t epoch) const;
  void publish(Manifest manifest);
  std::set<uint64_t> pinned_now() const;
  Manifests::Spared spared_now() const;
  void collect_locked(size_t newest = 2);
  void collect_after_commit();
  // A commit under way: what the manifest will say, and what undoing it takes.
  struct CommitJob {
    Manifest manifest;
    bool was_changed = false;
    bool has_checkpoint = false;  // the first to name the one that was ready
    std::shared_ptr<PendingCommit> pending = std::make_shared<PendingCommit>();
  };
  std::unique_ptr<CommitJob> start_commit(const std::optional<std::string>& meta, const std::string& keep,
                                          std::shared_ptr<PendingCommit>* pending, bool even_if_same = false);
  template <typename Work>
  void in_slices(const Work& work);
  void finish_commit(CommitJob* job);
  void make_durable(CommitJob* job);
  void give_up_commit(CommitJob* job, const std::exception_ptr& error);
  void tidy_up_after_commit();
  void collect_beside_calls(size_t newest = 2);
  void end_committing();
  void keep_in_ram(const std::string& name);
  void rewind_in_ram(const std::string& name, std::optional<uint64_t> epoch);

  // Compaction on a thread of its own, while the caller goes on.
  void compact_beside(TableLock::Guard& guard);
  void compact_in_slices();
  // Waits until none of these rows is being read by staging; returns whether the lock was given up meanwhile.
  bool settle_for(TableLock::Guard& guard, const int64_t* ids, size_t n);
  void require_usable() const;
  void require_writable() const;
  void require_durable(const char* what) const;
  void check_ids(const int64_t* ids, size_t n) const;
  // batch.assign(), of ids that were checked: again, as another thread may have changed the caller's since.
  void assign_checked(Batch* batch, const int64_t* ids, size_t n, const uint32_t* members = nullptr) const;
  void require_places(size_t n) const;
  void check_not_held(const int64_t* ids, size_t n) const;
  void release_for_change(const int64_t* ids, size_t n);
  void require_not_in_use() const;
  void give_up_above();
  Error rows_in_use(size_t rows) const;
  // Takes the lock with `take` at a moment when the device cache holds no row.
  TableLock::Guard lock_written_back(const std::function<TableLock::Guard()>& take);
  void check_finite(const int64_t* ids, size_t n, const float* values, size_t length, const char* what) const;
  void check_fits(const int64_t* ids, size_t n, const float* values, const Field& field) const;
  size_t piece_ids() const;
  void stage_ahead();
  size_t stage_rows(const int64_t* rows, size_t n, uint32_t batch);

  // Whether a row in RAM may ever have to leave. Where none may, a lookup need not say which rows it wanted.
  bool may_evict() const {
    const bool holds_all = spec_.num_rows >= 0 && store_->cache().capacity() >= static_cast<uint64_t>(spec_.num_rows);
    return store_->log() != nullptr && !holds_all;
  }

  void initial_record(int64_t row, size_t record_bytes, std::byte* record) const;
  void widen(const std::byte* record, float* out) const;
  TableLock::Guard begin_lookup(const int64_t* ids, size_t n, bool touch);
  void lookup_piece(const int64_t* ids, size_t n, bool touch, float* out);
  struct CopiedRows {
    size_t n;
    size_t known;
  };
  void copy_resident(const uint32_t* frames, const uint32_t* index, CopiedRows rows, float* out) const;
  void lookup_missing(const Batch& batch, const uint32_t* frames, bool touch, float* out);
  struct Bags;
  void pool_resident(const Bags& bags, size_t first, size_t count, float* out);
  void pool_missing(const Bags& bags, size_t first, size_t count, float* out);
  // One accepted update: its number and what is the same for all rows of it.
  struct Step {
    int64_t number;
    StepConstants constants;
  };
  TableLock::Guard lock_to_write(const int64_t* ids, size_t n);
  TableLock::Guard begin_update(const int64_t* ids, size_t n);
  void require_distinct(const int64_t* ids, size_t n);
  Step next_step(std::optional<double> lr, std::optional<int64_t> step) const;
  template <typename Apply>
  void take_step(const Step& step, const Apply& apply);
  double sum_row(const Batch& batch, size_t u, const float* grads, float* sum) const;
  [[noreturn]] void not_finite(const Batch& batch, const int64_t* ids, size_t n, const float* grads) const;
  // `sums` or, where they are not kept, `grads` to make them of.
  void apply_update(const Batch& batch, const float* grads, const float* sums, const Step& step, bool* wrote);

  vfs::Vfs& vfs_;
  const std::string path_;
  const std::string name_;
  TableSpec spec_;
  OpenOptions options_;
  Uuid uuid_{};
  std::vector<Field> fields_;
  size_t payload_bytes_ = 0;
  size_t weight_bytes_ = 0;
  size_t read_unit_ = 1;  // alignment that reads need where the files lie

  mutable TableLock lock_;  // guards everything below
  std::unique_ptr<vfs::Lock> file_lock_;
  Manifests manifests_;
  Manifest committed_;  // the last one; of it only what describes the whole table
  std::unique_ptr<Store> store_;
  int64_t step_ = 0;
  std::string meta_ = "{}";
  std::set<uint64_t> pinned_epochs_;
  std::set<uint64_t> kept_epochs_;  // of them
  std::vector<RamSnapshot> ram_snapshots_;
  std::shared_ptr<Holder> holder_;
  std::unique_ptr<StagingQueue> staging_;  // made when first needed; goes before the store it reads into
  // How far the window has been staged, and the times the depth follows from.
  struct Ahead {
    uint32_t begun = 0;
    uint32_t batch = 0;  // being staged, and how many of its rows are
    size_t row = 0;
    uint32_t depth = 0;
    double since_s = 0.0;   // of the last advance()
    double waited_s = 0.0;  // since then, for staged rows
    double step_s = 0.0;    // a step without its waits
    double reads_s = 0.0;   // of a batch
    uint32_t wished_depth() const;
  } ahead_;
  const std::chrono::steady_clock::time_point created_ = std::chrono::steady_clock::now();
  double stall_s_ = 0.0;
  uint64_t staged_rows_ = 0;
  std::function<void()> write_back_;  // of the holder; called without the lock
  bool is_durable_ = true;               // what the last commit that began holds
  std::unique_ptr<std::thread> commit_thread_;       // of the last begin_commit(); done with the table once that is so
  std::shared_ptr<PendingCommit> last_commit_;       // of begin_commit()
  struct Checkpoints {
    std::unique_ptr<std::thread> thread;
    std::atomic<bool> stop{false};
    uint64_t store = 0;         // changes when another store takes its place
    bool is_under_way = false;
    uint64_t number = 0;        // of the one under way
    uint64_t next_number = 1;
    std::optional<CheckpointEntry> ready;  // durable, and named by no commit yet
    uint64_t ready_epoch = 0;
    uint64_t replay_epoch = 0;  // of the one that the last commit names; 0: none
  } checkpoints_;
  bool closed_ = false;
  bool changed_ = false;
  uint64_t changes_ = 0;          // counts updates, sets and reloads; a running scan must see none
  std::string broken_;            // why the table refuses use until reopened
  std::string read_only_reason_;  // why it refuses writes until reopened
  uint64_t lookups_ = 0, updates_ = 0, ids_seen_ = 0, commits_ = 0, indexed_records_ = 0;

  // Scratch kept between calls, so that a step allocates nothing once warm.
  Batch batch_;
  BlockVector<int64_t> missing_ids_;
  BlockVector<uint32_t> missing_;
  BlockVector<uint32_t> missing_counts_;
  BlockVector<uint32_t> frames_;
  BlockVector<size_t> pooled_to_;   // per bag of a piece: the place its rows were added up to
  BlockVector<int64_t> bag_starts_;  // per bag of a piece, and where the last one ends
  BlockVector<int64_t> bag_ids_;
  BlockVector<uint32_t> members_;
  BlockVector<float> sums_;
  BlockVector<std::byte> records_;
};

// Walks every stored row once, in log order. Fails when the table is changed meanwhile.
class Scan {
 public:
  // Of each row these fields.
  Scan(Table* table, std::vector<size_t> fields);
  ~Scan();
  Scan(const Scan&) = delete;
  Scan& operator=(const Scan&) = delete;
  // Up to n rows; 0 at the end. values: for each field (n, its length).
  size_t next(size_t n, int64_t* ids, std::span<float* const> values);

 private:
  struct ReadAhead;
  bool is_in_frames() const;
  void read_ahead();
  void take(const Segment& segment, const ChunkTrailer& chunk);
  void copy(const std::byte* record, size_t row, std::span<float* const> values) const;

  Table* table_;
  const std::vector<size_t> fields_;
  bool is_in_frames_ = false;
  uint64_t changes_;
  uint64_t moves_ = 0;  // records that compaction had moved when the scan began
  std::vector<uint64_t> segments_;
  size_t segment_ = 0;
  std::vector<ChunkTrailer> chunks_;
  size_t chunk_ = 0;
  size_t record_ = 0;
  bool has_chunks_ = false;
  std::vector<int64_t> ids_;
  std::vector<uint64_t> versions_;
  std::vector<Entry> entries_;
  Span span_;
  std::deque<std::shared_ptr<ReadAhead>> ahead_;  // in the order of the scan
  Span spare_;  // memory for the next one
  const int owner_pid_;
  uint32_t frame_ = 0;
};

}  // namespace bunkbed
