// Readers that move on to new commits. The newest one, as seen from the one the reader is at:
//
//   1. It must be able to follow from it: same table, a later epoch, numbers that went on; every segment that both name
//      is the same file still, at the same length; every other one is no older than the reader's epoch.
//   2. Its new segments are replayed over the directory (replay.h): O(changed rows). Frames of rows that have a new record
//      are given up, be it only a moved one: their versions are not known.
//   3. Nothing may be left in the segments it no longer names, and the rows must be as many as it says.
//
// Where 1 or 3 does not hold - the table went back to an earlier commit, a run took back one that it had not named,
// somebody put other files there - the directory is built anew. What is left undetected by them is right: an id without a
// new record points into a file that the newest commit names, and that record was the highest of all it names but the new
// segments. An id with one points to the highest of these, and they were appended when every segment common to both was in
// the log, so it is the highest of all (replay.h). Should a number of a segment be used twice, as where somebody put files
// there, the files tell them apart.
//
// All of it happens under the table's lock, between two batches.
#include <algorithm>
#include <map>

#include "base/error.h"
#include "directory/replay.h"
#include "table/table.h"

namespace bunkbed {

namespace {

// Step 1, as far as the manifests tell. `added`: the segments that `before` does not name.
bool may_follow(const Manifest& before, const Manifest& after, std::vector<SegmentEntry>* added) {
  if (after.epoch <= before.epoch || after.next_version < before.next_version ||
      after.next_segment < before.next_segment || after.num_rows != before.num_rows || after.fields != before.fields ||
      after.payload_bytes != before.payload_bytes || after.slots_per_segment != before.slots_per_segment) {
    return false;
  }
  std::map<uint64_t, SegmentEntry> known;
  for (const SegmentEntry& entry : before.segments) known[entry.segment] = entry;
  for (const SegmentEntry& entry : after.segments) {
    const auto found = known.find(entry.segment);
    if (found == known.end()) {
      if (entry.epoch < before.epoch) return false;
      added->push_back(entry);
    } else if (found->second.epoch != entry.epoch || found->second.bytes != entry.bytes) {
      return false;
    }
  }
  return true;
}

std::string move_failed(const std::exception& error) {
  return std::string("moving to a newer commit failed (") + error.what() + "); refresh() tries again";
}

}  // namespace

// False: build the directory anew; it may be half way between the two commits. Error(kNotFound): a new segment was
// collected meanwhile, nothing was changed.
bool Table::replay_onto(const Manifest& newest) {
  std::vector<SegmentEntry> added;
  if (!may_follow(committed_, newest, &added)) return false;
  Log* const log = store_->log();
  std::set<uint64_t> dropped;
  for (const auto& [id, segment] : log->segments()) dropped.insert(id);
  for (const SegmentEntry& entry : newest.segments) {
    if (dropped.erase(entry.segment) == 0) continue;
    Segment* const segment = log->find_segment(entry.segment);
    if (!segment->file->is_at(segment->file->path())) return false;
  }
  try {
    log->adopt(added);
  } catch (const std::exception& error) {
    for (const SegmentEntry& entry : added) log->forget_segment(entry.segment, false);
    const auto* const known = dynamic_cast<const Error*>(&error);
    if (known == nullptr || known->kind() == ErrorKind::kNotFound) throw;  // no memory: the reader stays where it is
    return false;
  }
  std::vector<Segment*> segments;
  for (const SegmentEntry& entry : added) segments.push_back(log->find_segment(entry.segment));
  drop_scratch();  // its room is lent to the versions
  try {
    Cache& cache = store_->cache();
    const auto reserve = [this](const int64_t* ids, size_t n) { store_->reserve_rows(ids, n); };
    const auto give_up = [&](Entry before) {
      uint64_t position = position_of(before);
      if (is_frame(before)) {
        position = cache.info(frame_of(before)).position;
        cache.release(frame_of(before));
      }
      --log->segment_of(position).live;
    };
    indexed_records_ += Replay{log, &store_->directory(), spec_.num_rows, newest.next_version,
                               store_->plan().scratch_bytes, reserve, give_up}
                            .run(segments);
  } catch (const std::exception&) {
    return false;  // whatever it is, building anew meets it again, or does not need it
  }
  for (const uint64_t id : dropped) {
    if (log->find_segment(id)->live > 0) return false;
  }
  if (store_->directory().stored_rows() != newest.stored_rows) return false;
  for (const uint64_t id : dropped) log->forget_segment(id, false);
  log->begin_epoch(newest.epoch + 1, newest.next_segment, newest.next_version);
  committed_ = newest;
  step_ = newest.step;
  meta_ = newest.meta;
  ++changes_;
  return true;
}

uint64_t Table::refresh() {
  const auto guard = lock_.exclusive(TableLock::Commits::kMayRun);
  // Nothing but a refresh that failed breaks a reader, and another one makes it whole.
  if (closed_ || options_.writable) require_usable();
  if (options_.writable) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "' is open for writing and always up to date; refresh() is for readers");
  }
  if (!options_.snapshot.empty()) return committed_.epoch;  // a snapshot stands still
  bool is_moving = false;  // what was there before is gone
  for (int attempt = 0;; ++attempt) {
    try {
      const Manifest newest = manifests_.load_newest();
      if (newest.uuid != uuid_) {
        throw Error(ErrorKind::kFormat, "table '" + name_ + "': another table has taken its place; open it again");
      }
      if (store_ != nullptr) {
        // A run may take back a commit that it had not named, and the next one then has its number.
        if (newest.epoch == committed_.epoch && encode_manifest(newest) == encode_manifest(committed_)) {
          return committed_.epoch;
        }
        if (replay_onto(newest)) return committed_.epoch;
      }
      is_moving = true;
      drop_store();  // both at once would be twice the budget
      load(newest);
      broken_.clear();
      return committed_.epoch;
    } catch (const Error& error) {
      if (is_moving) drop_store();  // whatever there is of it is half a table
      if (error.kind() == ErrorKind::kNotFound && attempt < 20) continue;  // collected meanwhile: look again
      if (is_moving) broken_ = move_failed(error);
      throw;
    } catch (const std::exception& error) {  // no memory, say
      if (is_moving) {
        drop_store();
        broken_ = move_failed(error);
      }
      throw;
    }
  }
}

}  // namespace bunkbed
