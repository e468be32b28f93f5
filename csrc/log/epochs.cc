// The end of an epoch: the calls that a commit makes (jobs/committer.h describes the protocol).
#include <algorithm>

#include "base/error.h"
#include "base/failpoints.h"
#include "log/log.h"

namespace bunkbed {

void Log::begin_next_epoch(uint64_t records) {
  ending_ = running_;
  is_ending_ = true;
  ending_versions_end_ = ending_.next_version + records;
  if (ending_.segment != nullptr) ending_.segment->is_ending = true;
  running_ = {ending_.epoch + 1, ending_versions_end_, nullptr, nullptr};
}

void Log::finish_ending() {
  if (ending_.chunk != nullptr && !ending_.chunk->ids.empty()) close_chunk(&ending_);
  seal(&ending_);
  is_ending_ = false;
}

Log::Unsynced Log::unsynced(uint64_t epoch) const {
  Unsynced found;
  for (const auto& [id, segment] : segments_.all()) {
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
  vfs_.sync_directory(layout_.directory);
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
  throw Error(ErrorKind::kBroken,
              "in " + layout_.directory + ": more records for a commit than were dirty when it began");
}

size_t Log::append_ending(const Source* sources, size_t n, uint64_t* positions) {
  require_ending(n);
  return append_to(&ending_, sources, n, positions);
}

}  // namespace bunkbed
