#include "jobs/committer.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/fault.h"

namespace bunkbed {

namespace {

constexpr size_t kSliceBytes = 1u << 20;  // of records appended in a slice: some tenths of a millisecond

}  // namespace

Manifest Committer::manifest_now(uint64_t epoch) const {
  Manifest manifest = table_.committed;
  Log* log = table_.store->log();
  manifest.epoch = epoch;
  manifest.parent_epoch = table_.committed.epoch;
  manifest.step = table_.step;
  manifest.next_version = log->next_version();
  manifest.next_segment = log->next_segment();
  table_.define(&manifest);
  manifest.stored_rows = table_.store->directory().stored_rows();
  manifest.has_counts |= table_.has_counts();
  manifest.counted_ids = table_.store->directory().counted_rows();
  manifest.counts_since = table_.store->counts().since();
  manifest.keep.clear();
  manifest.meta = table_.meta;
  manifest.deletions_from = table_.store->compactor().deletions_from();
  manifest.segments.clear();
  for (const auto& [id, segment] : log->segments()) {
    if (segment->is_ending) continue;  // not complete yet
    if (segment->live > 0 || segment->others() > 0)
      manifest.segments.push_back({segment->id, segment->epoch, segment->bytes});
  }
  return manifest;
}

void Committer::publish(Manifest manifest) {
  manifest.writer_flags &= ~kWriterFlagCopy;  // the table differs from its original from here on
  try {
    table_.manifests.write(manifest);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kSync) {
      table_.read_only_reason = error.what();
      // The manifest may be linked and may be durable, so the segments that it names must stay.
      std::set<uint64_t> named;
      for (const auto& [id, segment] : table_.store->log()->segments()) named.insert(id);
      table_.store->compactor().add_named_segments(named);
    }
    throw;
  }
  table_.committed = manifest;
}

// ---- Steps of a commit -----------------------------------------------------------------------------------------

// Step 1. Returns null, with `pending` over, when there is nothing to make durable.
std::unique_ptr<Committer::Job> Committer::prepare(const std::optional<std::string>& meta, const std::string& keep,
                                                   std::shared_ptr<PendingCommit>* pending, bool even_if_same) {
  const auto guard = device_.lock_written_back([this]() NO_THREAD_SAFETY_ANALYSIS {
    if (table_.options.disk_bytes != 0) return table_.lock.exclusive();
    auto work = table_.lock.work();
    table_.lock.wait_for_commit(work);
    return work;
  });
  table_.require_writable();
  if (last_commit_ != nullptr && last_commit_->is_unreported_failure()) last_commit_->wait();
  if (!keep.empty()) table_.require_durable("snapshots");
  auto job = std::make_unique<Job>();
  *pending = job->pending;
  const bool is_same = !even_if_same && !table_.is_changed && !table_.is_compacted &&
                       (!meta.has_value() || *meta == table_.meta) && keep.empty() && table_.is_definition_committed();
  if (is_same && table_.committed.epoch > 0) {
    job->pending->succeed(table_.committed.epoch);
    return nullptr;
  }
  if (!table_.has_files()) {
    if (meta.has_value()) table_.meta = *meta;
    ++table_.committed.epoch;
    table_.define(&table_.committed);
    if (!keep.empty()) ram_.keep(keep);
    table_.is_changed = false;
    ++table_.counts.commits;
    job->pending->succeed(table_.committed.epoch);
    return nullptr;
  }
  if (table_.store->disk().is_limited()) disk_.make_commit_fit(meta.value_or(table_.meta), keep);
  failpoint("commit.begin");
  Log* const log = table_.store->log();
  const uint64_t epoch = log->epoch();
  job->log = log;
  table_.store->freeze();
  try {
    job->manifest = manifest_now(epoch);
    job->manifest.keep = keep;
    job->manifest.writer_flags &= ~kWriterFlagCopy;
    if (meta.has_value()) job->manifest.meta = *meta;
    if (index_.ready().has_value()) {
      job->manifest.index_snapshots = {*index_.ready()};
      job->has_index_snapshot = true;
    } else if (index_.is_superfluous()) {
      job->manifest.index_snapshots.clear();
    }
    std::set<uint64_t> named;
    for (const SegmentEntry& entry : job->manifest.segments) named.insert(entry.segment);
    table_.store->compactor().add_named_segments(named);
  } catch (...) {  // the next commit would take rows that stay frozen for written ones
    log->finish_ending();
    table_.store->thaw();
    throw;
  }
  job->was_changed = std::exchange(table_.is_changed, false);
  table_.is_compacted = false;
  table_.lock.begin_commit();
  table_.is_durable = false;
  return job;
}

