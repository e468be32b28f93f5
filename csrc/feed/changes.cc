#include "feed/changes.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "commit/manifests.h"
#include "directory/directory.h"
#include "format/record.h"

namespace bunkbed {

namespace {

constexpr uint64_t kDeleted = ~uint64_t{0};
constexpr int kMostAttempts = 20;  // commits that are collected while they are opened

LogMemory reading_memory() {
  return {.chunk_bytes = 16 << 10, .num_chunks = 1, .read_slice_bytes = 4096, .num_read_slices = 1};
}

}  // namespace

Changes::Changes(vfs::Vfs& vfs, std::string directory, const std::string& name, Cursor since,
                 std::optional<uint64_t> to, size_t ram_bytes, std::string advice)
    : vfs_(vfs), directory_(std::move(directory)), name_(name), advice_(std::move(advice)) {
  const Manifests manifests(vfs_, directory_);
  for (int attempt = 0;; ++attempt) {
    commit_ = to.has_value() ? manifests.load(*to) : manifests.load_newest();
    if ((commit_.reader_flags & kReaderFlagScratch) != 0) {
      throw Error(ErrorKind::kInvalid,
                  "table '" + name_ + "' is a scratch table, of which nothing is kept: it has no commits to compare");
    }
    since_ = checked(since);
    deleted_since_ = since_.epoch == 0 ? ~uint64_t{0} : since_.next_version;
    if (since_.is_new) since_ = {};
    try {
      open_segments();
      break;
    } catch (const Error& error) {  // collected meanwhile: a newer commit is there
      if (error.kind() != ErrorKind::kNotFound || to.has_value() || attempt == kMostAttempts) throw;
    }
  }
  uint64_t total = 0;
  for (Segment* const segment : segments_) {
    for (const ChunkTrailer& chunk : log_->reader().chunks(*segment)) {
      if (chunk.kind != ChunkKind::kCount) total += chunk.count;
    }
  }
  const uint64_t most = std::max<uint64_t>(1024, ram_bytes / sizeof(Place));
  passes_ = total / most + 1;
  if (passes_ > 1) passes_ += passes_ / 8 + 1;  // the ids are not spread evenly
}

// Returns where to read from: of a consumer that has nothing complete, the start.
Cursor Changes::checked(Cursor since) const {
  if (since.epoch == 0) return {};
  const std::string commit = "table '" + name_ + "': commit " + std::to_string(since.epoch);
  if (since.epoch > commit_.epoch) {
    throw Error(ErrorKind::kInvalid, commit + " is in the future; the newest one is " + std::to_string(commit_.epoch));
  }
  for (const Rewind& rewind : commit_.rewinds) {
    if (since.is_new ? rewind.at <= since.epoch : since.epoch <= rewind.to || since.epoch >= rewind.at) continue;
    const std::string what = since.is_new ? " is where the first read began, which did not end" : " was undone";
    throw Error(ErrorKind::kInvalid, commit + what + ": the table went back to commit " + std::to_string(rewind.to) +
                                         " afterwards, so its changes since then are not known" + advice_);
  }
  if (since.next_version == 0) since.next_version = version_of(since.epoch);
  if (since.next_version < commit_.deletions_from) {
    throw Error(ErrorKind::kInvalid, commit + " is so old that rows deleted after it are no longer known" + advice_);
  }
  return since;
}

uint64_t Changes::version_of(uint64_t epoch) const {
  const Manifests manifests(vfs_, directory_);
  try {
    return manifests.load(epoch).next_version;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kNotFound) throw;
    std::string known;
    for (const uint64_t one : manifests.epochs()) known += (known.empty() ? "" : ", ") + std::to_string(one);
    throw Error(ErrorKind::kInvalid,
                "table '" + name_ + "': commit " + std::to_string(epoch) +
                    " is gone, so the changes since then are not known; commits that remain: " + known + advice_);
  }
}

void Changes::open_segments() {
  log_ = std::make_unique<Log>(vfs_, directory_, commit_.uuid, commit_.payload_bytes, commit_.slots_per_segment,
                               reading_memory());
  if (commit_.num_rows >= 0) log_->reader().set_ids_end(static_cast<uint64_t>(commit_.num_rows));
  std::vector<SegmentEntry> entries;
  for (const SegmentEntry& entry : commit_.segments) {
    if (since_.epoch == 0 || entry.epoch > since_.epoch) entries.push_back(entry);
  }
  log_->adopt(entries);
  segments_.clear();
  for (const auto& [id, segment] : log_->segments()) segments_.push_back(segment.get());
}

