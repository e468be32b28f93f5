#include "store/compactor.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/fault.h"

namespace bunkbed {

namespace {

constexpr size_t kMergeWidth = 4;                         // segments of a tier, and the factor between two tiers
constexpr uint64_t kSmallestTier = 2 * vfs::kBlockBytes;  // a segment of one record

bool has_content(const Segment& segment) { return segment.live > 0 || segment.others() > 0; }

// The bytes that emptying the segment appends.
uint64_t content_bytes(const Segment& segment, uint64_t record_bytes) {
  return segment.live * record_bytes + chunk_index_bytes(segment.tombstones) + count_index_bytes(segment.counts);
}

size_t tier_of(uint64_t bytes) { return (std::bit_width(std::max(bytes / kSmallestTier, uint64_t{1})) - 1) / 2; }

}  // namespace

uint64_t Compactor::total_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [id, segment] : log_->segments()) bytes += segment->bytes;
  return bytes;
}

uint64_t Compactor::live_bytes() const {
  uint64_t records = 0;
  for (const auto& [id, segment] : log_->segments()) records += segment->live;
  return records * (log_->stride() + 16);
}

uint64_t Compactor::most_segments(uint64_t bytes, uint64_t segment_bytes) {
  return 2 * (bytes / segment_bytes) + kMergeWidth * (tier_of(segment_bytes) + 1);
}

uint64_t Compactor::tombstones() const {
  uint64_t count = 0;
  for (const auto& [id, segment] : log_->segments()) count += segment->tombstones;
  return count;
}

uint64_t Compactor::counts() const {
  uint64_t count = 0;
  for (const auto& [id, segment] : log_->segments()) count += segment->counts;
  return count;
}

bool Compactor::has_too_many_counts() const {
  const uint64_t found = counts();
  if (found == 0) return false;
  const uint64_t allowed = 2 * std::max<uint64_t>(directory_->counted_rows(), counts_left_);
  return count_index_bytes(found) > count_index_bytes(allowed) + compaction_slack_bytes.load(std::memory_order_relaxed);
}

bool Compactor::has_too_many_tombstones() const {
  const double allowed = kMostTombstones * static_cast<double>(directory_->stored_rows() * (log_->stride() + 16)) +
                         static_cast<double>(compaction_slack_bytes.load(std::memory_order_relaxed));
  return static_cast<double>(chunk_index_bytes(tombstones())) > allowed;
}

bool Compactor::has_too_many_segments() const {
  return log_->segments().size() > most_segments(total_bytes(), log_->segment_bytes());
}

// The live bytes of the log if all dirty rows were written back now. A dirty row has no live record in the log until it
// is written back. Without counting it, each commit of a table that fits in RAM, whose rows are soon dirty again, would
// make compaction move the rest of the log.
uint64_t Compactor::settled_bytes() const {
  const uint64_t records = std::max(live_bytes(), directory_->stored_rows() * (log_->stride() + 16));
  return records + chunk_index_bytes(tombstones()) + count_index_bytes(counts());
}

double Compactor::goal_bytes() const {
  const uint64_t appended = log_->stats().written_records - records_moved_ - goal_appended_;
  return goal_ * static_cast<double>(settled_bytes()) +
         kGoalRise * static_cast<double>(appended * (log_->stride() + 16));
}

void Compactor::set_goal() {
  if (log_ == nullptr) return;
  const double settled = std::max(1.0, static_cast<double>(settled_bytes()));
  const double dead = static_cast<double>(total_bytes()) - settled;
  goal_ = std::min(goal_bytes(), std::max(0.0, dead)) / settled;
  goal_appended_ = log_->stats().written_records - records_moved_;
}

bool Compactor::has_too_many_bytes() const {
  const auto settled = static_cast<double>(settled_bytes());
  const double allowed = std::min(settled / kTargetLive, std::max(settled / kWorthMoving, settled + goal_bytes()));
  const double slack = static_cast<double>(compaction_slack_bytes.load(std::memory_order_relaxed));
  return static_cast<double>(total_bytes()) > allowed + slack;
}

