// The end of an epoch: what a commit asks of the log (the protocol stands in table_commit.cc).
#include <algorithm>

#include "error.h"
#include "failpoints.h"
#include "log.h"
#include "stream_copy.h"
#include "workers.h"

namespace bunkbed {

namespace {

// Records appended together: what is worth a thread, and what is made in the processor's nearest cache before it goes
// past all of them. The bytes that a disk has just taken are nowhere near, and to bring them back in order to write over
// them costs more than the copy: 250 ns a record of 768 bytes instead of 135, beside writes, where it was measured.
constexpr size_t kThreadBytes = 32u << 10;
constexpr size_t kStagedBytes = 8u << 10;
constexpr size_t kAheadBytes = 6u << 10;  // payloads lie anywhere: so many of them are asked for ahead

}  // namespace

void Log::begin_next_epoch(uint64_t records) {
  ending_ = running_;
  is_ending_ = true;
  ending_versions_end_ = ending_.next_version + records;
  if (ending_.segment != nullptr) ending_.segment->is_ending = true;
  running_ = {ending_.epoch + 1, ending_versions_end_, nullptr, nullptr};
}

bool Log::has_free_buffers() {
  const std::lock_guard guard(mutex_);
  // One whose write failed waits for nothing either: whoever wants a buffer tries it again.
  const auto num_free = static_cast<size_t>(std::count_if(chunks_.begin(), chunks_.end(), [](const auto& chunk) {
    return chunk->state == Chunk::State::kFree || chunk->state == Chunk::State::kFailed;
  }));
  // With few buffers two are open and one is on its way: whoever waits for that one waits for a single write.
  return num_free + (memory_.num_chunks - std::min(memory_.num_chunks, chunks_.size())) >= (memory_.num_chunks > 4 ? 2 : 1);
}

void Log::finish_ending() {
  if (ending_.chunk != nullptr && !ending_.chunk->ids.empty()) close_chunk(&ending_);
  seal(&ending_);
  is_ending_ = false;
}

bool Log::is_written(uint64_t epoch) {
  const auto any_is = [&](Chunk::State state) {
    const std::lock_guard guard(mutex_);
    return std::any_of(chunks_.begin(), chunks_.end(), [&](const auto& chunk) {
      return chunk->state == state && chunk->epoch <= epoch;
    });
  };
  if (any_is(Chunk::State::kWriting)) return false;
  if (any_is(Chunk::State::kFailed)) retry_failed();
  return true;
}

uint64_t Log::writes_ended() {
  const std::lock_guard guard(mutex_);
  return writes_ended_;
}

void Log::wait_for_write(uint64_t seen) {
  std::unique_lock lock(mutex_);
  written_.wait(lock, [&] { return writes_ended_ != seen; });
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
  Chunk& chunk = chunk_for(&ending_);
  const size_t before = chunk.ids.size();
  n = std::min(n, chunk.capacity - before);
  const uint64_t first_slot = chunk.first_slot + before;
  const uint64_t first = checked_position(chunk, first_slot + n - 1) - (n - 1);
  std::byte* const records = chunk.memory.data() + (first_slot * stride_ - chunk.begin);
  parallel_for(n, std::max<size_t>(1, kThreadBytes / stride_), [&](size_t from, size_t to) {
    alignas(64) std::byte staged[kStagedBytes];
    const size_t fit = kStagedBytes / stride_;
    const size_t ahead = std::max<size_t>(1, kAheadBytes / stride_);
    if (fit == 0) {
      for (size_t i = from; i < to; ++i) put_record(sources[i].id, sources[i].payload, records + i * stride_);
      return;
    }
    for (size_t i = from; i < to;) {
      const size_t count = std::min(fit, to - i);
      for (size_t r = 0; r < count; ++r) {
        if (i + r + ahead < to) {
          const std::byte* const coming = sources[i + r + ahead].payload;
          for (size_t at = 0; at < payload_bytes_; at += 64) __builtin_prefetch(coming + at, 0, 2);
        }
        put_record(sources[i + r].id, sources[i + r].payload, staged + r * stride_);
      }
      stream_copy(records + i * stride_, staged, count * stride_);
      i += count;
    }
  });
  for (size_t i = 0; i < n; ++i) {
    chunk.ids.push_back(sources[i].id);
    chunk.versions.push_back(ending_.next_version++);
    positions[i] = first + i;
  }
  chunk.segment->records += n;
  chunk.segment->live += n;
  stats_.written_records += n;
  return n;
}

}  // namespace bunkbed