// Finds the newest record or tombstone of each id of the next pass.
void Changes::collect_pass() {
  places_.clear();
  for (Segment* const segment : segments_) {
    for (const ChunkTrailer& chunk : segment->chunks) {
      if (chunk.kind == ChunkKind::kCount) continue;  // the row is what it was
      log_->reader().read_index(*segment, chunk, &span_, &ids_, &versions_);
      for (size_t i = 0; i < ids_.size(); ++i) {
        if (versions_[i] < since_.next_version) continue;
        if (versions_[i] >= commit_.next_version || ids_[i] < 0) {
          throw Error(ErrorKind::kCorruption, "segment " + segment->file->path() + ": the chunk at byte " +
                                                  std::to_string(chunk.begin) + " holds id " + std::to_string(ids_[i]) +
                                                  " with version " + std::to_string(versions_[i]) +
                                                  ", which this commit cannot have");
        }
        if (passes_ > 1 && (mix_id(ids_[i]) >> 8) % passes_ != pass_) continue;
        const uint64_t position =
            chunk.kind == ChunkKind::kTombstone ? kDeleted : log_->position(segment->id, chunk.first_slot + i);
        places_.push_back({ids_[i], versions_[i], position});
      }
    }
  }
  ++pass_;
  std::sort(places_.begin(), places_.end(),
            [](const Place& a, const Place& b) { return a.id != b.id ? a.id < b.id : a.version > b.version; });
  places_.erase(
      std::unique(places_.begin(), places_.end(), [](const Place& a, const Place& b) { return a.id == b.id; }),
      places_.end());
  std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) {
    return a.position != b.position ? a.position < b.position : a.id < b.id;
  });
  deleted_.clear();
  for (; !places_.empty() && places_.back().position == kDeleted; places_.pop_back()) {
    if (places_.back().version >= deleted_since_) deleted_.push_back(places_.back().id);
  }
  std::reverse(deleted_.begin(), deleted_.end());
  next_place_ = next_deleted_ = segment_ = chunk_ = 0;
}

size_t Changes::read_rows(size_t n, int64_t* ids, float* weights) {
  const Field& field = commit_.fields[0];
  size_t found = 0;
  while (found < n && next_place_ < places_.size()) {
    Segment* const segment = segments_[segment_];
    const uint64_t position = places_[next_place_].position;
    if (chunk_ == segment->chunks.size()) {
      ++segment_;
      chunk_ = 0;
      continue;
    }
    const ChunkTrailer& chunk = segment->chunks[chunk_];
    const uint64_t first = log_->position(segment->id, chunk.first_slot);
    if (chunk.kind != ChunkKind::kData || position >= first + chunk.count) {
      ++chunk_;
      continue;
    }
    size_t end = next_place_;
    while (end < places_.size() && end - next_place_ < n - found && places_[end].position < first + chunk.count) ++end;
    const size_t from = position - first;
    const size_t count = places_[end - 1].position - first + 1 - from;
    log_->reader().read_span(*segment, chunk.begin, chunk.end - chunk.begin, &span_);
    log_->reader().read_index(*segment, chunk, &span_, &ids_, &versions_);
    const std::byte* const records = log_->reader().read_records(*segment, chunk, from, count, ids_.data(), &span_);
    for (; next_place_ < end; ++next_place_, ++found) {
      const size_t i = places_[next_place_].position - position;
      ids[found] = places_[next_place_].id;
      read_field(field, records + i * log_->stride(), weights + found * field.length);
    }
  }
  return found;
}

Changes::Found Changes::next(size_t n, int64_t* ids, float* weights, int64_t* deleted) {
  for (;;) {
    if (const size_t rows = read_rows(n, ids, weights); rows > 0) return {.rows = rows};
    if (next_deleted_ < deleted_.size()) {
      const size_t count = std::min(n, deleted_.size() - next_deleted_);
      std::copy_n(deleted_.begin() + static_cast<ptrdiff_t>(next_deleted_), count, deleted);
      next_deleted_ += count;
      return {.deleted = count};
    }
    if (pass_ == passes_ || segments_.empty()) return {};
    collect_pass();
  }
}

}  // namespace bunkbed