bool Compactor::is_needed() const {
  if (log_ == nullptr) return false;
  return segment_ != 0 || !merging_.empty() || has_too_many_bytes() || has_too_many_segments() ||
         has_too_many_tombstones() || counts_round_ != 0 || has_too_many_counts();
}

// Runs a read of the chosen segment. When the read fails, the segment is never chosen again and the error is dropped,
// because no caller wants these records now. A lookup of one of its rows reports the error, and check() lists it.
template <typename Call>
bool Compactor::read_or_set_aside(Call&& call) {
  try {
    call();
    return true;
  } catch (const Error&) {
    damaged_.insert(segment_);
    segment_ = 0;
    return false;
  }
}

bool Compactor::may_choose(const Segment& segment) const {
  // A segment of the commit under way (is_ending) stays even when it is empty, so it would be chosen again and again.
  if (!segment.is_sealed || segment.is_ending || segment.records + segment.others() == 0) return false;
  if (damaged_.contains(segment.id) || log_->buffers().is_being_written(segment)) return false;
  return !may_empty_ || may_empty_(segment, named_.contains(segment.id));
}

void Compactor::choose_merge() {
  const uint64_t record_bytes = log_->stride() + 16;
  std::array<std::vector<const Segment*>, 32> tiers;
  for (const auto& [id, segment] : log_->segments()) {
    if (may_choose(*segment)) tiers[tier_of(content_bytes(*segment, record_bytes))].push_back(segment.get());
  }
  const auto found =
      std::find_if(tiers.begin(), tiers.end(), [](const auto& tier) { return tier.size() >= kMergeWidth; });
  if (found == tiers.end()) return;
  std::sort(found->begin(), found->end(), [&](const Segment* a, const Segment* b) {
    return content_bytes(*a, record_bytes) < content_bytes(*b, record_bytes);
  });
  uint64_t bytes = 0;
  for (const Segment* const segment : *found) {
    const uint64_t with = bytes + content_bytes(*segment, record_bytes);
    if (merging_.size() >= kMergeWidth && with > log_->segment_bytes()) break;
    bytes = with;
    merging_.push_back(segment->id);
  }
  // The records of four nearly full segments would fill four segments again.
  if (bytes > 2 * log_->segment_bytes()) merging_.clear();
}

// The next segment to empty for a purge; null where there is none. Begins a purge, and ends it.
const Segment* Compactor::pick_for_purge() {
  if (!has_too_many_tombstones()) return nullptr;
  const KeptTombstones kept = kept_tombstones_ ? kept_tombstones_() : KeptTombstones{};
  if (purge_version_ != 0) {
    std::erase_if(purging_, [this](uint64_t id) { return log_->find_segment(id) == nullptr; });
    if (purging_.empty()) purged_version_ = std::exchange(purge_version_, 0);
  }
  bool has_older = false, has_newer = false;  // tombstones that the last purge freed, and those that another one would
  for (const auto& [id, segment] : log_->segments()) {
    if (segment->tombstones == 0 || segment->oldest_tombstone >= kept.version) continue;
    const bool is_older = segment->oldest_tombstone < purged_version_;
    (is_older ? has_older : has_newer) = true;
    if (is_older && segment->epoch < kept.epoch && may_choose(*segment)) return segment.get();
  }
  if (purge_version_ == 0 && has_newer && !has_older) {
    purge_version_ = log_->next_version();
    purging_.clear();
    for (const auto& [id, segment] : log_->segments()) {
      if ((segment->live < segment->records || segment->counts > 0) && !fault_is("purge_too_early"))
        purging_.insert(id);
    }
  }
  for (const uint64_t id : purging_) {
    const Segment* const segment = log_->find_segment(id);
    if (segment != nullptr && may_choose(*segment)) return segment;
  }
  return nullptr;
}

