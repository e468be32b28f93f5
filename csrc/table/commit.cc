// Commits. One, in order (docs/design/engine.md, rule 14):
//
//   1. Under the lock, at once: the next epoch begins. What the commit holds is settled: every record in the log, and
//      every dirty one in RAM, which is frozen from now on (Store::freeze). Manifest facts are noted.
//   2. The frozen records are appended to the epoch that ends, some at a time; between them lookups and updates go on.
//      One that wants to change a frozen record appends it first. Then every chunk is seen into its file.
//   3. Without the lock: the segments of that epoch are synced, and the directory when one is new. They are sealed, so
//      bytes below a committed length never change again.
//   4. Without the lock: the manifest is written under a temporary name, synced, linked under its epoch, the directory
//      synced. From here on the commit is durable and whoever waits for it is told.
//   5. Some compaction for what was appended, and what no remaining manifest names is removed. A directory checkpoint is
//      started where one is due (table/checkpoint.cc); one that was ready at 1 is named by the manifest.
//
// Why the manifest of an epoch E is right although rows change, leave RAM and are moved by compaction meanwhile:
//   - What is appended from 1 on, by evictions of rows dirtied since and by compaction, goes to segments of E + 1, which
//     E does not name. So E's segments hold the state at 1 and nothing else.
//   - Compaction may empty a segment that E must name. E names all that were live at 1, and their files stay until E is
//     durable and collected, for they count as named from 1 on.
//   - A row may have several records in E's segments; the highest version wins, and the versions set aside for the
//     frozen records lie above all others of E.
//
// A failure before 4 leaves the last commit as it was and the rows in memory as they are: frozen ones are dirty again,
// those that reached the log stay there, in segments that the next commit names. Its epoch's number is not used again: a
// manifest whose link was reported to have failed may be there all the same. A failed sync leaves the kernel's idea of
// what is clean unknown: the table then refuses writes until it is reopened.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/fault.h"
#include "table/table.h"

namespace bunkbed {

namespace {

constexpr int kMostAsked = 100;  // write-backs that one call asks a device cache for
constexpr size_t kSliceBytes = 1u << 20;  // of records appended at once, under the lock: some tenths of a millisecond

}  // namespace

Manifest Table::manifest_now(uint64_t epoch) const {
  Manifest manifest = committed_;
  Log* log = store_->log();
  manifest.epoch = epoch;
  manifest.parent_epoch = committed_.epoch;
  manifest.step = step_;
  manifest.next_version = log->next_version();
  manifest.next_segment = log->next_segment();
  manifest.optimizer = spec_.optimizer;
  manifest.stored_rows = store_->directory().stored_rows();
  manifest.keep.clear();
  manifest.meta = meta_;
  manifest.segments.clear();
  for (const auto& [id, segment] : log->segments()) {
    if (segment->is_ending) continue;  // not complete yet
    if (segment->live > 0 || segment->tombstones > 0) manifest.segments.push_back({segment->id, segment->epoch, segment->bytes});
  }
  return manifest;
}

void Table::publish(Manifest manifest) {
  manifest.writer_flags &= ~kWriterFlagCopy;  // from here on it goes its own way
  try {
    manifests_.write(manifest);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kSync) {
      read_only_reason_ = error.what();
      // Linked perhaps, not known to be durable: whatever it names must stay.
      std::set<uint64_t> named;
      for (const auto& [id, segment] : store_->log()->segments()) named.insert(id);
      store_->keep_segments(named);
    }
    throw;
  }
  committed_ = manifest;
}

// Another thread may take a step on the device cache between the write-back and the lock, and the cache may evict some of
// its rows to the table: the table would hold half a step. So this checks under the lock, and repeats the write-back.
TableLock::Guard Table::lock_written_back(const std::function<TableLock::Guard()>& take) {
  for (int asked = 0;; ++asked) {
    auto guard = take();
    const size_t held = holder_ == nullptr ? 0 : holder_->num_held();
    if (held == 0) return guard;
    if (asked == kMostAsked) {
      throw Error(ErrorKind::kBroken, "table '" + name_ + "': " + std::to_string(held) +
                                          " rows are still held by a device cache after it was asked " +
                                          std::to_string(asked) + " times to write them back; end the steps that other threads take first");
    }
    const std::function<void()> write_back = write_back_;
    guard.unlock();
    if (write_back) write_back();
  }
}

