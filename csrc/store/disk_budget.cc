// The limit of the bytes of a table's files (`disk=`). Files: the segments of the log, the segments that only commits
// name, and the commits' manifests and index snapshots.
//
// Let W(n) be the most bytes that n rows take when they are written: their records, and the overhead of the segments
// that they start. The following must hold whenever a call begins:
//
//   files + W(rows dirty in RAM) + slack in use <= limit                                                 (1)
//
// A dirty row is written once, by its eviction or by the commit, so only a row that becomes dirty can break (1). A call
// that makes rows dirty therefore calls has_room_for() before it changes anything (jobs/disk_room.h says what it does
// without room). The slack covers what (1) does not count: the segment being filled, the segment of a commit under way,
// a segment that is being emptied into them, and open chunks. Log checks the limit before each chunk, too. So a mistake
// here can make a call fail, but cannot make the files exceed the limit.
//
// One rule says what limit is enough at creation and opening, and for new rows, commits and snapshots. Let L(n) be the
// bytes of n rows that compaction has packed, with the tombstones in the log, K the bytes of kept snapshots, C the most
// commits that exist at once without being kept (1; a run has up to 3; a scratch table 0). Here slack includes two
// index snapshots of n rows. There is room for n rows when
//
//   K + (C + 1) * L(n) + slack <= limit                                                                  (2)
//
// M, the most rows that (2) allows (at most num_rows), changes only with K. Then:
//   - Rows are added, and snapshots kept, only where (2) holds afterwards.
//   - A commit begins with at most (limit - K - L(M) - slack) / C bytes in the log, which is at least L(M). A longer
//     log is packed first, with the segment being filled. So the commit's files leave L(M) + slack, however many rows
//     are added later, and its log is never more than opening accepts.
//   - Appends after a commit fill segments that no commit names. These can be emptied and removed at once, until they
//     have only the newest records of rows. These records and the dirty rows are L(M) at most.
// So an update waits for compaction or for a commit under way. Rows that an update makes dirty may have records in
// unnamed segments, which compaction can remove only afterwards. For these an update may borrow a segment's bytes of
// the slack. An update of more rows needs their bytes in addition to (2).
#include "store/disk_budget.h"

#include <utility>
#include <vector>