// Of the chunk whose ids and versions were read: appends the tombstones again that are still needed.
void Compactor::append_kept_tombstones(const Segment& segment) {
  const bool may_drop = purged_version_ > 0 && segment.oldest_tombstone < purged_version_;
  const KeptTombstones kept = may_drop && kept_tombstones_ ? kept_tombstones_() : KeptTombstones{};
  const uint64_t end = may_drop && segment.epoch < kept.epoch ? std::min(purged_version_, kept.version) : 0;
  std::vector<int64_t> ids, counted;
  std::vector<uint64_t> versions, counts;
  uint64_t deletions_from = deletions_from_;
  for (size_t i = 0; i < ids_.size(); ++i) {
    const Entry entry = directory_->find(ids_[i]);
    if (is_stored(entry)) continue;
    if (versions_[i] < end) {
      deletions_from = std::max(deletions_from, versions_[i] + 1);
    } else {
      ids.push_back(ids_[i]);
      versions.push_back(versions_[i]);
      if (!is_count(entry)) continue;
      counted.push_back(ids_[i]);
      counts.push_back(entry);
    }
  }
  log_->append_others(ids.data(), versions.data(), nullptr, ids.size());
  log_->append_others(counted.data(), nullptr, counts.data(), counted.size());  // above the tombstone: see replay.h
  deletions_from_ = deletions_from;
}

// The next segment of step 9; null where there is none. Begins a round, and ends it.
const Segment* Compactor::pick_for_counts() {
  if (counts_round_ == 0 && has_too_many_counts()) counts_round_ = log_->next_segment();
  if (counts_round_ == 0) return nullptr;
  bool is_over = true;
  for (const auto& [id, segment] : log_->segments()) {
    if (id >= counts_round_ || segment->counts == 0 || damaged_.contains(id)) continue;
    is_over = false;
    if (may_choose(*segment)) return segment.get();
  }
  if (!is_over) return nullptr;
  counts_round_ = 0;
  counts_left_ = counts();
  return nullptr;
}

// Of the chunk that was read: appends the counts again that the directory has.
void Compactor::append_live_counts() {
  if (fault_is("counts_not_moved")) return;
  const bool outranks = fault_is("counts_outrank");
  size_t kept = 0;
  for (size_t i = 0; i < ids_.size(); ++i) {
    const Entry entry = directory_->find(ids_[i]);
    if (outranks ? !is_count(entry) : entry != counts_[i]) continue;
    ids_[kept] = ids_[i];
    versions_[kept] = versions_[i];
    counts_[kept++] = counts_[i];
  }
  log_->append_others(ids_.data(), outranks ? nullptr : versions_.data(), counts_.data(), kept);
}

uint64_t Compactor::begin_merge() {
  if (!merging_.empty() || !has_too_many_segments()) return 0;
  choose_merge();
  uint64_t records = 0;
  for (const uint64_t id : merging_) {
    const Segment* const segment = log_->find_segment(id);
    records += segment->records + segment->others();
  }
  return records;
}

void Compactor::merge(size_t buffer_bytes) {
  if (log_ == nullptr) return;
  try {
    for (size_t before = ~size_t{0}; log_->segments().size() < before;) {
      before = log_->segments().size();
      run(begin_merge(), buffer_bytes);
    }
  } catch (const Error&) {  // for example a full disk: no record is lost, and later calls try again
  }
}

// Chooses the emptiest segment that `among` accepts. Without `among`, prefers the next segment of a merge.
bool Compactor::pick(const MayEmpty* among) {
  const Segment* best = nullptr;
  if (among == nullptr) {
    if (merging_.empty() && has_too_many_segments()) choose_merge();
    for (; best == nullptr && !merging_.empty(); merging_.pop_back()) {
      const Segment* const next = log_->find_segment(merging_.back());
      if (next != nullptr && may_choose(*next)) best = next;
    }
    if (best != nullptr) return begin(best);
  }
  const bool wants_bytes = among != nullptr || has_too_many_bytes();
  double best_part = kWorthMoving;
  for (const auto& [id, segment] : log_->segments()) {
    if (!wants_bytes || !may_choose(*segment)) continue;
    if (among != nullptr && !(*among)(*segment, named_.contains(id))) continue;
    // With `among`, bytes count: the small segments of small commits are mostly header and padding.
    const uint64_t record_bytes = among == nullptr ? log_->stride() + 16 : log_->record_disk_bytes();
    const uint64_t bytes = among == nullptr ? segment->records * record_bytes + chunk_index_bytes(segment->tombstones) +
                                                  count_index_bytes(segment->counts)
                                            : segment->bytes;
    const double part = static_cast<double>(content_bytes(*segment, record_bytes)) / static_cast<double>(bytes);
    if (part < best_part) {
      best = segment.get();
      best_part = part;
    }
  }
  if (best == nullptr && among == nullptr) best = pick_for_purge();
  if (best == nullptr && among == nullptr) best = pick_for_counts();
  return best != nullptr && begin(best);
}