// ---- Steps of a commit -----------------------------------------------------------------------------------------

// Step 1. Null where there is nothing to do, or nothing left: then `pending` is over.
std::unique_ptr<Table::CommitJob> Table::start_commit(const std::optional<std::string>& meta, const std::string& keep,
                                                      std::shared_ptr<PendingCommit>* pending, bool even_if_same) {
  const auto guard = lock_written_back([this] {
    if (options_.disk_bytes != 0) return lock_.exclusive();
    auto work = lock_.work();
    lock_.wait_for_commit(work);
    return work;
  });
  require_writable();
  if (last_commit_ != nullptr && last_commit_->is_unreported_failure()) last_commit_->wait();
  if (!keep.empty()) require_durable("snapshots");
  auto job = std::make_unique<CommitJob>();
  *pending = job->pending;
  Log* const log = store_->log();
  const bool is_same = !even_if_same && !changed_ && (!meta.has_value() || *meta == meta_) && keep.empty() &&
                       spec_.optimizer == committed_.optimizer;
  if (is_same && committed_.epoch > 0) {
    job->pending->succeed(committed_.epoch);
    return nullptr;
  }
  if (log == nullptr || spec_.is_scratch) {  // nothing to make durable
    if (meta.has_value()) meta_ = *meta;
    ++committed_.epoch;
    committed_.optimizer = spec_.optimizer;
    if (!keep.empty()) keep_in_ram(keep);
    changed_ = false;
    ++commits_;
    job->pending->succeed(committed_.epoch);
    return nullptr;
  }
  if (store_->disk_limit() != 0) make_commit_fit(meta.value_or(meta_), keep);
  failpoint("commit.begin");
  const uint64_t epoch = log->epoch();
  store_->freeze();
  try {
    job->manifest = manifest_now(epoch);
    job->manifest.keep = keep;
    job->manifest.writer_flags &= ~kWriterFlagCopy;
    if (meta.has_value()) job->manifest.meta = *meta;
    if (checkpoints_.ready.has_value()) {
      job->manifest.checkpoints = {*checkpoints_.ready};
      job->has_checkpoint = true;
    }
    std::set<uint64_t> named;
    for (const SegmentEntry& entry : job->manifest.segments) named.insert(entry.segment);
    store_->keep_segments(named);
  } catch (...) {  // rows left frozen would be taken for written by the next commit
    log->finish_ending();
    store_->thaw();
    throw;
  }
  job->was_changed = std::exchange(changed_, false);
  lock_.begin_commit();
  is_durable_ = false;
  return job;
}

// Repeats a piece of work under the lock until it returns false; waits for the log's buffers without it.
template <typename Work>
void Table::in_slices(const Work& work) {
  Log* const log = store_->log();
  for (;;) {
    uint64_t seen;
    {
      const auto guard = lock_.slice();
      seen = log->writes_ended();
      if (log->has_free_buffers()) {
        if (!work()) return;
        continue;
      }
    }
    log->wait_for_write(seen);
  }
}

