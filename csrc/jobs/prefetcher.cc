#include "jobs/prefetcher.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/error.h"
#include "base/stall.h"
#include "base/workers.h"
#include "batch/pieces.h"

namespace bunkbed {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Adds a measured time to an exponential average.
void follow(double* average, double seconds) { *average = *average == 0.0 ? seconds : 0.8 * *average + 0.2 * seconds; }

}  // namespace

// ---- The window

uint32_t Prefetcher::expect(const int64_t* ids, size_t n, uint32_t most) {
  auto guard = table_.lock.work();
  table_.require_usable();
  table_.check_ids(ids, n);
  if (!table_.store->can_miss()) return kNoUse;
  if (table_.store->directory().stored_rows() <= table_.store->cache().capacity()) {
    stage_now(guard, ids, n);
    return kNoUse;
  }
  // The window takes the first part of a batch that is larger than the scratch. Lookups read the rest.
  const size_t count = std::min(table_.piece_ids(), n);
  table_.assign_checked(&table_.scratch.batch, ids, count);
  if (table_.lock.is_staging() && table_.store->window_must_grow(table_.scratch.batch.num_unique())) {
    table_.lock.settle(guard);  // other calls may have used the scratch meanwhile
    table_.require_usable();
    table_.assign_checked(&table_.scratch.batch, ids, count);
  }
  // A batch that is larger than the cache gains nothing: its staged rows would evict those that the present step reads
  // again, or be evicted before they are used.
  if (table_.scratch.batch.num_unique() > table_.store->cache().capacity()) return kNoUse;
  // A window of `most` batches may take a quarter of the budget, and so may the few batches that staging needs. A
  // longer window of unspecified size may take a tenth, because it must save more misses than the frames that it
  // replaces. It ends after a few cachefuls of rows: a row that is wanted only later is evicted anyway.
  constexpr uint32_t kStagedAtLeast = 3;
  const Window& window = table_.store->window();
  const uint32_t batches = window.next_batch() - window.first_batch();
  const size_t most_bytes = table_.store->plan().total_bytes / (most == 0 && batches >= kStagedAtLeast ? 10 : 4);
  if (most == 0) {
    const size_t cachefuls =
        4 * table_.store->cache().capacity() / std::max<size_t>(1, table_.scratch.batch.num_unique());
    most = static_cast<uint32_t>(std::clamp<size_t>(cachefuls, 4, 32));
  }
  if (batches >= most) return kWindowFull;
  const uint32_t batch =
      table_.store->expect(table_.scratch.batch.unique().data(), table_.scratch.batch.num_unique(), most_bytes);
  return batch == kNoUse ? kWindowFull : batch;
}

void Prefetcher::forget(uint32_t batch) {
  const auto guard = table_.lock.work();
  if (table_.store != nullptr) table_.store->finish(batch);  // null after close() and after a failed rewind
}

void Prefetcher::advance(uint32_t over, uint32_t current, uint32_t depth) {
  auto guard = table_.lock.work();
  table_.require_usable();
  if (over != kNoUse) table_.store->finish(over);
  const double now_s = seconds_since(created_);
  if (ahead_.since_s > 0.0) follow(&ahead_.step_s, std::max(0.0, now_s - ahead_.since_s - ahead_.waited_s));
  ahead_.since_s = now_s;
  ahead_.waited_s = 0.0;
  // The number of a batch from before a rewind, for example, is ignored.
  if (table_.store->window().holds(current)) ahead_.current = std::max(ahead_.current, current);
  ahead_.depth = depth == 0 ? ahead_.wished_depth() : depth;
  if (table_.store->log() == nullptr) return;
  stage_ahead();
  compaction_.start(guard);
}

// One batch ahead hides reads that are faster than a step. Slower reads need more batches, so that the queue does not
// run empty while a read is late.
uint32_t Prefetcher::Ahead::wished_depth() const {
  if (step_s <= 0.0 || reads_s <= 0.0) return 2;
  return static_cast<uint32_t>(std::clamp(1.0 + std::ceil(reads_s / step_s), 2.0, 4.0));
}

