// The end of an epoch: the calls that a commit makes (jobs/committer.h describes the protocol).
#include <algorithm>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/mutex.h"
#include "log/log.h"

namespace bunkbed {

void Log::begin_next_epoch(uint64_t records) {
  ending_ = running_;
  is_ending_ = true;
  ending_versions_end_ = ending_.next_version + records;
  if (ending_.segment != nullptr) ending_.segment->is_ending = true;
  running_ = {ending_.epoch + 1, ending_versions_end_, nullptr, nullptr};
}

size_t Log::spare_buffers() {
  const MutexLock guard(mutex_);
  // A buffer whose write failed counts as free: free_chunk() tries the write again.
  const auto num_free = static_cast<size_t>(std::count_if(chunks_.begin(), chunks_.end(), [](const auto& chunk) {
    return chunk->state == Chunk::State::kFree || chunk->state == Chunk::State::kFailed;
  }));
  const size_t num_left = num_free + (memory_.num_chunks - std::min(memory_.num_chunks, chunks_.size()));
  // One buffer is left for other appends. With four or fewer none is: two are open, and a caller waits for one write.
  return num_left - std::min<size_t>(num_left, memory_.num_chunks > 4 ? 1 : 0);
}

void Log::finish_ending() {
  if (ending_.chunk != nullptr && !ending_.chunk->ids.empty()) close_chunk(&ending_);
  seal(&ending_);
  is_ending_ = false;
}

bool Log::is_written(uint64_t epoch) {
  const auto any_is = [&](Chunk::State state) {
    const MutexLock guard(mutex_);
    return std::any_of(chunks_.begin(), chunks_.end(), [&](const auto& chunk) {
      return chunk->state == state && chunk->epoch <= epoch;
    });
  };
  if (any_is(Chunk::State::kWriting)) return false;
  if (any_is(Chunk::State::kFailed)) retry_failed();
  return true;
}

uint64_t Log::writes_ended() {
  const MutexLock guard(mutex_);
  return writes_ended_;
}

void Log::wait_for_write(uint64_t seen) {
  MutexLock lock(mutex_);
  while (writes_ended_ == seen) lock.wait(written_);
}

Log::Unsynced Log::unsynced(uint64_t epoch) const {
  Unsynced found;
  for (const auto& [id, segment] : segments_) {
    if (segment->epoch > epoch || !(segment->needs_sync || segment->is_new)) continue;
    found.segments.push_back(id);
    found.files.push_back(segment->file);
    found.has_new_names |= segment->is_new;
  }
  return found;
}

void Log::sync(const Unsynced& unsynced) const {
  for (const auto& file : unsynced.files) file->sync();
  failpoint("log.synced");
  if (!unsynced.has_new_names) return;
  vfs_.sync_directory(directory_);
  failpoint("log.names");
}

void Log::mark_synced(const Unsynced& unsynced) {
  for (const uint64_t id : unsynced.segments) {
    Segment* const segment = find_segment(id);
    if (segment == nullptr) continue;
    segment->needs_sync = false;
    segment->is_new = false;
    if (closes_unused_) segment->file->let_close();
  }
}

uint64_t Log::append_ending(int64_t id, const std::byte* payload) {
  require_ending(1);
  return append_to(&ending_, id, payload, 0);
}

void Log::require_ending(size_t records) const {
  if (is_ending_ && ending_versions_end_ - ending_.next_version >= records) return;
  throw Error(ErrorKind::kBroken, "in " + directory_ + ": more records for a commit than were dirty when it began");
}

size_t Log::append_ending(const Source* sources, size_t n, uint64_t* positions) {
  require_ending(n);
  return append_to(&ending_, sources, n, positions);
}

}  // namespace bunkbed
