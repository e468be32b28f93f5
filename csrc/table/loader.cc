#include "table/loader.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "base/failpoints.h"
#include "commit/cursors.h"
#include "directory/replay.h"
#include "format/record.h"

namespace bunkbed {

std::unique_ptr<Directory> Loader::make_directory(const MemoryPlan& plan, size_t frame_bytes) const {
  if (table_.spec.num_rows < 0) return make_hashed_directory();
  const auto num_rows = static_cast<uint64_t>(table_.spec.num_rows);
  return is_flat(table_.spec, plan, frame_bytes) ? make_flat_directory(num_rows) : make_bounded_directory(num_rows);
}

void Loader::make_store(const MemoryPlan& plan, std::unique_ptr<Log> log) {
  const bool is_reader = !table_.options.writable;
  const size_t frame_bytes = is_reader ? table_.weight_bytes : table_.payload_bytes;
  // Reserves address space for the most frames that set_ram() could allow. Memory is allocated with use.
  const size_t cost = Cache::frame_cost(frame_bytes);
  const size_t physical =
      static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGE_SIZE));
  size_t frames = std::max(physical, plan.total_bytes) / cost;
  if (table_.spec.num_rows >= 0) frames = std::min(frames, static_cast<size_t>(table_.spec.num_rows));
  std::unique_ptr<Directory> directory = make_directory(plan, frame_bytes);
  prefetcher_.reset();
  table_.store = std::make_unique<Store>(table_.name, frame_bytes, std::max(frames, kMinFrames), std::move(directory),
                                         std::move(log), plan);
  // The most commits without a name: the last one; in a run, those of its last two commits and the one under way.
  table_.store->disk().set_limit(table_.options.disk_bytes,
                                 table_.spec.is_scratch       ? 0
                                 : table_.spec.belongs_to_run ? 3
                                                              : 1,
                                 static_cast<uint64_t>(table_.spec.num_rows));  // -1: the largest number
  table_.store->disk().reserve_held(device_.max_rows());
  table_.store->set_initial_record([table = &table_](int64_t row, size_t record_bytes, std::byte* record) {
    table->initial_record(row, record_bytes, record);
  });
}

void Loader::start_in_ram(const Uuid& uuid) {
  table_.uuid = uuid;
  table_.fields = fields_of(table_.spec);
  table_.payload_bytes = payload_of(table_.spec);
  table_.weight_bytes = field_bytes(table_.fields[0]);
  table_.committed.epoch = 0;
  table_.event_clock = table_.spec.retention.first_time();
  table_.define(&table_.committed);
  make_store_in_ram();
}

void Loader::make_store_in_ram() {
  make_store(plan_memory(table_.options.ram_bytes, table_.payload_bytes, 1, kAssumedReadUnit, false), nullptr);
}

