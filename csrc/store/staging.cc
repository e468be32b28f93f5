#include "store/staging.h"

#include "base/mutex.h"
#include "base/workers.h"

namespace bunkbed {

namespace {
constexpr unsigned kExtentBits = 32;  // the low bits of a read's tag; the high bits are the job's number
}

StagingQueue::StagingQueue(Log* log, size_t read_bytes, Finished finished)
    : log_(log), read_bytes_(read_bytes), finished_(std::move(finished)), stream_(*this, *log->reads().staging_lane()) {}

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

}  // namespace bunkbed
