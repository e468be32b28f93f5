// Makes rows resident: frames for them, and the reads of their records.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/fault.h"
#include "store/store.h"

namespace bunkbed {

namespace {

// A load is divided into so many groups, of at least so many rows: each group ends with a wait for its last read.
constexpr size_t kGroups = 4, kLeastGroup = 512;

// Whether a step stores a row that is not stored.
bool is_admitted(const Admission& admission, int64_t row, Entry entry) {
  if (!admission.counts()) return admission.admits(row);
  return admission.admits_after(is_count(entry) ? count_of(entry) : 0);
}

// The entries of rows[places[0]], rows[places[1]], ...
std::vector<Entry> entries_of(const Directory& directory, const int64_t* rows, const uint32_t* places, size_t n) {
  std::vector<int64_t> wanted(n);
  for (size_t i = 0; i < n; ++i) wanted[i] = rows[places[i]];
  std::vector<Entry> entries(n);
  directory.locate(wanted.data(), n, entries.data());
  return entries;
}

}  // namespace

void Store::pin(const int64_t* rows, size_t n, bool create, uint32_t* frames, bool overwrite,
                const Admission* admission) {
  if (entries_.size() < n) entries_.resize(n);
  const uint64_t hits = rows_.touch_distinct(rows, n, frames, true, entries_.data());
  Missing missing{rows, entries_.data(), {}};
  if (std::find(frames, frames + n, kNoFrame) == frames + n) {
    if (create) write_frozen_frames(frames, n);
    if (!overwrite) rows_.count_hits(hits);
    return;  // no frame is evicted before the next pin(), so these rows need no pins
  }
  refused_.clear();
  if (create && admission != nullptr && admission->counts()) counts_.make_room(n);
  // Residents first: loading one row of this call must not evict another.
  has_pins_ = true;
  uint64_t admitted = 0, refused = 0;
  for (size_t i = 0; i < n; ++i) {
    if (frames[i] != kNoFrame) {
      cache_.info(frames[i]).pinned = 1;
      continue;
    }
    if (!is_stored(entries_[i])) {
      if (!create) continue;
      const int64_t drawn =
          fault_is("admission_by_place") ? static_cast<int64_t>(i) : rows[i];  // the row, but for the bug
      const bool stores = admission == nullptr || is_admitted(*admission, drawn, entries_[i]);
      ++(stores ? admitted : refused);
      if (!stores) {
        refused_.push_back(static_cast<uint32_t>(i));
        continue;
      }
    }
    missing.places.push_back(static_cast<uint32_t>(i));
  }
  load(&missing, n, create, overwrite, frames);
  if (admission != nullptr) {
    stats_.admitted_rows += admitted;
    stats_.refused_rows += refused;
    stats_.first_touches += refused;
    stats_.unique_rows += refused;
    if (admission->counts()) {
      for (const uint32_t i : refused_) counts_.raise(rows[i], entries_[i], admission->now());
    }
  }
  if (!overwrite) rows_.count_hits(hits);
}

void Store::pin_stored(const int64_t* rows, const Entry* entries, size_t n, uint32_t* frames) {
  has_pins_ = true;
  Missing missing{rows, entries, {}};
  for (size_t i = 0; i < n; ++i) {
    frames[i] = is_frame(entries[i]) ? frame_of(entries[i]) : kNoFrame;
    if (frames[i] == kNoFrame) {
      missing.places.push_back(static_cast<uint32_t>(i));
    } else {
      cache_.info(frames[i]).pinned = 1;
    }
  }
  rows_.begin_touches();
  load(&missing, n, false, false, frames);
}

// Gives each missing row a frame, and reads its record or makes an initial one. `n`: the number of rows of the pin().
// Many rows are loaded in groups, in the order of the log: while one group is read, the next one gets its frames, and
// the records of their victims are appended.
void Store::load(Missing* missing, size_t n, bool create, bool overwrite, uint32_t* frames) {
  const int64_t* const rows = missing->rows;
  const Entry* const entries = missing->entries;
  std::vector<uint32_t>& places = missing->places;
  const bool reads =
      !overwrite && std::any_of(places.begin(), places.end(), [&](uint32_t i) { return is_stored(entries[i]); });
  const size_t group = reads ? std::clamp(places.size() / kGroups, kLeastGroup, kFramesAtOnce) : kFramesAtOnce;
  if (reads && places.size() > group) {
    std::sort(places.begin(), places.end(),
              [&](uint32_t a, uint32_t b) { return entries[a] != entries[b] ? entries[a] < entries[b] : a < b; });
  }
  ReadRequest late{0, 0, nullptr};  // for the seeded bug below
  size_t taken = 0;                 // places that have frames
  uint64_t misses = 0;
  std::vector<uint32_t> fresh;  // frames for the next rows
  size_t used = 0;
  // Gives the next group its frames, and plans its reads. The plan is made before compaction goes on, and keeps the
  // files open that it reads.
  const auto prepare = [&] {
    std::vector<ReadRequest> requests;
    const size_t end = std::min(places.size(), taken + group);
    const std::vector<Entry> present =
        taken == 0 ? std::vector<Entry>() : entries_of(*directory_, rows, &places[taken], end - taken);
    for (const size_t begin = taken; taken < end; ++taken) {
      constexpr size_t kAhead = 16;
      if (taken + kAhead < places.size()) cache_.prefetch_ghost(rows[places[taken + kAhead]]);
      const uint32_t i = places[taken];
      if (used == fresh.size()) {
        fresh = take_frames(end - taken, kNoUse);
        used = 0;
        if (fresh.empty()) {
          throw Error(ErrorKind::kMemory, "table '" + name_ + "': every frame of its RAM budget is pinned");
        }
      }
      const uint32_t frame = fresh[used++];
      frames[i] = frame;
      FrameInfo& info = cache_.info(frame);
      hold_row(frame, rows[i]);
      if (!is_stored(entries[i])) {
        if (!overwrite) initial_(rows[i], frame_bytes_, cache_.record(frame));
        continue;
      }
      // Compaction may have moved the record since the first group was read.
      info.position = position_of(present.empty() ? entries[i] : present[taken - begin]);
      directory_->set(rows[i], entry_of_frame(frame));
      if (overwrite) continue;
      ++misses;
      if (const std::byte* payload = log_->pending(info.position)) {
        std::memcpy(cache_.record(frame), payload, frame_bytes_);
      } else {
        requests.push_back({info.position, rows[i], cache_.record(frame)});
      }
    }
    if (late.payload == nullptr && !requests.empty()) late = requests.front();
    return log_ == nullptr ? ReadPlan() : log_->reads().plan(std::move(requests));
  };
  try {
    ReadPlan next = prepare();
    for (bool is_last = false; !is_last;) {
      is_last = taken == places.size();
      const ReadPlan plan = std::move(next);
      const auto meanwhile = [&] {
        if (!is_last) next = prepare();
        if (log_ != nullptr && (misses > 0 || overwrite)) compaction_.compact_some();
      };
      plan.extents.empty() ? meanwhile() : log_->reads().read(plan, frame_bytes_, meanwhile);
    }
    if (create) write_frozen_frames(frames, n);
  } catch (...) {
    release_unused(fresh, used);
    // Undo: rows that were to be read are still in the log, and new rows are not stored.
    for (size_t m = 0; m <= taken && m < places.size(); ++m) {
      const uint32_t frame = frames[places[m]];
      if (frame == kNoFrame) continue;
      FrameInfo& info = cache_.info(frame);
      if (info.position != kNoPosition) directory_->set(info.row, entry_of_position(info.position));
      cache_.release(frame);
      frames[places[m]] = kNoFrame;
    }
    unpin(frames, n);
    throw;
  }
  for (const uint32_t i : places) {
    if (is_stored(entries[i])) continue;
    cache_.set_dirty(frames[i], true);
    ++unwritten_.dirty;
    directory_->set(rows[i], entry_of_frame(frames[i]));
  }
  if (fault_is("stale_read") && late.payload != nullptr) {
    // Seeded bug for the exactness tests: a read returns the initial record.
    initial_(late.id, frame_bytes_, late.payload);
  }
  if (overwrite) return;  // the rows were not read
  stats_.misses += misses;
  stats_.first_touches += places.size() - misses;
  stats_.unique_rows += places.size();
}

}  // namespace bunkbed
