// The limit of what a table's files may take (`disk=`). Files: the segments of the log, those that only commits name, and
// the commits' manifests and directory checkpoints.
//
// What must hold whenever a call begins, with R the most that a record takes on disk:
//
//   files + (rows dirty in RAM) * R + slack <= limit                                                     (1)
//
// Every row that is dirty costs R once, be it evicted or written by the commit, so nothing but a row becoming dirty can
// break (1): whoever means to make rows dirty asks has_disk_for() before it changes anything (table_disk.cc says what it
// does when the answer is no). The slack is what (1) cannot see: segments being filled, one more that is being emptied
// into them, and chunks that were begun. Beside that, Log asks before each chunk, so that no mistake here can make the
// files exceed the limit; it can only make a call fail.
//
// Why a table that fits never comes to a stop. Let L be what all its rows take when packed as tightly as compaction packs
// them, K what kept snapshots hold, and let `commits` of those that are not kept be there at once at most (the last one; a
// run has up to three; a scratch table has none). It fits when
//
//   K + (commits + 1) * L + slack + two directory checkpoints <= limit                                  (2)
//
// asked for before rows are added and before a snapshot is kept, and then:
//   - A commit begins with no more in the log than (limit - K - L - slack) / commits: what is more is packed first. So the
//     commits that stay leave L + slack.
//   - What is appended after it lies in segments that no commit names. They can be emptied and removed at once, until they
//     hold nothing but the newest records of rows: L at most.
// So an update may have to wait for compaction, or for a commit under way, and never fails for want of disk, unless its
// own rows are more than what (2) leaves beside L.
#include <algorithm>

#include "store.h"

