#include "jobs/file_collector.h"

#include <utility>

#include "format/format.h"

namespace bunkbed {

void FileCollector::set_pinned(std::set<uint64_t> epochs, std::set<uint64_t> kept) {
  pinned_ = std::move(epochs);
  kept_ = std::move(kept);
}

std::set<uint64_t> FileCollector::pinned_now() const {
  std::set<uint64_t> pinned = pinned_;
  // A run collects after its own manifest is durable. Until the run has pinned the commits that it names, all stay.
  if (table_.spec.belongs_to_run && pinned.empty()) {
    for (const uint64_t epoch : table_.manifests.epochs()) pinned.insert(epoch);
  }
  return pinned;
}

Manifests::Spared FileCollector::spared(size_t newest) const {
  Manifests::Spared spared;
  spared.newest = newest;
  spared.pinned = pinned_now();
  spared.kept = kept_;
  // A later manifest may exist, not durable, whose write was reported to have failed. So the last commit is pinned,
  // too.
  spared.pinned.insert(table_.committed.epoch);
  for (const auto& [id, segment] : table_.store->log()->segments()) spared.segments.insert(id);
  spared.segments_end = table_.store->log()->next_segment();
  spared.index_snapshots = index_.numbers_in_use();
  spared.index_snapshots_end = index_.next_number();
  return spared;
}

void FileCollector::collect(size_t newest) {
  table_.store->disk().set_held(table_.manifests.collect(spared(newest)));
  index_.count_bytes();
}

void FileCollector::try_collect() {
  try {
    collect();
  } catch (const Error&) {
  }
}

void FileCollector::collect_in_slices(size_t newest, Pace pace) {
  Manifests::Spared spared;
  {
    const auto guard = table_.lock.slice();
    spared = this->spared(newest);
    if (table_.store->disk().is_limited()) pace = Pace::kAtOnce;
  }
  Manifests::Held held = table_.manifests.collect(spared, [this, pace] {
    if (pace == Pace::kAtOnce) return;
    auto guard = table_.lock.slice();
    table_.lock.pause_commit(guard, kPause);
  });
  const auto guard = table_.lock.slice();
  for (const uint64_t id : spared.segments) {
    // The segment was emptied meanwhile. The collection spared it because the log used it. The log kept its file
    // because a commit named it, and that commit is now removed.
    if (held.segments.contains(id) || table_.store->log()->find_segment(id) != nullptr) continue;
    table_.vfs.remove(table_.path + "/" + segment_name(id));
  }
  table_.store->disk().set_held(std::move(held));
  index_.count_bytes();
}

void FileCollector::collect_leftovers() {
  if (table_.spec.belongs_to_run && pinned_.empty()) return;
  try {
    table_.manifests.collect({.pinned = pinned_});
  } catch (const std::exception&) {  // out of memory, for example; the next opening tries again
  }
}

}  // namespace bunkbed