bool Compactor::begin(const Segment* segment) {
  chunks_.clear();
  chunk_ = 0;
  record_ = 0;
  ids_.clear();
  segment_ = segment->id;
  failpoint("compact.chosen");
  return true;
}

bool Compactor::choose(const MayEmpty* among) {
  if (!pick(among)) return false;
  Segment* segment = log_->find_segment(segment_);
  if (has_content(*segment)) read_or_set_aside([&] { chunks_ = log_->reader().chunks(*segment); });
  return true;
}

bool Compactor::plan_read(size_t buffer_bytes, Read* read) {
  *read = Read();
  if (segment_ == 0 && (!is_needed() || !pick())) return false;
  Segment* segment = log_->find_segment(segment_);
  if (segment == nullptr || !has_content(*segment)) return true;  // nothing to read: look() ends this segment
  if (chunks_.empty() && chunk_ == 0) {
    chunks_ = segment->chunks;
    read->wants_chunks = chunks_.empty();
  }
  if (!read->wants_chunks) {
    if (chunk_ >= chunks_.size() || !ids_.empty()) return true;
    const ChunkTrailer& chunk = chunks_[chunk_];
    const bool is_there = span_.segment == segment_ && span_.begin <= chunk.begin && chunk.end <= span_.end;
    if (is_there || chunk.end - chunk.begin > buffer_bytes) return true;
    read->begin = chunk.begin;
    read->bytes = buffer_bytes;
    read->span = std::move(span_);
    span_ = Span();
  }
  read->segment = segment;
  return true;
}

void Compactor::execute(Read* read) const {
  if (read->segment == nullptr) return;
  try {
    read->read_bytes = read->wants_chunks
                           ? log_->reader().find_chunks(*read->segment, &read->chunks)
                           : log_->reader().fetch_span(*read->segment, read->begin, read->bytes, &read->span);
  } catch (const std::exception&) {
    read->failed = true;
  }
}

void Compactor::take_read(Read read) {
  if (read.segment == nullptr) return;
  log_->reader().count_read_bytes(read.read_bytes);
  if (read.failed) {
    read_or_set_aside([] { throw Error(ErrorKind::kSystem, "background read failed"); });
    return;
  }
  if (!read.wants_chunks) {
    span_ = std::move(read.span);
    return;
  }
  log_->find_segment(segment_)->chunks = read.chunks;
  chunks_ = std::move(read.chunks);
}