namespace bunkbed {

namespace {

constexpr uint64_t kManifestBytes = 128u << 10;  // of a commit that is being written, beside those counted

}  // namespace

uint64_t Store::disk_slack(uint64_t segment_bytes, const LogMemory& memory) {
  return 3 * segment_bytes + (memory.num_chunks + 2) * uint64_t{memory.chunk_bytes} + kManifestBytes;
}

void Store::set_disk_limit(uint64_t bytes, size_t commits) {
  disk_.limit = log_ == nullptr ? 0 : bytes;
  disk_.commits = commits;
  if (disk_.limit == 0) return;
  log_->set_room([this] { return disk_.limit - std::min(disk_.limit, disk_bytes()); });
  compactor_.set_may_empty([this](const Segment& segment, bool is_named) {
    // Its records are written a second time before it goes, and a named one goes with its commit only.
    const uint64_t copies = disk_bytes() + reserved_rows() * log_->record_disk_bytes() + segment.live * log_->record_disk_bytes();
    return copies + (is_named ? slack() : log_->segment_bytes()) <= disk_.limit;
  });
}

void Store::set_held(Manifests::Held held) {
  disk_.kept = std::move(held.kept);
  disk_.kept_bytes = 0;
  for (const uint64_t id : disk_.kept) disk_.kept_bytes += held.segments[id];
  disk_.other_bytes = held.other_bytes;
  compactor_.set_named_segments(std::move(held.segments));
  compactor_.drop_dead_segments();
}

uint64_t Store::disk_bytes() const {
  if (log_ == nullptr) return 0;
  return compactor_.total_bytes() + compactor_.named_bytes() + log_->open_bytes() + disk_.other_bytes + disk_.checkpoint_bytes;
}

uint64_t Store::snapshot_bytes() const {
  uint64_t bytes = disk_.kept_bytes;
  for (const uint64_t id : disk_.kept) {
    if (const Segment* segment = log_->find_segment(id)) bytes -= std::min(bytes, segment->bytes);
  }
  return bytes;
}

uint64_t Store::slack() const {
  return disk_slack(log_->segment_bytes(), log_->memory()) + (disk_.commits + 1) * disk_.meta_bytes;
}

uint64_t Store::packed_bytes(uint64_t rows) const {
  return static_cast<uint64_t>(static_cast<double>(rows * log_->record_disk_bytes()) / kWorthMoving);
}

// Beside segments' records: two checkpoints, the last one and another that takes its place.
uint64_t Store::fixed_bytes(uint64_t stored_rows) const { return slack() + 2 * checkpoint_estimate(stored_rows); }

uint64_t Store::disk_needed(uint64_t stored_rows) const {
  return disk_.kept_bytes + (disk_.commits + 1) * packed_bytes(stored_rows) + fixed_bytes(stored_rows);
}

uint64_t Store::disk_needed_with(const LogMemory& memory) const {
  const uint64_t stored = directory_->stored_rows();
  const double record = static_cast<double>(Log::record_disk_bytes(log_->stride(), memory.chunk_bytes));
  const auto packed = static_cast<uint64_t>(static_cast<double>(stored) * record / kWorthMoving);
  return disk_needed(stored) - (disk_.commits + 1) * packed_bytes(stored) - slack() + (disk_.commits + 1) * packed +
         disk_slack(log_->segment_bytes(), memory) + (disk_.commits + 1) * disk_.meta_bytes;
}

uint64_t Store::log_bytes() const {
  uint64_t bytes = dirty_rows() * log_->record_disk_bytes() + log_->open_bytes();
  for (const auto& [id, segment] : log_->segments()) bytes += disk_.kept.contains(id) ? 0 : segment->bytes;
  return bytes;
}

uint64_t Store::disk_needed_now() const {
  const uint64_t stored = directory_->stored_rows();
  const uint64_t packed = disk_.commits * std::max(log_bytes(), packed_bytes(stored));
  return disk_.kept_bytes + packed + packed_bytes(stored) + fixed_bytes(stored);
}

uint64_t Store::disk_needed_to_keep() const { return log_bytes() + disk_needed(directory_->stored_rows()); }

bool Store::fits_disk(size_t rows) const {
  return disk_bytes() + (dirty_rows() + disk_.held_rows + rows) * log_->record_disk_bytes() + slack() <= disk_.limit;
}

bool Store::has_disk_for(const int64_t* rows, size_t n) {
  if (disk_.limit == 0) return true;
  disk_.admitted = n;
  if (fits_disk(n)) return true;
  // Near the limit it pays to know: most of a warm step's rows are dirty already.
  disk_.admitted = rows_to_dirty(rows, n);
  return fits_disk(disk_.admitted);
}

size_t Store::rows_to_dirty(const int64_t* rows, size_t n) const {
  std::vector<int64_t> distinct(rows, rows + n);
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  std::vector<Entry> entries(distinct.size());
  directory_->locate(distinct.data(), distinct.size(), entries.data());
  return static_cast<size_t>(std::count_if(entries.begin(), entries.end(), [this](Entry entry) {
    return !is_frame(entry) || !cache_.is_dirty(frame_of(entry)) || cache_.is_frozen(frame_of(entry));
  }));
}

uint64_t Store::rows_beyond_disk(const int64_t* rows, size_t n, size_t above, uint64_t most) const {
  const uint64_t before = directory_->stored_rows();
  if (disk_.limit == 0 || disk_needed(std::min(most, before + n + above)) <= disk_.limit) return 0;
  std::vector<int64_t> distinct(rows, rows + n);
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  const size_t absent = absent_of(distinct.data(), distinct.size()).size();
  const uint64_t stored = std::min(most, before + absent + above);
  return absent > 0 && disk_needed(stored) > disk_.limit ? stored : 0;
}

bool Store::make_disk_room() {
  const auto is_unnamed = [](const Segment&, bool is_named) { return !is_named; };
  const size_t wanted = disk_.admitted;
  // A segment more than is asked for, so that not every call has to come here.
  const size_t more = wanted + log_->segment_bytes() / log_->record_disk_bytes();
  compactor_.empty_until([&] { return fits_disk(more); }, is_unnamed, plan_.compaction_bytes);
  return fits_disk(wanted);
}

bool Store::shrink_for_commit(bool is_to_be_kept) {
  if (disk_.limit == 0 || disk_.commits == 0) return true;
  const auto is_enough = [&] {
    return disk_needed_now() <= disk_.limit && (!is_to_be_kept || disk_needed_to_keep() <= disk_.limit);
  };
  const auto is_not_kept = [this](const Segment& segment, bool) { return !disk_.kept.contains(segment.id); };
  return compactor_.empty_until(is_enough, is_not_kept, plan_.compaction_bytes);
}

}  // namespace bunkbed