void Loader::load(const Manifest& manifest) {
  // The fields must be those of this release's optimizer. Otherwise an update would write to wrong offsets.
  if (manifest.fields != fields_of(table_.spec) || manifest.payload_bytes != payload_of(manifest) ||
      manifest.retention.is_set() != table_.has_usage) {
    throw Error(ErrorKind::kFormat, "table '" + table_.name + "': its record holds fields this release does not know");
  }
  if (table_.fields.empty()) {  // set once, because other threads read them without the lock
    table_.uuid = manifest.uuid;
    table_.fields = manifest.fields;
    table_.payload_bytes = manifest.payload_bytes;
    table_.weight_bytes = field_bytes(table_.fields[0]);
  }
  table_.read_unit = table_.vfs.open(table_.path + "/" + manifest_name(manifest.epoch), true)->read_alignment();
  const MemoryPlan plan =
      plan_memory(table_.options.ram_bytes, table_.payload_bytes, manifest.slots_per_segment, table_.read_unit, true);
  auto log = std::make_unique<Log>(table_.vfs, table_.path, table_.uuid, table_.payload_bytes,
                                   manifest.slots_per_segment, plan.log);
  if (table_.spec.is_scratch) {
    log->make_nameless();
  } else if (table_.options.writable) {
    log->close_unused();
  }
  if (table_.spec.num_rows >= 0) log->reader().set_ids_end(static_cast<uint64_t>(table_.spec.num_rows));
  if (table_.options.read_gap) log->reads().set_gap(*table_.options.read_gap);
  log->adopt(manifest.segments);
  failpoint("open.adopted");
  log->begin_epoch(manifest.epoch + 1, manifest.next_segment, manifest.next_version);
  make_store(plan, std::move(log));
  table_.store->compactor().set_deletions_from(manifest.deletions_from);
  table_.store->counts().set_since(manifest.counts_since);
  table_.store->compactor().set_kept_tombstones([this]() NO_THREAD_SAFETY_ANALYSIS {
    return Compactor::KeptTombstones{.epoch = index_.tombstones_needed_from(),
                                     .version = oldest_cursor_version(table_.vfs, table_.path, table_.uuid)};
  });
  // The frames are empty while the directory is rebuilt, so half of their budget serves as scratch.
  const size_t scratch =
      plan.scratch_bytes + table_.store->cache().capacity() * Cache::frame_cost(table_.store->frame_bytes()) / 2;
  index_.load(manifest, scratch);
  failpoint("open.rebuilt");
  if (table_.store->directory().stored_rows() != manifest.stored_rows) {
    throw Error(ErrorKind::kCorruption, "table '" + table_.name + "': its segments hold " +
                                            std::to_string(table_.store->directory().stored_rows()) +
                                            " rows, the commit names " + std::to_string(manifest.stored_rows));
  }
  if (table_.options.writable && table_.store->directory().counted_rows() != manifest.counted_ids) {
    throw Error(ErrorKind::kCorruption, "table '" + table_.name + "': its segments hold counts of " +
                                            std::to_string(table_.store->directory().counted_rows()) +
                                            " ids that are not stored, the commit says " +
                                            std::to_string(manifest.counted_ids));
  }
  table_.store->apply(plan);
  if (table_.options.writable) table_.manifests.remember();
  table_.committed = manifest;
  if (!table_.options.writable) table_.spec.retention = manifest.retention;
  table_.step = manifest.step;
  table_.event_clock = manifest.clock;
  table_.meta = manifest.meta;
  table_.is_changed = false;
  ++table_.changes;
  if (!table_.options.writable) return;
  if (table_.store->disk().is_limited()) remove_leftovers();
  collector_.collect();
  if (!table_.store->disk().has_bytes(0)) collector_.collect(1);
}

// Reserves the numbers of segments that a crashed session left, which collect() then removes. The numbers are not used
// again in this session: a reader may have seen a commit with these segments that a run took back.
void Loader::remove_leftovers() {
  uint64_t next = table_.store->log()->next_segment();
  for (const std::string& name : table_.vfs.list(table_.path)) {
    uint64_t number;
    if (parse_name(name, "segment-", &number)) next = std::max(next, number + 1);
  }
  table_.store->log()->begin_epoch(table_.store->log()->epoch(), next, table_.store->log()->next_version());
}

void Loader::drop_store() {
  index_.forget_store();
  prefetcher_.reset();
  table_.store.reset();
}

