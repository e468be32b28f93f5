#include "jobs/index_snapshots.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/fault.h"
#include "directory/index_snapshot_file.h"
#include "directory/replay.h"

namespace bunkbed {

namespace {

constexpr uint64_t kShare = 4;  // a snapshot takes at most one byte for so many bytes of records
// Times index_snapshot_rows: the records whose replay close() spares the next opening.
constexpr uint64_t kWorthClosing = 10;

// Whether a segment existed when the walk began. `segments` is sorted by number.
bool is_known(const std::vector<SegmentCounts>& segments, uint64_t segment) {
  const auto found =
      std::lower_bound(segments.begin(), segments.end(), segment,
                       [](const SegmentCounts& counts, uint64_t number) { return counts.segment < number; });
  return found != segments.end() && found->segment == segment;
}

}  // namespace

void IndexSnapshots::load(const Manifest& manifest, size_t scratch_bytes) {
  Log* const log = table_.store->log();
  Directory* const directory = &table_.store->directory();
  const CountRule counts{.are_kept = table_.options.writable, .since = manifest.counts_since};
  LoadedIndexSnapshot loaded;
  if (!manifest.index_snapshots.empty()) {
    const uint64_t most_rows = manifest.deletions_from > 0 ? table_.max_rows() : manifest.stored_rows;
    loaded = load_index_snapshot(table_.vfs, table_.path, manifest.index_snapshots.back(), log, directory,
                                 table_.spec.num_rows, most_rows, scratch_bytes, counts);
  }
  failpoint("open.index_snapshot");
  std::vector<Segment*> later;
  for (const auto& [id, segment] : log->segments()) {
    if (!loaded.is_loaded || segment->epoch >= loaded.replay_epoch) later.push_back(segment.get());
  }
  const Replay replay{log, directory, table_.spec.num_rows, manifest.next_version, scratch_bytes, counts};
  const Replay::Result replayed = replay.run(later);
  table_.counts.indexed_records += replayed.entries;
  const uint64_t lost = loaded.lost - replayed.lost;
  if (lost > 0) {
    throw Error(ErrorKind::kCorruption,
                "table '" + table_.name + "': " + std::to_string(lost) + " rows of " +
                    directory_name(manifest.index_snapshots.back().file) +
                    " point at segments the commit does not have; no row is lost by it: bunkbed "
                    "check --repair builds the directory from the segments");
  }
  replay_epoch_ = loaded.replay_epoch;
  if (!table_.options.writable) return;
  for (const std::string& name : table_.vfs.list(table_.path)) {
    uint64_t number;
    if (parse_name(name, "directory-", &number)) next_number_ = std::max(next_number_, number + 1);
  }
}

uint64_t IndexSnapshots::records_to_replay() const {
  uint64_t records = 0;
  for (const auto& [id, segment] : table_.store->log()->segments()) {
    if (segment->epoch >= replay_epoch_) records += segment->records + segment->others();
  }
  return records;
}

bool IndexSnapshots::is_superfluous() const {
  return replay_epoch_ > 0 && table_.store->directory().num_entries() < index_snapshot_rows;
}

// Later snapshots have later epochs.
uint64_t IndexSnapshots::tombstones_needed_from() const {
  if (replay_epoch_ > 0) return replay_epoch_;
  if (ready_.has_value()) return ready_epoch_;
  return is_under_way_ ? 0 : ~uint64_t{0};
}

std::set<uint64_t> IndexSnapshots::numbers_in_use() const {
  std::set<uint64_t> numbers;
  if (ready_.has_value()) numbers.insert(ready_->file);
  if (is_under_way_) numbers.insert(number_);
  // rewind() collects before it writes the manifest that names the snapshot of the old commit again.
  for (const IndexSnapshotEntry& index_snapshot : table_.committed.index_snapshots) numbers.insert(index_snapshot.file);
  return numbers;
}

void IndexSnapshots::consider() {
  std::unique_ptr<std::thread> before;
  {
    const auto guard = table_.lock.slice();
    const size_t stored = table_.store->directory().num_entries();
    if (stop_ || is_under_way_ || ready_.has_value() || stored < index_snapshot_rows) return;
    uint64_t bytes = stored * (sizeof(int64_t) + kPackedEntryBytes);
    if (table_.spec.num_rows > 0)
      bytes = std::min(bytes, static_cast<uint64_t>(table_.spec.num_rows) * kPackedEntryBytes);
    const uint64_t record_bytes = record_stride(table_.payload_bytes) + chunk_index_bytes(1);
    if (records_to_replay() < std::clamp<uint64_t>(kShare * bytes / record_bytes, stored / 8, stored / 2) ||
        !table_.store->disk().has_bytes(DiskBudget::index_snapshot_estimate(stored))) {
      return;
    }
    is_under_way_ = true;
    number_ = next_number_++;
    count_bytes();
    before = std::move(thread_);
  }
  if (before != nullptr) before->join();  // its walk is over
  if (!index_snapshots_in_line) {
    const auto guard = table_.lock.slice();
    try {
      thread_ = std::make_unique<std::thread>([this] { take(); });
      return;
    } catch (const std::exception&) {  // no thread can be started: the walk runs here, below
    }
  }
  take();
}

// The facts of a walk through the directory.
struct IndexSnapshots::Walk {
  uint64_t store = 0;  // store_number_ when it began
  size_t parts = 0;
  DirectoryHeader header;
  std::vector<SegmentCounts> segments;
};

void IndexSnapshots::take() {
  Walk walk;
  std::optional<IndexSnapshotEntry> taken;
  try {
    taken = write(&walk);
  } catch (const Error&) {
  } catch (const std::bad_alloc&) {
  }
  const auto guard = table_.lock.slice();
  is_under_way_ = false;
  // An unused file is removed by the next collection, because no commit names it.
  if (!taken.has_value() || table_.store == nullptr || store_number_ != walk.store) return;
  ready_ = taken;
  ready_epoch_ = walk.header.replay_epoch;
  count_bytes();
}

namespace {

void sort_by_row(std::vector<int64_t>* rows, std::vector<Entry>* entries) {
  if (std::is_sorted(rows->begin(), rows->end())) return;
  std::vector<std::pair<int64_t, Entry>> pairs;
  pairs.reserve(rows->size());
  for (size_t i = 0; i < rows->size(); ++i) pairs.emplace_back((*rows)[i], (*entries)[i]);
  std::sort(pairs.begin(), pairs.end());
  for (size_t i = 0; i < pairs.size(); ++i) std::tie((*rows)[i], (*entries)[i]) = pairs[i];
}

}  // namespace

std::optional<IndexSnapshotEntry> IndexSnapshots::write(Walk* walk) {
  const auto is_over = [&]() REQUIRES(table_.lock) {
    return stop_ || table_.store == nullptr || store_number_ != walk->store;
  };
  DirectoryHeader& header = walk->header;
  std::vector<SegmentCounts>& segments = walk->segments;
  {
    const auto guard = table_.lock.slice();
    walk->store = store_number_;
    if (is_over()) return std::nullopt;
    const Log& log = *table_.store->log();
    const Directory& directory = table_.store->directory();
    header.uuid = table_.uuid;
    header.number = number_;
    header.replay_epoch = log.oldest_open_epoch();
    header.piece_bytes =
        vfs::round_down(std::clamp<size_t>(table_.store->plan().total_bytes / 256, 4u << 10, 256u << 10), 4096);
    walk->parts = directory.num_parts();
    const uint64_t dense = static_cast<uint64_t>(std::max<int64_t>(0, table_.spec.num_rows)) * kPackedEntryBytes;
    const bool is_dense = directory.has_ranges() && directory.counted_rows() == 0 &&
                          dense <= directory.stored_rows() * (sizeof(int64_t) + kPackedEntryBytes);
    header.form = table_.has_counts() ? DirectoryForm::kCountedPairs
                  : is_dense          ? DirectoryForm::kDense
                                      : DirectoryForm::kPairs;
    header.num_entries = header.is_dense() ? static_cast<uint64_t>(table_.spec.num_rows) : 0;
    for (const auto& [id, segment] : log.segments()) {
      if (segment->epoch >= header.replay_epoch) continue;
      segments.push_back({id, static_cast<uint32_t>(segment->records), static_cast<uint32_t>(segment->tombstones),
                          static_cast<uint32_t>(segment->counts)});
    }
  }
  failpoint("index_snapshot.started");
  IndexSnapshotFile file(table_.vfs, table_.path, header, segments);
  std::vector<int64_t> rows;
  std::vector<Entry> entries;
  uint64_t slots = 0;
  for (size_t part = 0; part < walk->parts; ++part) {
    rows.clear();
    entries.clear();
    {
      const auto guard = table_.lock.slice();
      if (is_over()) return std::nullopt;
      slots = table_.store->log()->slots_per_segment();
      table_.store->directory().part(part, &rows, &entries);
      for (Entry& entry : entries) {
        if (!is_frame(entry)) continue;
        const uint64_t position = table_.store->cache().info(frame_of(entry)).position;
        entry = position == kNoPosition ? kAbsent : entry_of_position(position);
      }
    }
    if (header.form == DirectoryForm::kDense) sort_by_row(&rows, &entries);
    size_t kept = 0;
    uint64_t last = ~0ull;  // neighbours are mostly in one segment
    for (size_t i = 0; i < rows.size(); ++i) {
      if (entries[i] == kAbsent || (is_count(entries[i]) && fault_is("index_snapshot_without_counts"))) continue;
      if (is_count(entries[i])) {
        rows[kept] = rows[i];
        entries[kept++] = entries[i];
        continue;
      }
      const uint64_t segment = position_of(entries[i]) / slots;
      if (segment != last && !is_known(segments, segment)) continue;
      last = segment;
      rows[kept] = rows[i];
      entries[kept++] = entries[i];
    }
    file.add(rows.data(), entries.data(), kept);
    failpoint("index_snapshot.part");
  }
  return file.finish();
}

bool IndexSnapshots::is_worth_closing_with() const {
  if (table_.is_closed || !table_.options.writable || !table_.broken.empty() || !table_.read_only_reason.empty() ||
      table_.store == nullptr || !table_.has_files() || table_.spec.belongs_to_run) {
    return false;
  }
  const bool is_committed = !table_.is_changed && table_.is_durable && device_.num_held() == 0 &&
                            table_.is_definition_committed();  // a commit would change it
  // An unchanged copy must keep its flag, and a kept commit must stay the newest one.
  const bool may_commit = (table_.committed.writer_flags & kWriterFlagCopy) == 0 && table_.committed.keep.empty();
  const size_t stored = table_.store->directory().num_entries();
  return is_committed && may_commit && stored >= index_snapshot_rows &&
         table_.store->disk().has_bytes(DiskBudget::index_snapshot_estimate(stored)) &&
         records_to_replay() >= kWorthClosing * index_snapshot_rows;
}

bool IndexSnapshots::prepare_to_close(bool may_take) {
  bool is_wanted = false;
  std::unique_ptr<std::thread> walk;
  {
    const auto guard = table_.lock.exclusive();
    is_wanted = may_take && is_worth_closing_with();
    if (!is_wanted) stop_ = true;
    walk = std::move(thread_);
  }
  if (walk != nullptr) walk->join();
  if (!is_wanted) return false;
  bool is_ours = false;  // another thread may be closing the table, too
  {
    const auto guard = table_.lock.exclusive();
    if (!ready_.has_value() && !is_under_way_) {
      is_ours = is_under_way_ = true;
      number_ = next_number_++;
    }
  }
  if (is_ours) take();
  const auto guard = table_.lock.exclusive();
  stop_ = true;
  return true;
}

void IndexSnapshots::forget_store() {
  ++store_number_;
  ready_.reset();
  replay_epoch_ = 0;
}

void IndexSnapshots::committed_ready() {
  replay_epoch_ = ready_epoch_;
  ready_.reset();
}

void IndexSnapshots::count_bytes() {
  const uint64_t estimate = DiskBudget::index_snapshot_estimate(table_.store->directory().num_entries());
  table_.store->disk().set_index_snapshot_bytes((ready_.has_value() ? ready_->bytes : 0) +
                                                (is_under_way_ ? estimate : 0));
}

}  // namespace bunkbed
