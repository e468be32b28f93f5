// Coming batches: the window of their ids, and the reads that bring their rows in ahead of time.
//
// The protocol (docs/design/architecture.md, "Plan, then execute"; docs/design/engine.md, rule 9):
//   1. expect() enters a batch into the window: from now on the cache gives its rows up last.
//   2. advance() says that one batch is over and the next one begins. Then the rows of the `depth` batches after it are
//      staged, nearest batch first: frames are taken under the lock and the reads are queued. No row gives way that the
//      batch being staged, or one before it, wants; where that leaves no frame, staging stops and goes on at the next
//      advance().
//   3. The queue (staging.h) reads without the lock. A lookup or update that wants a row which is still being read waits
//      for its batch; everything else that takes the lock waits until nothing is being staged.
// Values are never touched: whatever is staged, evicted or forgotten, a lookup finds the same bits.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/stall.h"
#include "base/workers.h"
#include "batch/pieces.h"
#include "table/table.h"

namespace bunkbed {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Follows a time that varies from step to step.
void follow(double* average, double seconds) { *average = *average == 0.0 ? seconds : 0.8 * *average + 0.2 * seconds; }

}  // namespace

// ---- The window

uint32_t Table::expect(const int64_t* ids, size_t n, uint32_t most) {
  auto guard = lock_.work();
  require_usable();
  check_ids(ids, n);
  if (!store_->can_miss()) return kNoUse;
  // Of a batch larger than the scratch the first part counts; the rest is read when it is wanted.
  const size_t count = std::min(piece_ids(), n);
  assign_checked(&batch_, ids, count);
  if (lock_.is_staging() && store_->window_must_grow(batch_.num_unique())) {
    lock_.settle(guard);  // meanwhile others may have used the scratch
    require_usable();
    assign_checked(&batch_, ids, count);
  }
  // A window asked for may take a quarter of the budget, and so may the few batches that staging needs. Beyond them, one
  // of our choosing takes a tenth: what it takes from the cache it must win back in misses. And a row that is not
  // wanted within a few cachefuls of batches will not stay anyway.
  constexpr uint32_t kStagedAtLeast = 3;
  const Window& window = store_->window();
  const uint32_t batches = window.next_batch() - window.first_batch();
  const size_t most_bytes = store_->plan().total_bytes / (most == 0 && batches >= kStagedAtLeast ? 10 : 4);
  if (most == 0) {
    const size_t cachefuls = 4 * store_->cache().capacity() / std::max<size_t>(1, batch_.num_unique());
    most = static_cast<uint32_t>(std::clamp<size_t>(cachefuls, 4, 32));
  }
  if (batches >= most) return kWindowFull;
  const uint32_t batch = store_->expect(batch_.unique().data(), batch_.num_unique(), most_bytes);
  return batch == kNoUse ? kWindowFull : batch;
}

void Table::forget(uint32_t batch) {
  const auto guard = lock_.work();
  if (store_ != nullptr) store_->finish(batch);  // null after close() and after a failed rewind
}

void Table::advance(uint32_t over, uint32_t begun, uint32_t depth) {
  auto guard = lock_.work();
  require_usable();
  if (over != kNoUse) store_->finish(over);
  const double now_s = seconds_since(created_);
  if (ahead_.since_s > 0.0) follow(&ahead_.step_s, std::max(0.0, now_s - ahead_.since_s - ahead_.waited_s));
  ahead_.since_s = now_s;
  ahead_.waited_s = 0.0;
  // A number of before a rewind, say, means nothing any more.
  if (store_->window().holds(begun)) ahead_.begun = std::max(ahead_.begun, begun);
  ahead_.depth = depth == 0 ? ahead_.wished_depth() : depth;
  if (store_->log() == nullptr) return;
  stage_ahead();
  compact_beside(guard);
}

// As deep as the reads of a batch are slow: one batch ahead hides reads that are faster than a step; where they are
// slower, the queue must not run dry while one of them is late.
uint32_t Table::Ahead::wished_depth() const {
  if (step_s <= 0.0 || reads_s <= 0.0) return 2;
  return static_cast<uint32_t>(std::clamp(1.0 + std::ceil(reads_s / step_s), 2.0, 4.0));
}

void Table::stage_ahead() {
  if (lock_.is_waited_for()) return;  // the next advance() goes on with it
  const Window& window = store_->window();
  if (ahead_.batch <= ahead_.begun) {
    ahead_.batch = ahead_.begun + 1;
    ahead_.row = 0;
  }
  while (ahead_.batch <= ahead_.begun + ahead_.depth && ahead_.batch < window.next_batch()) {
    if (window.holds(ahead_.batch)) {
      const size_t end = window.num_rows(ahead_.batch);
      missing_ids_.resize(end - ahead_.row);
      window.copy_rows(ahead_.batch, ahead_.row, end, missing_ids_.data());
      ahead_.row += stage_rows(missing_ids_.data(), missing_ids_.size(), ahead_.batch);
      if (ahead_.row < end) return;
    }
    ++ahead_.batch;
    ahead_.row = 0;
  }
}

