#include "store/staging.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/mutex.h"
#include "base/workers.h"

namespace bunkbed {

namespace {
constexpr unsigned kExtentBits = 32;            // the low bits of a read's tag; the high bits are the job's number
constexpr size_t kFetchBlockBytes = 64u << 10;  // bytes of fetch() that one thread copies at a time
}  // namespace

// ---- Frames of staged rows, under the table's lock -----------------------------------------------------------------

Store::Staging Store::begin_staging(const int64_t* rows, size_t n, uint32_t batch) {
  Staging staging;
  std::vector<Entry> entries(n);
  directory_->locate(rows, n, entries.data());
  const size_t most = cache_.capacity() / 2;
  size_t wanted = std::min(most - std::min(most, frames_staging_),
                           static_cast<size_t>(std::count_if(entries.begin(), entries.end(), is_position)));
  std::vector<uint32_t> fresh;  // frames for the next rows
  size_t used = 0;
  std::vector<ReadRequest> requests;
  std::vector<uint32_t> copied;  // pinned until the end of this function, so that none is evicted for another row
  const auto release_copied = [&] {
    for (const uint32_t frame : copied) hold_staged(frame);
  };
  try {
    for (; staging.looked < n; ++staging.looked) {
      const Entry entry = entries[staging.looked];
      if (!is_position(entry)) continue;
      if (used == fresh.size()) {
        fresh = take_frames(std::min(kFramesAtOnce, wanted), batch);
        used = 0;
        wanted -= fresh.size();
        if (fresh.empty()) break;
      }
      const uint32_t frame = fresh[used++];
      const int64_t row = rows[staging.looked];
      hold_row(frame, row);
      FrameInfo& info = cache_.info(frame);
      info.position = position_of(entry);
      directory_->set(row, entry_of_frame(frame));
      if (const std::byte* payload = log_->pending(info.position)) {
        std::memcpy(cache_.record(frame), payload, frame_bytes_);
        copied.push_back(frame);
        continue;
      }
      info.loading = 1;
      staging.frames.push_back(frame);
      ++frames_staging_;
      requests.push_back({info.position, row, cache_.record(frame)});
    }
    staging.plan = log_->reads().plan(std::move(requests));
  } catch (...) {
    release_unused(fresh, used);
    release_copied();
    end_staging(staging, true);
    throw;
  }
  release_copied();
  staging.copied = copied.size();
  return staging;
}

// Unpins a frame whose record was staged, and counts it as a miss of a coming step.
void Store::hold_staged(uint32_t frame) {
  cache_.info(frame).pinned = 0;
  cache_.mark_staged(frame);
  ++stats_.misses;
  ++stats_.unique_rows;
}

void Store::end_staging(const Staging& staging, bool failed) {
  frames_staging_ -= staging.frames.size();
  for (const uint32_t frame : staging.frames) {
    FrameInfo& info = cache_.info(frame);
    info.loading = 0;
    if (failed) {
      info.pinned = 0;
      directory_->set(info.row, entry_of_position(info.position));
      cache_.release(frame);
    } else {
      hold_staged(frame);
    }
  }
}

// ---- The reads, without it -----------------------------------------------------------------------------------------

StagingQueue::StagingQueue(Log* log, size_t read_bytes, Finished finished)
    : log_(log),
      read_bytes_(read_bytes),
      finished_(std::move(finished)),
      stream_(*this, *log->reads().staging_lane()) {}

void StagingQueue::add(Store::Staging staging) {
  const size_t reads = staging.plan.extents.size();
  {
    const MutexLock guard(mutex_);
    if (jobs_.empty()) served_ = std::chrono::steady_clock::now();
    jobs_.push_back(std::make_shared<Job>(std::move(staging)));
  }
  stream_.wake(reads);
}

bool StagingQueue::next(vfs::ReadOp* op) noexcept {
  const MutexLock guard(mutex_);
  for (; turn_ < jobs_.size(); ++turn_) {
    Job* job = jobs_[turn_].get();
    if (job == nullptr || job->next == job->staging.plan.extents.size()) continue;
    const ReadPlan::Extent& extent = job->staging.plan.extents[job->next];
    *op = {extent.file, extent.offset, extent.bytes, (first_ + turn_) << kExtentBits | job->next};
    ++job->next;
    return true;
  }
  return false;
}

void StagingQueue::done(const vfs::ReadOp& op, const std::byte* data, std::exception_ptr error) noexcept {
  const uint64_t number = op.tag >> kExtentBits;
  std::shared_ptr<Job> job;
  {
    const MutexLock guard(mutex_);
    job = jobs_[number - first_];
  }
  // After a failed read the batch's other reads go on. A lookup of the row reads it again and reports the error.
  try {
    if (error) std::rethrow_exception(error);
    log_->reads().deliver(job->staging.plan, op.tag & ((uint64_t{1} << kExtentBits) - 1), data, read_bytes_);
  } catch (...) {
    job->failed = true;
  }
  if (job->left.fetch_sub(1) > 1) return;
  double seconds;
  {
    const MutexLock guard(mutex_);
    const auto now = std::chrono::steady_clock::now();
    seconds = std::chrono::duration<double>(now - served_).count();
    served_ = now;
    ++finishing_;
    jobs_[number - first_] = nullptr;
    for (; !jobs_.empty() && jobs_.front() == nullptr; ++first_) {
      jobs_.pop_front();
      turn_ -= turn_ > 0;
    }
  }
  if (vfs::current_io() == vfs::Io::kThreads) return finish(*job, seconds);
  // One thread drives a ring. If it waited for the lock that `finished_` takes, no read would go on.
  try {
    io_pool().submit([this, job, seconds] { finish(*job, seconds); });
  } catch (...) {
    finish(*job, seconds);
  }
}

void StagingQueue::finish(const Job& job, double seconds) {
  finished_(job.staging, job.failed, seconds);
  const MutexLock guard(mutex_);  // notifies with it held: the queue may be destroyed as soon as it is idle
  if (--finishing_ == 0) idle_.notify_all();
}

StagingQueue::~StagingQueue() {
  stream_.finish();
  MutexLock lock(mutex_);
  while (finishing_ != 0) lock.wait(idle_);
}

// ---- Copies of records that change nothing in the cache ------------------------------------------------------------

struct Store::Fetched {
  std::atomic<uint64_t> hits{0}, misses{0}, first_touches{0};
};

void Store::fetch_counted(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records) {
  Fetched counts;
  fetch(rows, n, record_bytes, records, &counts);
  rows_.count_hits(counts.hits);
  stats_.misses += counts.misses;
  stats_.first_touches += counts.first_touches;
  stats_.unique_rows += counts.misses + counts.first_touches;
}

void Store::fetch(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records, Fetched* counts) {
  // Several threads copy the rows that need no read and note the positions of the others.
  constexpr size_t kAhead = 6;
  constexpr size_t kLines = 1024;  // the first bytes of a record, which are prefetched
  ArrayVector<uint64_t> positions(n);
  parallel_for(n, std::max<size_t>(16, kFetchBlockBytes / record_bytes), [&](size_t from, size_t to) {
    Entry entries[kBlockRows];
    uint64_t hits = 0, misses = 0, first_touches = 0;
    for (size_t begin = from; begin < to; begin += kBlockRows) {
      const size_t count = std::min(kBlockRows, to - begin);
      directory_->locate(rows + begin, count, entries);
      for (size_t i = 0; i < count; ++i) {
        if (counts != nullptr) {
          const bool in_ram = is_frame(entries[i]);
          hits += in_ram && !cache_.take_staged(frame_of(entries[i]));
          first_touches += !is_stored(entries[i]);
          misses += !in_ram && is_stored(entries[i]);
        }
        if (i + kAhead < count && is_frame(entries[i + kAhead])) {
          const std::byte* const record = cache_.record(frame_of(entries[i + kAhead]));
          for (size_t at = 0; at < std::min(record_bytes, kLines); at += 64) __builtin_prefetch(record + at);
        }
        uint64_t position = kNoPosition;
        std::byte* const out = records + (begin + i) * record_bytes;
        if (!is_stored(entries[i])) {
          initial_(rows[begin + i], record_bytes, out);
        } else if (!is_frame(entries[i])) {
          position = position_of(entries[i]);
        } else if (record_bytes <= frame_bytes_) {
          std::memcpy(out, cache_.record(frame_of(entries[i])), record_bytes);
        } else {
          position = cache_.info(frame_of(entries[i])).position;  // a reader's frame is clean and has the weights only
        }
        positions[begin + i] = position;
      }
    }
    if (counts != nullptr) {
      counts->hits += hits;
      counts->misses += misses;
      counts->first_touches += first_touches;
    }
  });
  if (log_ == nullptr) return;
  std::vector<ReadRequest> requests;
  std::vector<size_t> places;  // indexes in `rows` of the rows to read from the log
  for (size_t i = 0; i < n; ++i) {
    if (positions[i] != kNoPosition) places.push_back(i);
  }
  if (places.empty()) return;
  // Each record is read once.
  std::sort(places.begin(), places.end(), [&](size_t a, size_t b) { return positions[a] < positions[b]; });
  for (size_t k = 0; k < places.size(); ++k) {
    const size_t i = places[k];
    if (k > 0 && positions[places[k - 1]] == positions[i]) continue;
    std::byte* const out = records + i * record_bytes;
    if (const std::byte* payload = log_->pending(positions[i])) {
      std::memcpy(out, payload, record_bytes);
    } else {
      requests.push_back({positions[i], rows[i], out});
    }
  }
  if (!requests.empty()) log_->reads().read(log_->reads().plan(std::move(requests)), record_bytes, nullptr);
  for (size_t k = 1; k < places.size(); ++k) {
    if (positions[places[k - 1]] != positions[places[k]]) continue;
    std::memcpy(records + places[k] * record_bytes, records + places[k - 1] * record_bytes, record_bytes);
  }
}

}  // namespace bunkbed