// Repeats `work` under the lock until it returns false. Waits for free buffers of the log without the lock.
template <typename Work>
void Committer::in_slices(Log* log, const Work& work) {
  for (;;) {
    uint64_t seen;
    {
      const auto guard = table_.lock.slice();
      seen = log->buffers().writes_ended();
      if (log->buffers().spare() > 0) {
        if (!work()) return;
        continue;
      }
    }
    log->buffers().wait_for_write(seen);
  }
}

// Steps 2 to 4.
void Committer::make_durable(Job* job) {
  Log* const log = job->log;
  Manifest& manifest = job->manifest;
  failpoint("commit.frozen");
  in_slices(log, [this]() REQUIRES(table_.lock) { return table_.store->write_frozen(kSliceBytes); });
  failpoint("commit.flushed");
  {
    const auto guard = table_.lock.slice();
    log->finish_ending();
  }
  for (;;) {
    uint64_t seen;
    {
      const auto guard = table_.lock.slice();
      seen = log->buffers().writes_ended();
      if (log->buffers().is_written(manifest.epoch)) break;
    }
    log->buffers().wait_for_write(seen);
  }
  failpoint("commit.drained");
  Log::Unsynced unsynced;
  {
    const auto guard = table_.lock.slice();
    unsynced = log->unsynced(manifest.epoch);
  }
  log->sync(unsynced);
  {
    const auto guard = table_.lock.slice();
    log->mark_synced(unsynced);
    for (const auto& [id, segment] : log->segments()) {
      if (segment->is_ending && segment->records + segment->others() > 0)
        manifest.segments.push_back({id, segment->epoch, segment->bytes});
    }
    manifest.next_segment = log->next_segment();
  }
  std::sort(manifest.segments.begin(), manifest.segments.end(),
            [](const SegmentEntry& a, const SegmentEntry& b) { return a.segment < b.segment; });
  failpoint("commit.sealed");
  if (fault_is("length_too_long") && !manifest.segments.empty()) manifest.segments.back().bytes += vfs::kBlockBytes;
  if (fault_is("collect_before_commit")) table_.manifests.remove_segments_unnamed_by(manifest);
  table_.manifests.write(manifest);
}

void Committer::run(Job* job, FileCollector::Pace pace) {
  std::exception_ptr error;
  try {
    make_durable(job);
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    give_up(job, error);
  } else {
    {
      const auto guard = table_.lock.slice();
      table_.committed = job->manifest;
      table_.meta = table_.committed.meta;
      ++table_.counts.commits;
      table_.is_durable = true;
      if (job->has_index_snapshot) index_.committed_ready();
      if (table_.committed.index_snapshots.empty()) index_.committed_none();
    }
    job->pending->succeed(job->manifest.epoch);
    failpoint("commit.published");
    tidy_up(pace);
    index_.consider();
  }
  end();
}

void Committer::end() {
  const auto guard = table_.lock.slice();
  table_.lock.end_commit();
}