// ---- Staging

// A batch larger than half of the cache, or than the scratch, is staged in part.
void Table::stage(const int64_t* ids, size_t n) {
  auto guard = lock_.work();
  require_usable();
  check_ids(ids, n);
  // Who waits for rows would wait for ever beside a thread that stages without end.
  lock_.wait_until_not_waited_for(guard);
  require_usable();
  if (store_->log() == nullptr) return;
  assign_checked(&batch_, ids, std::min(piece_ids(), n));
  stage_rows(batch_.unique().data(), batch_.num_unique(), kNoUse);
  compact_beside(guard);
}

// Queues the reads of distinct rows; returns how many of them were dealt with.
size_t Table::stage_rows(const int64_t* rows, size_t n, uint32_t batch) {
  Store::Staging staging = store_->begin_staging(rows, n, batch);
  const size_t looked = staging.looked;
  staged_rows_ += staging.frames.size() + staging.copied;
  if (staging.plan.extents.empty()) {
    store_->end_staging(staging, false);
    return looked;
  }
  if (staging_ == nullptr) {
    staging_ = std::make_unique<StagingQueue>(
        store_->log(), store_->frame_bytes(), [this](const Store::Staging& read, bool failed, double seconds) {
          // Notified under the lock: the table may go as soon as nothing is seen to be staged.
          const auto guard = lock_.work();
          follow(&ahead_.reads_s, seconds);
          store_->end_staging(read, failed);
          store_->log()->count_reads(read.plan, 0.0);
          lock_.end_batch();
        });
  }
  lock_.begin_batch();
  staging_->add(std::move(staging));
  return looked;
}

// ---- Compaction beside

// Its large reads wait behind those of staging, for longer than a small model computes: so not on the caller's thread.
void Table::compact_beside(TableLock::Guard& guard) {
  if (lock_.is_compacting() && store_->is_compaction_behind()) {
    lock_.wait_for_compaction(guard);  // the log must not outgrow it
    return;
  }
  if (!store_->begin_compaction()) return;
  lock_.begin_compaction();
  try {
    io_pool().submit([this] { compact_in_slices(); });
  } catch (...) {
    lock_.end_compaction();
    store_->end_compaction();
    throw;
  }
}

// Whoever needs the table alone ends it, unless it is behind: calls that always come before its thread's first slice,
// on a busy machine, would otherwise end every one of them before it began, and the log would grow for ever.
void Table::compact_in_slices() {
  auto guard = lock_.slice();
  const auto may_go_on = [this] { return !lock_.is_settling() || store_->is_compaction_behind(); };
  // A write that fails keeps its bytes: the next append tries again and reports it.
  try {
    for (Compactor::Read read; may_go_on() && store_->plan_compaction(&read);) {
      guard.unlock();
      store_->compactor().execute(&read);
      guard = lock_.slice();
      store_->compact_slice(std::move(read));
    }
  } catch (const std::exception&) {
    if (!guard) guard = lock_.slice();
  }
  store_->end_compaction();
  lock_.end_compaction();
}

bool Table::settle_for(TableLock::Guard& guard, const int64_t* ids, size_t n) {
  if (!lock_.is_staging()) return false;
  const auto is_read = [&](size_t begin) {
    const size_t count = std::min(kBlockIds, n - begin);
    Entry entries[kBlockIds];
    store_->directory().locate(ids + begin, count, entries);
    return std::none_of(entries, entries + count, [this](Entry entry) {
      return is_frame(entry) && store_->is_loading(frame_of(entry));
    });
  };
  std::chrono::steady_clock::time_point started;
  std::optional<Stall> stall;
  std::optional<TableLock::WaitsForRows> waiting;
  for (size_t begin = 0; begin < n && lock_.is_staging();) {
    if (is_read(begin)) {
      begin += kBlockIds;
      continue;
    }
    if (!stall) {
      started = std::chrono::steady_clock::now();
      stall.emplace();
      waiting.emplace(&lock_);
    }
    lock_.wait_for_batch(guard);
    require_usable();  // it may have been closed meanwhile
    begin = 0;         // the lock was given up: others may have staged rows that had been looked at
  }
  if (!stall) return false;
  const double seconds = seconds_since(started);
  ahead_.waited_s += seconds;
  stall_s_ += seconds;
  return true;
}

}  // namespace bunkbed