namespace bunkbed {

namespace {

constexpr uint64_t kManifestBytes = 128u << 10;  // of a commit under way, which used_bytes() does not count

std::vector<int64_t> distinct_rows(const int64_t* rows, size_t n) {
  std::vector<int64_t> distinct(rows, rows + n);
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  return distinct;
}

}  // namespace

uint64_t DiskBudget::slack_bytes(uint64_t segment_bytes, const LogMemory& memory) {
  return 3 * segment_bytes + (memory.num_chunks + 2) * uint64_t{memory.chunk_bytes} + kManifestBytes;
}

void DiskBudget::set_limit(uint64_t bytes, size_t commits, uint64_t num_rows) {
  limit_ = log_ == nullptr ? 0 : bytes;
  commits_ = commits;
  num_rows_ = num_rows;
  if (!is_limited()) return;
  log_->set_room([this] { return limit_ - std::min(limit_, used_bytes()); });
  compactor_->set_may_empty([this](const Segment& segment, bool is_named) {
    // Its live records are written a second time before it is removed. A named segment is removed only with its commit.
    const uint64_t copies = used_bytes() + unwritten_bytes(held_rows_ + admitted_) + written_bytes(segment.live) +
                            log_->tombstone_disk_bytes(segment.tombstones) + count_bytes(segment.counts);
    return copies + (is_named ? slack_in_use() : log_->segment_bytes()) <= limit_;
  });
}

void DiskBudget::set_held(Manifests::Held held) {
  kept_ = std::move(held.kept);
  kept_bytes_ = 0;
  for (const uint64_t id : kept_) kept_bytes_ += held.segments[id];
  other_bytes_ = held.other_bytes;
  compactor_->set_named_segments(std::move(held.segments));
  compactor_->drop_dead_segments();
}

uint64_t DiskBudget::used_bytes() const {
  if (log_ == nullptr) return 0;
  return compactor_->total_bytes() + compactor_->named_bytes() + log_->open_bytes() + other_bytes_ +
         index_snapshot_bytes_;
}

uint64_t DiskBudget::snapshot_bytes() const {
  uint64_t bytes = kept_bytes_;
  for (const uint64_t id : kept_) {
    if (const Segment* segment = log_->find_segment(id)) bytes -= std::min(bytes, segment->bytes);
  }
  return bytes;
}

uint64_t DiskBudget::slack() const {
  return slack_bytes(log_->segment_bytes(), log_->memory()) + (commits_ + 1) * meta_bytes_;
}

// The bytes of a segment without its records: the header, and the padding and trailer of its last chunk.
uint64_t DiskBudget::segment_overhead() const {
  return kSegmentHeaderBytes + vfs::kBlockBytes + kChunkTrailerBytes + log_->stride();
}

uint64_t DiskBudget::written_bytes(uint64_t rows) const {
  const uint64_t records = rows * log_->record_disk_bytes();
  return rows == 0 ? 0 : records + (1 + records / log_->segment_bytes()) * segment_overhead();
}

// packed_bytes() counts records alone. A segment that is not full has overhead in addition: one such segment for each
// commit, and one for the appends after it. The slack includes this overhead.
uint64_t DiskBudget::slack_in_use() const { return slack() - (commits_ + 1) * segment_overhead(); }

uint64_t DiskBudget::packed_bytes(uint64_t rows) const {
  return static_cast<uint64_t>(static_cast<double>(rows * log_->record_disk_bytes()) / kWorthMoving);
}

// Of tombstones and counts in the log.
uint64_t DiskBudget::others_bytes() const {
  return log_->tombstone_disk_bytes(compactor_->tombstones()) + count_bytes(compactor_->counts() + unwritten_->counts);
}

// A count takes as much as one and a half tombstones.
uint64_t DiskBudget::count_bytes(uint64_t n) const { return log_->tombstone_disk_bytes(n + (n + 1) / 2); }

// Of what the log lacks, with so many more rows.
uint64_t DiskBudget::unwritten_bytes(uint64_t more_rows) const {
  return written_bytes(unwritten_->total() + more_rows) + count_bytes(unwritten_->counts);
}

// The bytes without segments' records: the slack and two index snapshots, the last one and the one that replaces it.
uint64_t DiskBudget::fixed_bytes(uint64_t stored_rows) const {
  return slack() + 2 * index_snapshot_estimate(stored_rows);
}

uint64_t DiskBudget::needed(uint64_t stored_rows) const {
  return kept_bytes_ + (commits_ + 1) * (packed_bytes(stored_rows) + others_bytes()) + fixed_bytes(stored_rows);
}

// M of (2).
uint64_t DiskBudget::most_rows() const {
  const uint64_t taken = kept_bytes_ + (commits_ + 1) * others_bytes() + fixed_bytes(0);
  if (limit_ <= taken) return 0;
  const double row = static_cast<double>((commits_ + 1) * log_->record_disk_bytes()) / kWorthMoving +
                     2 * static_cast<double>(index_snapshot_estimate(1) - index_snapshot_estimate(0));
  return std::min(num_rows_, static_cast<uint64_t>(static_cast<double>(limit_ - taken) / row));
}

// The most bytes of the log when a commit begins.
uint64_t DiskBudget::commit_bytes() const {
  const uint64_t rows = std::max(most_rows(), directory_->stored_rows());
  const uint64_t taken = kept_bytes_ + packed_bytes(rows) + others_bytes() + fixed_bytes(rows);
  const uint64_t left = limit_ - std::min(limit_, taken);
  return std::max(left / commits_, packed_bytes(directory_->stored_rows()) + others_bytes()) + segment_overhead();
}

uint64_t DiskBudget::needed_with(const LogMemory& memory, uint64_t stored) const {
  const double record = static_cast<double>(Log::record_disk_bytes(log_->stride(), memory.chunk_bytes));
  const auto packed = static_cast<uint64_t>(static_cast<double>(stored) * record / kWorthMoving);
  return needed(stored) - (commits_ + 1) * packed_bytes(stored) - slack() + (commits_ + 1) * packed +
         slack_bytes(log_->segment_bytes(), memory) + (commits_ + 1) * meta_bytes_;
}

uint64_t DiskBudget::log_bytes() const {
  uint64_t bytes = unwritten_bytes(0) + log_->open_bytes();
  for (const auto& [id, segment] : log_->segments()) bytes += kept_.contains(id) ? 0 : segment->bytes;
  return bytes;
}

uint64_t DiskBudget::needed_now() const {
  const uint64_t stored = directory_->stored_rows();
  const uint64_t log = log_bytes() - std::min(log_bytes(), segment_overhead());
  const uint64_t packed = packed_bytes(stored) + others_bytes();
  return kept_bytes_ + commits_ * std::max(log, packed) + packed + fixed_bytes(stored);
}

uint64_t DiskBudget::needed_to_keep() const { return log_bytes() + needed(directory_->stored_rows()); }

uint64_t DiskBudget::needed_for(uint64_t rows) const {
  const uint64_t bytes = written_bytes(rows);
  return needed(std::min(num_rows_, directory_->stored_rows() + rows)) + bytes - std::min(bytes, log_->segment_bytes());
}

bool DiskBudget::fits(size_t rows, uint64_t borrowed) const {
  return used_bytes() + unwritten_bytes(held_rows_ + rows) + slack_in_use() <= limit_ + borrowed;
}

bool DiskBudget::has_room_for(const int64_t* rows, size_t n) {
  if (!is_limited()) return true;
  admitted_ = n;
  if (fits(n)) return true;
  // Near the limit, counting is worth its time: most rows of a warm step are dirty already.
  admitted_ = rows_to_dirty(rows, n);
  if (fits(admitted_)) return true;
  return std::exchange(may_borrow_, false) && fits(admitted_, log_->segment_bytes());
}

uint64_t DiskBudget::rows_like_tombstones(size_t n) const {
  return is_limited() ? (log_->tombstone_disk_bytes(n) + log_->record_disk_bytes() - 1) / log_->record_disk_bytes() : 0;
}

bool DiskBudget::has_room_for_any(size_t rows) {
  admitted_ = rows;
  return !is_limited() || fits(rows);
}

size_t DiskBudget::rows_to_dirty(const int64_t* rows, size_t n) const {
  const std::vector<int64_t> distinct = distinct_rows(rows, n);
  std::vector<Entry> entries(distinct.size());
  directory_->locate(distinct.data(), distinct.size(), entries.data());
  return static_cast<size_t>(std::count_if(entries.begin(), entries.end(), [this](Entry entry) {
    return !is_frame(entry) || !cache_->is_dirty(frame_of(entry)) || cache_->is_frozen(frame_of(entry));
  }));
}

uint64_t DiskBudget::rows_beyond(const int64_t* rows, size_t n, size_t above, uint64_t most) const {
  const uint64_t before = directory_->stored_rows();
  if (!is_limited() || needed(std::min(most, before + n + above)) <= limit_) return 0;
  const std::vector<int64_t> distinct = distinct_rows(rows, n);
  std::vector<Entry> entries(distinct.size());
  directory_->locate(distinct.data(), distinct.size(), entries.data());
  const auto absent =
      static_cast<size_t>(std::count_if(entries.begin(), entries.end(), [](Entry entry) { return !is_stored(entry); }));
  const uint64_t stored = std::min(most, before + absent + above);
  return absent > 0 && needed(stored) > limit_ ? stored : 0;
}

// Empties segments that `among` accepts until `is_enough()`. The segment being filled comes last: it is sealed for
// that.
bool DiskBudget::pack_until(const std::function<bool()>& is_enough, const Compactor::MayEmpty& among) {
  if (compactor_->empty_until(is_enough, among, plan_->compaction_bytes)) return true;
  log_->rotate();  // an open segment cannot be emptied
  return compactor_->empty_until(is_enough, among, plan_->compaction_bytes);
}

bool DiskBudget::make_room() {
  const auto is_unnamed = [](const Segment&, bool is_named) { return !is_named; };
  // The rows wait for room, so their bytes must not stop set_may_empty() from accepting a segment.
  const size_t wanted = std::exchange(admitted_, 0);
  // Makes room for a segment more than the rows need, so that not every call must compact.
  const size_t more = wanted + log_->segment_bytes() / log_->record_disk_bytes();
  if (!compactor_->empty_until([&] { return fits(more); }, is_unnamed, plan_->compaction_bytes) && !fits(wanted)) {
    pack_until([&] { return fits(wanted); }, is_unnamed);
  }
  admitted_ = wanted;
  // Compaction has freed all that it can: the next has_room_for() may borrow, once.
  return fits(wanted) || (may_borrow_ = fits(wanted, log_->segment_bytes()));
}

bool DiskBudget::shrink_for_commit(bool is_to_be_kept) {
  if (!is_limited() || commits_ == 0) return true;
  const auto is_enough = [&] {
    return log_bytes() <= commit_bytes() && (!is_to_be_kept || needed_to_keep() <= limit_);
  };
  const auto is_not_kept = [this](const Segment& segment, bool) { return !kept_.contains(segment.id); };
  return pack_until(is_enough, is_not_kept);
}

}  // namespace bunkbed
