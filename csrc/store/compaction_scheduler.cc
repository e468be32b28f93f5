#include "store/compaction_scheduler.h"

#include <algorithm>

namespace bunkbed {

namespace {

// Examining this many records for each appended one keeps pace with segments that are up to 75 % live.
constexpr size_t kPace = 4;
constexpr size_t kSlice = 512;           // records of one slice: a fraction of a millisecond under the lock
constexpr uint64_t kSegmentsBehind = 4;  // with more debt than these hold, compaction is behind
constexpr size_t kAllAtOnce = 1u << 20;  // records of one round of compact_all()

}  // namespace

void CompactionScheduler::see_appends() {
  const LogStats& stats = log_->stats();
  appended_seen_ = stats.appended();
  others_seen_ = stats.written_tombstones + stats.written_counts;
}

void CompactionScheduler::count_debt() {
  const LogStats& stats = log_->stats();
  patient_debt_ =
      std::min(patient_debt_, debt_) + (stats.written_tombstones + stats.written_counts - others_seen_) * kPace;
  debt_ += (stats.appended() - appended_seen_) * kPace;
  see_appends();
}

void CompactionScheduler::count_commit_debt() {
  patient_debt_ = std::min(patient_debt_, debt_);
  debt_ += std::exchange(commit_debt_, 0);
}

void CompactionScheduler::compact_some() {
  if (log_ == nullptr || is_running_) return;
  const uint64_t left = urgent_debt();  // by a job that was stopped: the next one goes on with it
  count_debt();
  const uint64_t debt = std::min(debt_, urgent_debt() - std::min(left, urgent_debt()) + kSlice);
  debt_ -= debt;
  if (debt > 0) compactor_->run(debt, plan_->compaction_bytes);
  see_appends();  // the compactor's own appends create no debt
}

uint64_t CompactionScheduler::compact_all() {
  if (log_ == nullptr) return 0;
  const uint64_t before = compactor_->records_moved();
  for (size_t round = 2 * log_->segments().size() + 2; round > 0 && compactor_->is_needed(); --round) {
    const uint64_t segments = compactor_->segments_compacted();
    compactor_->run(kAllAtOnce, plan_->compaction_bytes);
    if (compactor_->segments_compacted() == segments) break;
  }
  return compactor_->records_moved() - before;
}

void CompactionScheduler::merge_segments() {
  compactor_->merge(plan_->compaction_bytes);
  forgive();
}

void CompactionScheduler::forgive() {
  debt_ = commit_debt_ = 0;
  if (log_ != nullptr) see_appends();
}

void CompactionScheduler::add_commit_debt(uint64_t records) {
  appended_seen_ += records;
  commit_debt_ += records * kPace;
}

bool CompactionScheduler::begin() {
  if (log_ == nullptr || is_running_) return false;
  count_debt();
  if (debt_ > 0) debt_ = compactor_->is_needed() ? debt_ + compactor_->begin_merge() : 0;
  return is_running_ = debt_ > 0;
}

bool CompactionScheduler::plan(Compactor::Read* read) {
  if (debt_ > 0 && compactor_->plan_read(plan_->compaction_bytes, read)) return true;
  debt_ = 0;
  return false;
}

void CompactionScheduler::take(Compactor::Read read) {
  const bool has_chunks_only = read.wants_chunks;
  compactor_->take_read(std::move(read));
  if (has_chunks_only) return;  // the records of the first chunk are still to be read
  count_debt();
  const size_t looked = compactor_->look_on(std::min<uint64_t>(debt_, kSlice), plan_->compaction_bytes);
  debt_ -= std::min<uint64_t>(debt_, looked);
  see_appends();
}

bool CompactionScheduler::is_behind() {
  count_debt();
  return urgent_debt() > kSegmentsBehind * kPace * (log_->segment_bytes() / log_->stride());
}

}  // namespace bunkbed