void Committer::give_up(Job* job, const std::exception_ptr& error) {
  const auto guard = table_.lock.slice();
  Log* const log = table_.store->log();
  log->finish_ending();
  table_.store->thaw();
  // The manifest may exist in spite of the error, so the segments that it names must stay.
  std::set<uint64_t> named;
  for (const auto& [id, segment] : log->segments()) {
    named.insert(id);
    segment->is_ending = false;
  }
  table_.store->compactor().add_named_segments(named);
  table_.is_changed |= job->was_changed;
  table_.is_durable = true;  // no commit is under way
  try {
    std::rethrow_exception(error);
  } catch (const Error& reason) {
    if (reason.kind() == ErrorKind::kSync) table_.read_only_reason = reason.what();
  } catch (const std::exception&) {
  }
  job->pending->fail(error);
}

// Step 5. The commit is durable and acknowledged. Work that fails now is done after the next commit.
void Committer::tidy_up(FileCollector::Pace pace) {
  {
    const auto guard = table_.lock.slice();
    // Its segments now count as named by a commit: when they are emptied, they leave the log and their files stay.
    std::set<uint64_t> named;
    for (const SegmentEntry& entry : table_.committed.segments) named.insert(entry.segment);
    table_.store->compactor().add_named_segments(named);
    for (const auto& [id, segment] : table_.store->log()->segments()) segment->is_ending = false;
  }
  compaction_.run_after_commit();
  try {
    collector_.collect_in_slices(FileCollector::kNewest, pace);
  } catch (const std::exception&) {
  }
}

// ---- The calls ----------------------------------------------------------------------------------------------------

uint64_t Committer::commit(const std::optional<std::string>& meta, const std::string& keep) {
  std::shared_ptr<PendingCommit> pending;
  if (const auto job = prepare(meta, keep, &pending)) run(job.get(), FileCollector::Pace::kAtOnce);
  return pending->wait();
}

std::shared_ptr<PendingCommit> Committer::begin_commit(const std::optional<std::string>& meta,
                                                       const std::string& keep) {
  std::shared_ptr<PendingCommit> pending;
  std::shared_ptr<Job> job = prepare(meta, keep, &pending);
  if (job == nullptr) return pending;
  std::unique_ptr<std::thread> before;
  {
    // The thread starts under the lock, which it needs before it can end.
    const auto guard = table_.lock.work();
    before = std::move(thread_);
    last_commit_ = pending;
    try {
      thread_ = std::make_unique<std::thread>([this, job] { run(job.get(), FileCollector::Pace::kPaused); });
      job = nullptr;
    } catch (const std::exception&) {  // no thread can be started: the commit runs here, below
    }
  }
  if (before != nullptr) before->join();  // it does not use the table any more: its commit is over
  if (job != nullptr) run(job.get(), FileCollector::Pace::kAtOnce);
  return pending;
}

void Committer::commit_index_snapshot() {
  try {
    std::shared_ptr<PendingCommit> pending;
    if (const auto job = prepare(std::nullopt, "", &pending, true)) run(job.get(), FileCollector::Pace::kAtOnce);
    pending->wait();
  } catch (const Error&) {  // the last commit is unchanged
  }
}

void Committer::join() {
  if (thread_ != nullptr) thread_->join();
  thread_.reset();
}

void Committer::write_dirty() {
  table_.lock.require_own_process();
  for (bool is_left = true; is_left;) {
    const auto guard = table_.lock.slice();
    table_.require_writable();
    Log* const log = table_.store->log();
    // A disk limit leaves no room for records that may be written twice.
    if (!table_.has_files() || table_.store->disk().is_limited()) return;
    const size_t most_bytes = std::min(kSliceBytes, log->spare_records() * table_.store->frame_bytes());
    is_left = most_bytes > 0 && table_.store->write_dirty(most_bytes);
  }
  // Compaction starts here, because calls that only set rows in RAM do not start it: reads and advance() do.
  auto guard = table_.lock.work();
  table_.require_writable();
  compaction_.start(guard);
}

void Committer::collect(size_t newest) {
  {
    auto guard = table_.lock.work();
    table_.lock.wait_for_commit(guard);
    table_.require_writable();
    if (!table_.has_files()) return;
    table_.lock.begin_commit();
  }
  try {
    collector_.collect_in_slices(newest);
  } catch (...) {
    end();
    throw;
  }
  end();
}

}  // namespace bunkbed