namespace {

// Step 1, the part that needs only the manifests. `added`: the segments that `before` does not name.
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

// Returns false when the directory, which may be half way between the two commits, must be built again. Throws
// Error(kNotFound), with nothing changed, when a new segment was collected meanwhile.
bool Loader::replay_onto(const Manifest& newest) {
  std::vector<SegmentEntry> added;
  if (!may_follow(table_.committed, newest, &added)) return false;
  Log* const log = table_.store->log();
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
    if (known == nullptr || known->kind() == ErrorKind::kNotFound) throw;  // the reader stays at its commit
    return false;
  }
  std::vector<Segment*> segments;
  for (const SegmentEntry& entry : added) segments.push_back(log->find_segment(entry.segment));
  table_.scratch = {};  // its memory is used for the versions
  try {
    Cache& cache = table_.store->cache();
    const auto reserve = [this](const int64_t* ids, size_t n)
                             REQUIRES(table_.lock) { table_.store->reserve(table_.store->new_rows(ids, n)); };
    const auto give_up = [&](Entry before) {
      uint64_t position = position_of(before);
      if (is_frame(before)) {
        position = cache.info(frame_of(before)).position;
        cache.release(frame_of(before));
      }
      --log->segment_of(position).live;
    };
    const Replay::InUse in_use{reserve, give_up};
    const Replay replay{.log = log,
                        .directory = &table_.store->directory(),
                        .num_rows = table_.spec.num_rows,
                        .versions_end = newest.next_version,
                        .scratch_bytes = table_.store->plan().scratch_bytes,
                        .counts = {.are_kept = false},
                        .in_use = &in_use};
    table_.counts.indexed_records += replay.run(segments).entries;
  } catch (const std::exception&) {
    return false;  // building the directory again reports the error, or does not meet it
  }
  for (const uint64_t id : dropped) {
    if (log->find_segment(id)->live > 0) return false;
  }
  if (table_.store->directory().stored_rows() != newest.stored_rows) return false;
  for (const uint64_t id : dropped) log->forget_segment(id, false);
  log->begin_epoch(newest.epoch + 1, newest.next_segment, newest.next_version);
  table_.committed = newest;
  table_.spec.retention = newest.retention;
  table_.step = newest.step;
  table_.event_clock = newest.clock;
  table_.meta = newest.meta;
  ++table_.changes;
  return true;
}

void Loader::finish_opening() {
  disk_.require_limit();
  if (table_.options.writable) table_.store->compaction().merge_segments();
}

Manifest Loader::commit_to_follow(std::optional<uint64_t> to) const {
  if (to.has_value()) return table_.manifests.load(*to);
  const std::string& snapshot = table_.options.snapshot;
  return snapshot.empty() ? table_.manifests.load_newest() : table_.manifests.load_snapshot(snapshot);
}

uint64_t Loader::refresh(std::optional<uint64_t> to) {
  const auto guard = table_.lock.exclusive(TableLock::Commits::kMayRun);
  // Only a failed refresh breaks a reader, and a successful one repairs it.
  if (table_.is_closed || table_.options.writable) table_.require_usable();
  if (table_.options.writable) {
    throw Error(ErrorKind::kInvalid,
                "table '" + table_.name + "' is open for writing and always up to date; refresh() is for readers");
  }
  bool is_moving = false;  // the old store was destroyed
  for (int attempt = 0;; ++attempt) {
    try {
      const Manifest newest = commit_to_follow(to);
      if (newest.uuid != table_.uuid) {
        throw Error(ErrorKind::kFormat,
                    "table '" + table_.name + "': another table has taken its place; open it again");
      }
      if (table_.store != nullptr) {
        // A run may take back a commit that it had not named, and the next one then has its number.
        if (newest.epoch == table_.committed.epoch && encode_manifest(newest) == encode_manifest(table_.committed)) {
          return table_.committed.epoch;
        }
        if (replay_onto(newest)) return table_.committed.epoch;
      }
      is_moving = true;
      drop_store();  // two stores would take twice the budget
      load(newest);
      table_.broken.clear();
      return table_.committed.epoch;
    } catch (const Error& error) {
      if (is_moving) drop_store();  // it may be half loaded
      // It was collected: try again. A commit that was named does not come back.
      if (error.kind() == ErrorKind::kNotFound && !to.has_value() && attempt < 20) continue;
      if (is_moving) table_.broken = move_failed(error);
      throw;
    } catch (const std::exception& error) {  // for example std::bad_alloc
      if (is_moving) {
        drop_store();
        table_.broken = move_failed(error);
      }
      throw;
    }
  }
}

}  // namespace bunkbed