// Examines up to `n` records of the chosen segment. Returns how many, at least 1.
size_t Compactor::look(size_t n, size_t buffer_bytes) {
  size_t looked = 0;
  Segment* segment = log_->find_segment(segment_);
  if (segment != nullptr && has_content(*segment) && chunk_ < chunks_.size()) {
    const ChunkTrailer& chunk = chunks_[chunk_];
    if (ids_.empty() && !read_or_set_aside([&] {
          // One large read for as many chunks as the buffer holds: each small read would wait behind random reads.
          const size_t whole = chunk.end - chunk.begin;
          if (whole <= buffer_bytes) {
            const bool is_there = span_.segment == segment_ && span_.begin <= chunk.begin && chunk.end <= span_.end;
            if (!is_there) log_->reader().read_span(*segment, chunk.begin, buffer_bytes, &span_);
          }
          log_->reader().read_index(*segment, chunk, &span_, &ids_, &versions_, &counts_);
        })) {
      return 1;
    }
    const bool has_records = chunk.kind == ChunkKind::kData;
    if (chunk.kind == ChunkKind::kTombstone) append_kept_tombstones(*segment);
    if (chunk.kind == ChunkKind::kCount) append_live_counts();
    const size_t fits = std::max<size_t>(1, buffer_bytes / log_->stride());
    const size_t count = has_records ? std::min({n, fits, ids_.size() - record_}) : ids_.size();

    // The directory and the frames say which records are live, so only the span with live records is read.
    const auto is_live = [&](size_t i, uint32_t* frame) {
      const uint64_t place = log_->position(segment_, chunk.first_slot + i);
      const Entry entry = directory_->find(ids_[i]);
      *frame = ~0u;
      if (fault_is("move_dead_records") && is_position(entry)) return true;
      if (is_position(entry)) return position_of(entry) == place;
      if (!is_frame(entry)) return false;
      *frame = frame_of(entry);
      return cache_->info(*frame).position == place;
    };
    size_t first = record_ + count, last = record_;
    uint32_t frame;
    for (size_t i = record_; has_records && i < record_ + count; ++i) {
      if (!is_live(i, &frame)) continue;
      first = std::min(first, i);
      last = i + 1;
    }
    if (first < last) {
      const std::byte* records = nullptr;
      if (!read_or_set_aside([&] {
            records = log_->reader().read_records(*segment, chunk, first, last - first, ids_.data(), &span_);
          })) {
        return count;
      }
      failpoint("compact.read");
      const bool outranks = fault_is("move_outranks");
      for (size_t i = first; i < last; ++i) {
        const std::byte* const record = records + (i - first) * log_->stride();
        if (!is_live(i, &frame)) {  // checked again, because it may have changed during the read
          if (outranks) (void)log_->append(ids_[i], record);
          continue;
        }
        const uint64_t moved = log_->append(ids_[i], record, versions_[i]);
        --segment->live;
        ++records_moved_;
        if (frame == ~0u) {
          directory_->set(ids_[i], entry_of_position(moved));
        } else {
          cache_->info(frame).position = moved;
        }
      }
      failpoint("compact.moved");
    }
    looked = count;
    record_ += count;
    if (record_ >= ids_.size()) {
      ++chunk_;
      record_ = 0;
      ids_.clear();
    }
    if (chunk_ == chunks_.size()) {
      segment->tombstones = segment->counts = 0;         // all that are needed were appended again
      if (segment->live > 0) damaged_.insert(segment_);  // it counts records that it does not have
    }
    if (has_content(*segment) && chunk_ < chunks_.size()) return std::max<size_t>(1, looked);
  }
  segment_ = 0;
  ++segments_compacted_;
  drop_dead_segments();
  return std::max<size_t>(1, looked);
}

void Compactor::run(size_t records, size_t buffer_bytes) {
  if (log_ == nullptr) return;
  size_t done = 0;
  while (done < records) {
    if (segment_ == 0 && (!is_needed() || !choose())) return;
    done += look(records - done, buffer_bytes);
  }
}

bool Compactor::empty_until(const std::function<bool()>& is_enough, const MayEmpty& among, size_t buffer_bytes) {
  constexpr size_t kRecords = 4096;
  if (segment_ != 0 && !is_enough()) {  // half done, but `among` may refuse it: it starts again when it is chosen
    segment_ = 0;
    ids_.clear();
  }
  while (!is_enough()) {
    if (segment_ == 0 && !choose(&among)) return false;
    look(kRecords, buffer_bytes);
  }
  return true;
}

void Compactor::add_named_segments(const std::set<uint64_t>& more) {
  for (const uint64_t id : more) {
    const Segment* const segment = log_->find_segment(id);
    named_.try_emplace(id, segment == nullptr ? 0 : segment->bytes);
  }
}

uint64_t Compactor::named_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [id, size] : named_) bytes += log_->find_segment(id) == nullptr ? size : 0;
  return bytes;
}

void Compactor::drop_dead_segments() {
  std::vector<uint64_t> dead;
  for (const auto& [id, segment] : log_->segments()) {
    if (!segment->is_sealed || segment->is_ending || has_content(*segment)) continue;
    if (id != segment_ && !log_->buffers().is_being_written(*segment)) dead.push_back(id);
  }
  for (const uint64_t id : dead) {
    const auto named = named_.find(id);
    if (named != named_.end()) named->second = log_->find_segment(id)->bytes;  // it may have grown since it was named
    log_->forget_segment(id, named == named_.end());
    failpoint("compact.dropped");
  }
}

}  // namespace bunkbed
