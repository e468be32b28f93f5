#include "table/table.h"

#include <algorithm>

#include "base/error.h"
#include "table/parts.h"

namespace bunkbed {

Table::Table(std::unique_ptr<TableParts> parts) : parts_(std::move(parts)) {}

Table::~Table() {
  if (!parts_->state.lock.is_own_process()) {
    // A forked child: the writer threads do not exist here, and the lock is the parent's. The parts are leaked.
    (void)parts_.release();
    return;
  }
  parts_->index.prepare_to_close(false);
  parts_->close_files();
}

const TableState& Table::state() const { return parts_->state; }

// ---- Rows

Batch Table::batch(const int64_t* ids, size_t n) const {
  state().lock.require_own_process();
  Batch batch;
  state().assign_checked(&batch, ids, n);
  return batch;
}

void Table::lookup(const int64_t* ids, size_t n, bool touch, float* out) { parts_->reader.lookup(ids, n, touch, out); }
void Table::lookup(const Batch& batch, bool touch, float* out) { parts_->reader.lookup(batch, touch, out); }
void Table::lookup_bags(const int64_t* ids, size_t n, const int64_t* offsets, size_t num_bags, Pooling pooling,
                        const float* weights, bool touch, float* out) {
  parts_->reader.lookup_bags(ids, n, offsets, num_bags, pooling, weights, touch, out);
}
void Table::get(const int64_t* ids, size_t n, size_t field, float* out) { parts_->reader.get(ids, n, field, out); }
void Table::contains(const int64_t* ids, size_t n, bool* out) { parts_->reader.contains(ids, n, out); }

void Table::update(const int64_t* ids, size_t n, const float* grads, std::optional<double> lr,
                   std::optional<int64_t> step) {
  parts_->writer.update(ids, n, grads, lr, step);
}
void Table::update(const Batch& batch, const float* sums, std::optional<double> lr, std::optional<int64_t> step) {
  parts_->writer.update(batch, sums, lr, step);
}
void Table::check_lookup(const int64_t* ids, size_t n) const {
  const auto guard = state().lock.work();
  state().require_usable();
  state().check_ids(ids, n);
}
void Table::check_change(const Batch& batch, bool is_step, std::optional<double> lr, std::optional<int64_t> step) {
  parts_->writer.check_change(batch, is_step, lr, step);
}
void Table::set(const int64_t* ids, size_t n, size_t field, const float* values) {
  parts_->writer.set(ids, n, field, values);
}
Erased Table::erase(const int64_t* ids, size_t n, std::optional<uint64_t> changes) {
  return parts_->writer.erase(ids, n, changes);
}

void Table::stage(const int64_t* ids, size_t n) { parts_->prefetcher.stage(ids, n); }
uint32_t Table::expect(const int64_t* ids, size_t n, uint32_t most) { return parts_->prefetcher.expect(ids, n, most); }
void Table::advance(uint32_t over, uint32_t current, uint32_t depth) {
  parts_->prefetcher.advance(over, current, depth);
}
void Table::forget(uint32_t batch) { parts_->prefetcher.forget(batch); }

// ---- The device cache

namespace {

// A device cache stores every row of its frames that a step changed.
Error no_device_cache_with_admission(const std::string& name) {
  return Error(ErrorKind::kInvalid,
               "table '" + name +
                   "': admit= does not work with a device cache, which stores every row that a step "
                   "names; give the layer no device_cache=, or make the table without admit=");
}

}  // namespace

void Table::gather_records(const int64_t* ids, size_t n, std::byte* records) {
  parts_->reader.gather_records(ids, n, records);
}
void Table::scatter_records(const int64_t* ids, size_t n, const std::byte* records) {
  parts_->writer.scatter_records(ids, n, records);
}

void Table::append_records(const int64_t* ids, size_t n, const std::byte* records) {
  parts_->writer.append_records(ids, n, records);
}

void Table::set_device_cache(std::shared_ptr<DeviceCache> cache, std::function<void()> write_back) {
  TableState& t = parts_->state;
  if (cache == nullptr) {
    std::function<void()> gone;
    const auto guard = t.lock.exclusive(TableLock::Commits::kMayRun);
    parts_->device.detach(&cache, &gone);
    return;
  }
  const auto guard = parts_->disk.lock_for_device_cache(cache->max_held());
  if (t.spec.retention.has_admission()) throw no_device_cache_with_admission(t.name);
  t.store->disk().forget_admitted();  // attach() reserves the room
  parts_->device.attach(std::move(cache), std::move(write_back));
}

// ---- Durability

uint64_t Table::commit(const std::optional<std::string>& meta, const std::string& keep) {
  return parts_->committer.commit(meta, keep);
}
std::shared_ptr<PendingCommit> Table::begin_commit(const std::optional<std::string>& meta, const std::string& keep) {
  return parts_->committer.begin_commit(meta, keep);
}
void Table::write_dirty() { parts_->committer.write_dirty(); }
std::vector<Manifests::Snapshot> Table::snapshots() { return parts_->snapshots.list(); }
void Table::drop(const std::string& name) { parts_->snapshots.drop(name); }
void Table::rewind(const std::string& name, std::optional<uint64_t> epoch) { parts_->snapshots.rewind(name, epoch); }
uint64_t Table::refresh(std::optional<uint64_t> to) { return parts_->loader.refresh(to); }

void Table::set_pinned_epochs(std::set<uint64_t> epochs, std::set<uint64_t> kept) {
  const auto guard = parts_->state.lock.work();
  parts_->collector.set_pinned(std::move(epochs), std::move(kept));
}
void Table::collect(size_t newest) { parts_->committer.collect(newest); }

uint64_t Table::compact() {
  TableState& t = parts_->state;
  const auto guard = t.lock.exclusive();
  t.require_writable();
  const uint64_t moved = t.store->compaction().compact_all();
  t.is_compacted = t.has_files();
  return moved;
}

void Table::require_disk_to_keep(const std::string& keep) {
  TableState& t = parts_->state;
  const auto guard = t.lock.exclusive();
  t.require_writable();
  if (t.store->disk().is_limited()) parts_->disk.make_commit_fit(t.committed.meta, keep);
}

void Table::close() {
  parts_->state.lock.require_own_process();
  if (parts_->index.prepare_to_close(true)) parts_->committer.commit_index_snapshot();
  parts_->close_files();
}

void TableParts::close_files() {
  const auto guard = state.lock.exclusive();
  committer.join();
  if (state.is_closed) return;
  state.is_closed = true;
  loader.drop_store();
  if (file_lock == nullptr) return;
  collector.collect_leftovers();
  file_lock->unlock();
  file_lock.reset();
}

// ---- Facts ---------------------------------------------------------------------------------------------------

void Table::set_ram(size_t bytes) {
  TableState& t = parts_->state;
  const auto guard = t.lock.exclusive();
  t.require_usable();
  const bool has_log = t.store->log() != nullptr;
  const MemoryPlan plan = parts_->disk.within_limit(
      plan_memory(bytes, t.payload_bytes, has_log ? t.committed.slots_per_segment : 1, t.read_unit, has_log));
  parts_->prefetcher.reset_queue();  // its buffers are allocated again by apply()
  t.store->apply(plan);
  t.options.ram_bytes = bytes;
  t.scratch = {};  // it has the old size; it grows again as far as the new plan allows
}

void Table::set_read_gap(size_t bytes) {
  TableState& t = parts_->state;
  const auto guard = t.lock.exclusive();
  t.require_usable();
  t.options.read_gap = bytes;
  if (t.store->log() != nullptr) t.store->log()->reads().set_gap(bytes);
}

void Table::set_optimizer(const OptimizerSpec& optimizer) {
  TableState& t = parts_->state;
  const auto guard = t.lock.exclusive(TableLock::Commits::kMayRun);
  t.require_usable();
  if (optimizer.kind != t.spec.optimizer.kind ||
      optimizer.initial_accumulator != t.spec.optimizer.initial_accumulator ||
      optimizer.state_dtype != t.spec.optimizer.state_dtype) {
    throw Error(ErrorKind::kInvalid, "table '" + t.name + "': its slots cannot change");
  }
  t.spec.optimizer = optimizer;
}

Table::Changeable Table::changeable() const {
  const TableState& t = parts_->state;
  // The lock may be held forever in a forked child, where no thread changes these.
  if (!t.lock.is_own_process()) return {t.spec.optimizer, t.spec.retention};
  const auto guard = t.lock.work();
  return {t.spec.optimizer, t.spec.retention};
}

void Table::set_retention(const Retention& retention) {
  TableState& t = parts_->state;
  const auto guard = t.lock.exclusive(TableLock::Commits::kMayRun);
  t.require_writable();
  if (retention.is_set() != t.has_usage || (retention.is_set() && retention.clock != t.spec.retention.clock)) {
    throw Error(ErrorKind::kInvalid, "table '" + t.name + "': its records and its clock cannot change");
  }
  if (retention.has_admission() && parts_->device.is_attached()) throw no_device_cache_with_admission(t.name);
  t.spec.retention = retention;
}

int64_t Table::clock() {
  TableState& t = parts_->state;
  const auto guard = t.lock.work();
  return t.now();
}

void Table::set_clock(int64_t now) {
  TableState& t = parts_->state;
  const auto guard = t.lock.work();
  t.require_writable();
  if (t.spec.retention.clock != AgeClock::kEvent) {
    throw Error(ErrorKind::kInvalid, "table '" + t.name +
                                         "': its clock is its step, which cannot be set; only a table that is "
                                         "made with clock=\"event\" has another clock");
  }
  if (now < t.event_clock) {
    throw Error(ErrorKind::kInvalid, "table '" + t.name + "': the clock cannot go back from " +
                                         std::to_string(t.event_clock) + " to " + std::to_string(now) +
                                         "; nothing was changed");
  }
  t.is_changed |= now != t.event_clock;
  t.event_clock = now;
}

TableStats Table::stats() {
  TableState& t = parts_->state;
  const auto guard = t.lock.work();
  t.require_usable();
  TableStats stats;
  stats.store = t.store->stats();
  stats.lookups = t.counts.lookups;
  stats.updates = t.counts.updates;
  stats.ids = t.counts.ids;
  stats.commits = t.counts.commits;
  stats.ram_bytes = t.store->ram_bytes();
  stats.ram_budget_bytes = t.store->plan().total_bytes;
  stats.frames = t.store->cache().resident();
  stats.frame_capacity = t.store->cache().capacity();
  stats.dirty_rows = t.store->unwritten_rows();
  stats.stored_rows = t.store->directory().stored_rows();
  stats.counted_ids = t.options.writable ? t.store->directory().counted_rows() : t.committed.counted_ids;
  stats.directory_bytes = t.store->directory().bytes();
  if (Log* log = t.store->log()) {
    stats.log = log->stats();
    stats.compactions = t.store->compactor().segments_compacted();
    stats.compacted_records = t.store->compactor().records_moved();
    stats.live_bytes = t.store->compactor().live_bytes();
    stats.tombstones = t.store->compactor().tombstones();
    stats.written_counts = log->stats().written_counts;
    stats.segments = log->segments().size();
    for (const auto& [id, segment] : log->segments()) stats.open_files += segment->file->is_open();
    for (const IndexSnapshotEntry& entry : t.committed.index_snapshots) stats.index_snapshot_bytes += entry.bytes;
    stats.disk_bytes = t.store->disk().used_bytes() + (t.options.writable ? 0 : stats.index_snapshot_bytes);
    stats.disk_limit_bytes = t.store->disk().limit();
    stats.snapshot_bytes = t.store->disk().snapshot_bytes();
    stats.stall_s = t.counts.stall_s + stats.log.read_wait_s;
  }
  stats.staged_rows = t.counts.staged_rows;
  stats.indexed_records = t.counts.indexed_records;
  stats.window_batches = t.store->window().next_batch() - t.store->window().first_batch();
  stats.window_bytes = t.store->window_bytes();
  stats.staging_depth = parts_->prefetcher.depth();
  return stats;
}

uint64_t Table::changes() {
  TableState& t = parts_->state;
  const auto guard = t.lock.work();
  return t.changes;
}

int64_t Table::step() {
  TableState& t = parts_->state;
  const auto guard = t.lock.work();
  return t.step;
}

uint64_t Table::epoch() {
  TableState& t = parts_->state;
  const auto guard = t.lock.work();
  return t.committed.epoch;
}

Table::Uncommitted Table::uncommitted() {
  TableState& t = parts_->state;
  const auto guard = t.lock.work();
  const size_t held = parts_->device.num_held();
  if (t.is_closed || (!t.is_changed && t.is_durable && held == 0) || t.store == nullptr || t.spec.is_scratch) return {};
  // A row that the device cache holds may be dirty here, too.
  Uncommitted found{t.store->unwritten_rows() + held, held == 0 || t.store->unwritten_rows() == 0,
                    std::max<int64_t>(0, t.step - t.committed.step)};
  uint64_t deleted = 0;
  if (Log* log = t.store->log()) {
    for (const auto& [id, segment] : log->segments()) {
      if (segment->epoch <= t.committed.epoch || segment->live + segment->others() == 0) continue;
      found.rows += segment->live;
      deleted += segment->tombstones;
      found.is_exact = false;
    }
  }
  found.rows = std::min<uint64_t>(found.rows, t.store->directory().stored_rows() + held) + deleted;
  return found;
}

bool Table::is_changed() {
  TableState& t = parts_->state;
  const auto guard = t.lock.work();
  return t.is_changed || !t.is_durable || parts_->device.num_held() > 0;
}

std::string Table::meta() {
  TableState& t = parts_->state;
  const auto guard = t.lock.work();
  return t.meta;
}

const TableSpec& Table::spec() const { return state().spec; }
const std::vector<Field>& Table::fields() const { return state().fields; }
const std::string& Table::name() const { return state().name; }
const Uuid& Table::uuid() const { return state().uuid; }
bool Table::is_closed() const { return state().is_closed; }
size_t Table::payload_bytes() const { return state().payload_bytes; }

}  // namespace bunkbed