// Steps 2 to 4.
void Table::make_durable(CommitJob* job) {
  Log* const log = store_->log();
  Manifest& manifest = job->manifest;
  failpoint("commit.frozen");
  in_slices([this] { return store_->write_frozen(kSliceBytes); });
  failpoint("commit.flushed");
  {
    const auto guard = lock_.slice();
    log->finish_ending();
  }
  for (;;) {
    uint64_t seen;
    {
      const auto guard = lock_.slice();
      seen = log->writes_ended();
      if (log->is_written(manifest.epoch)) break;
    }
    log->wait_for_write(seen);
  }
  failpoint("commit.drained");
  Log::Unsynced unsynced;
  {
    const auto guard = lock_.slice();
    unsynced = log->unsynced(manifest.epoch);
  }
  log->sync(unsynced);
  {
    const auto guard = lock_.slice();
    log->mark_synced(unsynced);
    for (const auto& [id, segment] : log->segments()) {
      if (segment->is_ending && segment->records > 0) manifest.segments.push_back({id, segment->epoch, segment->bytes});
    }
    manifest.next_segment = log->next_segment();
  }
  std::sort(manifest.segments.begin(), manifest.segments.end(),
            [](const SegmentEntry& a, const SegmentEntry& b) { return a.segment < b.segment; });
  failpoint("commit.sealed");
  if (fault_is("length_too_long") && !manifest.segments.empty()) manifest.segments.back().bytes += vfs::kBlockBytes;
  if (fault_is("collect_before_commit")) manifests_.remove_segments_unnamed_by(manifest);
  manifests_.write(manifest);
}

void Table::finish_commit(CommitJob* job) {
  std::exception_ptr error;
  try {
    make_durable(job);
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    give_up_commit(job, error);
  } else {
    {
      const auto guard = lock_.slice();
      committed_ = job->manifest;
      meta_ = committed_.meta;
      ++commits_;
      is_durable_ = true;
      if (job->has_checkpoint) {
        checkpoints_.replay_epoch = checkpoints_.ready_epoch;
        checkpoints_.ready.reset();
      }
    }
    job->pending->succeed(job->manifest.epoch);
    failpoint("commit.published");
    tidy_up_after_commit();
    consider_checkpoint();
  }
  end_committing();
}

void Table::end_committing() {
  const auto guard = lock_.slice();
  lock_.end_commit();
}

void Table::give_up_commit(CommitJob* job, const std::exception_ptr& error) {
  const auto guard = lock_.slice();
  Log* const log = store_->log();
  log->finish_ending();
  store_->thaw();
  // Should its manifest be there after all, whatever it names must stay.
  std::set<uint64_t> named;
  for (const auto& [id, segment] : log->segments()) {
    named.insert(id);
    segment->is_ending = false;
  }
  store_->keep_segments(named);
  changed_ |= job->was_changed;
  is_durable_ = true;  // nothing is on its way
  try {
    std::rethrow_exception(error);
  } catch (const Error& reason) {
    if (reason.kind() == ErrorKind::kSync) read_only_reason_ = reason.what();
  } catch (const std::exception&) {
  }
  job->pending->fail(error);
}

// Step 5. The commit is durable and acknowledged: what cannot be done now is done after the next one.
void Table::tidy_up_after_commit() {
  bool may_compact;
  {
    const auto guard = lock_.slice();
    // From here on its segments are like all that a commit names: emptied ones leave the log, their files stay.
    std::set<uint64_t> named;
    for (const SegmentEntry& entry : committed_.segments) named.insert(entry.segment);
    store_->keep_segments(named);
    for (const auto& [id, segment] : store_->log()->segments()) segment->is_ending = false;
    store_->count_commit_debt();
    may_compact = !lock_.is_compacting() && store_->begin_compaction();  // else the compaction that runs takes this over
    if (may_compact) lock_.begin_compaction();
  }
  if (may_compact) compact_in_slices();
  try {
    collect_beside_calls();
  } catch (const std::exception&) {
  }
}

Manifests::Spared Table::spared_now() const {
  Manifests::Spared spared;
  spared.pinned = pinned_now();
  spared.kept = kept_epochs_;
  // A later one may be there whose making was reported to have failed, and which the disk may not have yet.
  spared.pinned.insert(committed_.epoch);
  for (const auto& [id, segment] : store_->log()->segments()) spared.segments.insert(id);
  spared.segments_end = store_->log()->next_segment();
  spared.checkpoints = checkpoints_in_use();
  spared.checkpoints_end = checkpoints_.next_number;
  return spared;
}

