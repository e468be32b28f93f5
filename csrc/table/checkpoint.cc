// When a table takes a directory checkpoint, and how it comes into a commit; what one is, and why it is right though the
// table changes meanwhile, is said in checkpoint.h.
//
//   1. After a commit, once what opening would replay is an eighth of the rows stored or, where records are so small that
//      a checkpoint would be more than a quarter of the bytes they took, as many as make it that, half of the rows at
//      most: bytes written follow dirty rows. A table of few rows takes none. A thread of its own walks the directory, part by part, under the lock for a part; calls
//      that wait for the lock go first. What it finds is checked and written without the lock.
//   2. The file is whole and durable under its name. The next commit that begins names it; until then collecting leaves
//      it alone. Later commits name it too, until another takes its place.
//   3. close() of a table that would be slow to open and has nothing uncommitted takes one at once, and makes a commit of the same
//      state that names it. A table of a run does not: its commits are the run's.
// A failure costs the checkpoint and nothing else: it is tried again after the next commit.
#include <algorithm>

#include "base/error.h"
#include "base/failpoints.h"
#include "directory/checkpoint.h"
#include "directory/replay.h"
#include "table/table.h"

namespace bunkbed {

namespace {

constexpr uint64_t kShare = 4;  // a checkpoint costs at most one byte for so many of records
constexpr uint64_t kWorthClosing = 10;  // times checkpoint_rows: records whose replay close() spares the next opening

// Segments of epochs before the walk's, by number.
bool is_known(const std::vector<SegmentCounts>& segments, uint64_t segment) {
  const auto found = std::lower_bound(segments.begin(), segments.end(), segment,
                                      [](const SegmentCounts& counts, uint64_t number) { return counts.segment < number; });
  return found != segments.end() && found->segment == segment;
}

}  // namespace

void Table::load_directory(const Manifest& manifest, size_t scratch_bytes) {
  Log* const log = store_->log();
  Directory* const directory = &store_->directory();
  LoadedCheckpoint loaded;
  if (!manifest.checkpoints.empty()) {
    loaded = load_checkpoint(vfs_, path_, manifest.checkpoints.back(), log, directory, spec_.num_rows,
                             manifest.stored_rows, scratch_bytes);
  }
  failpoint("open.checkpoint");
  std::vector<Segment*> later;
  for (const auto& [id, segment] : log->segments()) {
    if (!loaded.is_loaded || segment->epoch >= loaded.replay_epoch) later.push_back(segment.get());
  }
  uint64_t lost = loaded.lost;
  const auto give_up = [&](Entry before) {
    Segment* const segment = log->find_segment(position_of(before) / log->slots_per_segment());
    if (segment == nullptr) {
      --lost;
    } else {
      --segment->live;
    }
  };
  indexed_records_ += Replay{log, directory, spec_.num_rows, manifest.next_version, scratch_bytes, nullptr, give_up}.run(later);
  if (lost > 0) {
    throw Error(ErrorKind::kCorruption, "table '" + name_ + "': " + std::to_string(lost) + " rows of " +
                                            directory_name(manifest.checkpoints.back().file) +
                                            " point at segments the commit does not have; no row is lost by it: bunkbed "
                                            "check --repair builds the directory from the segments");
  }
  checkpoints_.replay_epoch = loaded.replay_epoch;
  if (!options_.writable) return;
  for (const std::string& name : vfs_.list(path_)) {
    uint64_t number;
    if (parse_name(name, "directory-", &number)) checkpoints_.next_number = std::max(checkpoints_.next_number, number + 1);
  }
}

uint64_t Table::records_to_replay() const {
  uint64_t records = 0;
  for (const auto& [id, segment] : store_->log()->segments()) {
    if (segment->epoch >= checkpoints_.replay_epoch) records += segment->records;
  }
  return records;
}

// Numbers of files that no commit names yet and that must stay.
std::set<uint64_t> Table::checkpoints_in_use() const {
  std::set<uint64_t> numbers;
  if (checkpoints_.ready.has_value()) numbers.insert(checkpoints_.ready->file);
  if (checkpoints_.is_under_way) numbers.insert(checkpoints_.number);
  // Going back to a commit names its own again, before the manifest that does so is written.
  for (const CheckpointEntry& checkpoint : committed_.checkpoints) numbers.insert(checkpoint.file);
  return numbers;
}

void Table::consider_checkpoint() {
  std::unique_ptr<std::thread> before;
  {
    const auto guard = lock_.slice();
    const size_t stored = store_->directory().stored_rows();
    if (checkpoints_.stop || checkpoints_.is_under_way || checkpoints_.ready.has_value() || stored < checkpoint_rows) return;
    uint64_t bytes = stored * (sizeof(int64_t) + kPackedEntryBytes);
    if (spec_.num_rows > 0) bytes = std::min(bytes, static_cast<uint64_t>(spec_.num_rows) * kPackedEntryBytes);
    const uint64_t record_bytes = record_stride(payload_bytes_) + chunk_index_bytes(1);
    if (records_to_replay() < std::clamp<uint64_t>(kShare * bytes / record_bytes, stored / 8, stored / 2) ||
        !store_->has_disk_bytes(Store::checkpoint_estimate(stored))) {
      return;
    }
    checkpoints_.is_under_way = true;
    checkpoints_.number = checkpoints_.next_number++;
    count_checkpoint_bytes();
    before = std::move(checkpoints_.thread);
  }
  if (before != nullptr) before->join();  // it has nothing more to do
  if (!checkpoints_in_line) {
    const auto guard = lock_.slice();
    try {
      checkpoints_.thread = std::make_unique<std::thread>([this] { take_checkpoint(); });
      return;
    } catch (const std::exception&) {  // no thread to be had: then here
    }
  }
  take_checkpoint();
}

void Table::take_checkpoint() {
  uint64_t store = 0;
  size_t parts = 0;
  DirectoryHeader header;
  std::vector<SegmentCounts> segments;
  std::optional<CheckpointEntry> taken;
  const auto is_over = [&] { return checkpoints_.stop || store_ == nullptr || checkpoints_.store != store; };
  try {
    {
      const auto guard = lock_.slice();
      store = checkpoints_.store;
      if (is_over()) throw Error(ErrorKind::kClosed, "the table was closed");
      const Log& log = *store_->log();
      const Directory& directory = store_->directory();
      header.uuid = uuid_;
      header.number = checkpoints_.number;
      header.replay_epoch = log.oldest_open_epoch();
      header.piece_bytes = vfs::round_down(std::clamp<size_t>(store_->plan().total_bytes / 256, 4u << 10, 256u << 10), 4096);
      parts = directory.num_parts();
      const uint64_t dense = static_cast<uint64_t>(std::max<int64_t>(0, spec_.num_rows)) * kPackedEntryBytes;
      const bool is_dense = directory.is_ordered() &&
                            dense <= directory.stored_rows() * (sizeof(int64_t) + kPackedEntryBytes);
      header.form = is_dense ? DirectoryForm::kDense : DirectoryForm::kPairs;
      header.num_entries = is_dense ? static_cast<uint64_t>(spec_.num_rows) : 0;
      for (const auto& [id, segment] : log.segments()) {
        if (segment->epoch >= header.replay_epoch) continue;
        segments.push_back({id, static_cast<uint32_t>(segment->records), static_cast<uint32_t>(segment->tombstones)});
      }
    }
    failpoint("checkpoint.begun");
    CheckpointFile file(vfs_, path_, header, segments);
    std::vector<int64_t> rows;
    std::vector<Entry> entries;
    uint64_t slots = 0;
    for (size_t part = 0; part < parts; ++part) {
      rows.clear();
      entries.clear();
      {
        const auto guard = lock_.slice();
        if (is_over()) throw Error(ErrorKind::kClosed, "the table was closed");
        slots = store_->log()->slots_per_segment();
        store_->directory().part(part, &rows, &entries);
        for (Entry& entry : entries) {
          if (!is_frame(entry)) continue;
          const uint64_t position = store_->cache().info(frame_of(entry)).position;
          entry = position == kNoPosition ? kAbsent : entry_of_position(position);
        }
      }
      size_t kept = 0;
      uint64_t last = ~0ull;  // neighbours mostly lie in one segment
      for (size_t i = 0; i < rows.size(); ++i) {
        if (entries[i] == kAbsent) continue;
        const uint64_t segment = position_of(entries[i]) / slots;
        if (segment != last && !is_known(segments, segment)) continue;
        last = segment;
        rows[kept] = rows[i];
        entries[kept++] = entries[i];
      }
      file.add(rows.data(), entries.data(), kept);
      failpoint("checkpoint.part");
    }
    taken = file.finish();
  } catch (const Error&) {
  } catch (const std::bad_alloc&) {
  }
  const auto guard = lock_.slice();
  checkpoints_.is_under_way = false;
  if (!taken.has_value() || store_ == nullptr || checkpoints_.store != store) return;  // collected with what nobody names
  checkpoints_.ready = taken;
  checkpoints_.ready_epoch = header.replay_epoch;
  count_checkpoint_bytes();
}

// Before close(): ends a walk that is under way, or waits for it where its file is wanted.
void Table::settle_checkpoint(bool may_take) {
  bool is_wanted = false;
  std::unique_ptr<std::thread> walk;
  {
    const auto guard = lock_.exclusive();
    is_wanted = may_take && !closed_ && options_.writable && broken_.empty() && read_only_reason_.empty() &&
                store_ != nullptr && store_->log() != nullptr && !spec_.is_scratch && !spec_.belongs_to_run && !changed_ && is_durable_ &&
                spec_.optimizer == committed_.optimizer &&  // it would be committed with it
                // A copy that nobody wrote to stays one, and what was kept last stays the newest commit.
                (committed_.writer_flags & kWriterFlagCopy) == 0 && committed_.keep.empty() && (holder_ == nullptr || holder_->num_held() == 0) &&
                store_->directory().stored_rows() >= checkpoint_rows &&
                store_->has_disk_bytes(Store::checkpoint_estimate(store_->directory().stored_rows())) &&
                records_to_replay() >= kWorthClosing * checkpoint_rows;
    if (!is_wanted) checkpoints_.stop = true;
    walk = std::move(checkpoints_.thread);
  }
  if (walk != nullptr) walk->join();
  if (!is_wanted) return;
  bool is_ours = false;  // another thread may be closing the table, too
  {
    const auto guard = lock_.exclusive();
    if (!checkpoints_.ready.has_value() && !checkpoints_.is_under_way) {
      is_ours = checkpoints_.is_under_way = true;
      checkpoints_.number = checkpoints_.next_number++;
    }
  }
  if (is_ours) take_checkpoint();
  {
    const auto guard = lock_.exclusive();
    checkpoints_.stop = true;
  }
  try {
    std::shared_ptr<PendingCommit> pending;
    if (const auto job = start_commit(std::nullopt, "", &pending, true)) finish_commit(job.get());
    pending->wait();
  } catch (const Error&) {  // the last commit is as good as it was
  }
}

}  // namespace bunkbed