void Prefetcher::stage_ahead() {
  if (table_.lock.is_waited_for()) return;  // the next advance() stages
  const Window& window = table_.store->window();
  if (ahead_.batch <= ahead_.current) {
    ahead_.batch = ahead_.current + 1;
    ahead_.row = 0;
  }
  while (ahead_.batch <= ahead_.current + ahead_.depth && ahead_.batch < window.next_batch()) {
    if (window.holds(ahead_.batch)) {
      const size_t end = window.num_rows(ahead_.batch);
      table_.scratch.missing_ids.resize(end - ahead_.row);
      window.copy_rows(ahead_.batch, ahead_.row, end, table_.scratch.missing_ids.data());
      ahead_.row += stage_rows(table_.scratch.missing_ids.data(), table_.scratch.missing_ids.size(), ahead_.batch);
      if (ahead_.row < end) return;
    }
    ++ahead_.batch;
    ahead_.row = 0;
  }
}

// ---- Staging

void Prefetcher::stage(const int64_t* ids, size_t n) {
  auto guard = table_.lock.work();
  table_.require_usable();
  table_.check_ids(ids, n);
  stage_now(guard, ids, n);
}

// Stages only a part of a batch that is larger than half of the cache, or than the scratch.
void Prefetcher::stage_now(TableLock::Guard& guard, const int64_t* ids, size_t n) {
  // Otherwise a thread that stages without end would starve the calls that wait for rows.
  table_.lock.wait_until_not_waited_for(guard);
  table_.require_usable();
  if (table_.store->log() == nullptr) return;
  table_.assign_checked(&table_.scratch.batch, ids, std::min(table_.piece_ids(), n));
  stage_rows(table_.scratch.batch.unique().data(), table_.scratch.batch.num_unique(), kNoUse);
  compaction_.start(guard);
}

// Queues the reads of distinct rows. Returns Store::Staging::looked.
size_t Prefetcher::stage_rows(const int64_t* rows, size_t n, uint32_t batch) {
  Store::Staging staging = table_.store->begin_staging(rows, n, batch);
  const size_t looked = staging.looked;
  table_.counts.staged_rows += staging.frames.size() + staging.copied;
  if (staging.plan.extents.empty()) {
    table_.store->end_staging(staging, false);
    return looked;
  }
  if (queue_ == nullptr) {
    queue_ = std::make_unique<StagingQueue>(table_.store->log(), table_.store->frame_bytes(),
                                            [this](const Store::Staging& read, bool failed, double seconds) {
                                              // end_batch() notifies under the lock: the table may be destroyed as soon
                                              // as no batch is staging.
                                              const auto guard = table_.lock.work();
                                              follow(&ahead_.reads_s, seconds);
                                              table_.store->end_staging(read, failed);
                                              table_.store->log()->reads().count(read.plan, 0.0);
                                              table_.lock.end_batch();
                                            });
  }
  table_.lock.begin_batch();
  queue_->add(std::move(staging));
  return looked;
}

void Prefetcher::reset() {
  ahead_ = {};
  queue_.reset();
}

template <typename AnyLoading>
bool Prefetcher::wait_while(TableLock::Guard& guard, const AnyLoading& any_loading) {
  if (!table_.lock.is_staging() || !any_loading()) return false;
  const auto started = std::chrono::steady_clock::now();
  {
    const Stall stall;
    const TableLock::WaitsForRows waiting(&table_.lock);
    do {
      table_.lock.wait_for_batch(guard);
      table_.require_usable();  // it may have been closed, and other calls may have staged more of these rows
    } while (table_.lock.is_staging() && any_loading());
  }
  const double seconds = seconds_since(started);
  ahead_.waited_s += seconds;
  table_.counts.stall_s += seconds;
  return true;
}

bool Prefetcher::wait_for_rows(TableLock::Guard& guard, const int64_t* ids, size_t n) {
  return wait_while(guard, [&]() REQUIRES(table_.lock) {
    Entry entries[kBlockIds];
    for (size_t begin = 0; begin < n; begin += kBlockIds) {
      const size_t count = std::min(kBlockIds, n - begin);
      table_.store->directory().locate(ids + begin, count, entries);
      for (size_t i = 0; i < count; ++i) {
        if (is_frame(entries[i]) && table_.store->is_loading(frame_of(entries[i]))) return true;
      }
    }
    return false;
  });
}

bool Prefetcher::wait_for_rows(TableLock::Guard& guard, const Batch& batch) {
  return wait_while(guard, [&]() REQUIRES(table_.lock) {
    table_.store->rows().locate(batch);
    const ArrayVector<uint32_t>& frames = batch.placement().frames;
    return std::any_of(frames.begin(), frames.end(), [this](uint32_t frame) REQUIRES(table_.lock) {
      return frame != kNoFrame && table_.store->is_loading(frame);
    });
  });
}

}  // namespace bunkbed