// Files are many and slow to remove: without the lock, while nothing else commits or collects.
void Table::collect_beside_calls(size_t newest) {
  Manifests::Spared spared;
  {
    const auto guard = lock_.slice();
    spared = spared_now();
    spared.newest = newest;
  }
  Manifests::Held held = manifests_.collect(spared);
  const auto guard = lock_.slice();
  for (const uint64_t id : spared.segments) {
    // Emptied meanwhile: it was spared for the log's sake, and the log left it to the commit that has just gone.
    if (held.segments.contains(id) || store_->log()->find_segment(id) != nullptr) continue;
    vfs_.remove(path_ + "/" + segment_name(id));
  }
  store_->set_held(std::move(held));
  count_checkpoint_bytes();
}

// ---- The calls ----------------------------------------------------------------------------------------------------

uint64_t Table::commit(const std::optional<std::string>& meta, const std::string& keep) {
  std::shared_ptr<PendingCommit> pending;
  if (const auto job = start_commit(meta, keep, &pending)) finish_commit(job.get());
  return pending->wait();
}

std::shared_ptr<PendingCommit> Table::begin_commit(const std::optional<std::string>& meta, const std::string& keep) {
  std::shared_ptr<PendingCommit> pending;
  std::shared_ptr<CommitJob> job = start_commit(meta, keep, &pending);
  if (job == nullptr) return pending;
  std::unique_ptr<std::thread> before;
  {
    // The job is given to its thread under the lock, which that needs before it can come to an end.
    const auto guard = lock_.work();
    before = std::move(commit_thread_);
    last_commit_ = pending;
    try {
      commit_thread_ = std::make_unique<std::thread>([this, job] { finish_commit(job.get()); });
      job = nullptr;
    } catch (const std::exception&) {  // no thread to be had: then here
    }
  }
  if (before != nullptr) before->join();  // done with the table, else this commit could not have begun
  if (job != nullptr) finish_commit(job.get());
  return pending;
}

void Table::write_dirty() {
  lock_.require_own_process();
  for (bool is_left = true; is_left;) {
    const auto guard = lock_.slice();
    require_writable();
    Log* const log = store_->log();
    // Files that are limited have no room for what may be written twice.
    if (log == nullptr || spec_.is_scratch || store_->disk_limit() != 0) return;
    const size_t most_bytes = std::min(kSliceBytes, log->spare_records() * store_->frame_bytes());
    is_left = most_bytes > 0 && store_->write_dirty(most_bytes);
  }
  // Rows that are set again and again while they stay in RAM are read by nobody, who would compact meanwhile.
  auto guard = lock_.work();
  require_writable();
  compact_beside(guard);
}

std::set<uint64_t> Table::pinned_now() const {
  std::set<uint64_t> pinned = pinned_epochs_;
  // A run collects after its own manifest is durable: until it has said which commits it names, all of them stay.
  if (spec_.belongs_to_run && pinned.empty()) {
    for (const uint64_t epoch : manifests_.epochs()) pinned.insert(epoch);
  }
  return pinned;
}

void Table::collect_locked(size_t newest) {
  Manifests::Spared spared = spared_now();
  spared.newest = newest;
  store_->set_held(manifests_.collect(spared));
  count_checkpoint_bytes();
}

void Table::collect_after_commit() {
  try {
    collect_locked();
  } catch (const Error&) {
  }
}

void Table::set_pinned_epochs(std::set<uint64_t> epochs, std::set<uint64_t> kept) {
  const auto guard = lock_.work();
  pinned_epochs_ = std::move(epochs);
  kept_epochs_ = std::move(kept);
}

void Table::collect(size_t newest) {
  {
    auto guard = lock_.work();
    lock_.wait_for_commit(guard);
    require_writable();
    if (store_->log() == nullptr || spec_.is_scratch) return;
    lock_.begin_commit();
  }
  try {
    collect_beside_calls(newest);
  } catch (...) {
    end_committing();
    throw;
  }
  end_committing();
}

uint64_t Table::compact() {
  const auto guard = lock_.exclusive();
  require_writable();
  return store_->compact_all();
}

}  // namespace bunkbed
