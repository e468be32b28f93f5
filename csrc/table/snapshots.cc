#include "table/snapshots.h"

#include <algorithm>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/fault.h"

namespace bunkbed {

std::vector<Manifests::Snapshot> Snapshots::list() {
  const auto guard = table_.lock.exclusive();
  table_.require_usable();
  if (table_.store->log() != nullptr) return table_.manifests.snapshots();
  return ram_.list();
}

void Snapshots::drop(const std::string& name) {
  const auto guard = table_.lock.exclusive();
  table_.require_writable();
  table_.require_durable("snapshots");
  if (table_.store->log() == nullptr) {
    ram_.drop(name);
    return;
  }
  const std::vector<uint64_t> kept = table_.manifests.epochs_kept_as(name);
  if (table_.committed.keep == name) {
    // The newest commit has the name: commit the same state again without it. Rows that were evicted since then are in
    // segments of an epoch that this commit ends; later commits name these segments.
    Log* const log = table_.store->log();
    log->rotate();
    Manifest manifest = table_.committed;
    manifest.epoch = log->epoch();
    manifest.parent_epoch = table_.committed.epoch;
    manifest.keep.clear();
    manifest.next_segment = log->next_segment();
    manifest.next_version = log->next_version();
    log->begin_epoch(manifest.epoch + 1, manifest.next_segment, manifest.next_version);
    committer_.publish(manifest);
  }
  std::vector<uint64_t> dropped;
  for (const uint64_t epoch : kept) {
    if (!collector_.is_pinned(epoch)) dropped.push_back(epoch);
  }
  table_.manifests.remove(dropped);
  collector_.try_collect();
}

void Snapshots::rewind_in_ram(const std::string& name, std::optional<uint64_t> epoch) {
  const RamSnapshot& found = ram_.find(name, epoch);
  device_.give_up_all();
  const uint64_t next = table_.committed.epoch + 1;
  table_.broken = "going back to an earlier commit failed";  // unless it succeeds
  loader_.drop_store();
  loader_.make_store_in_ram();
  table_.store->reserve(table_.store->new_rows(found.rows.data(), found.rows.size()));
  constexpr size_t kRows = 1024;
  for (size_t begin = 0; begin < found.rows.size(); begin += kRows) {
    const size_t count = std::min(kRows, found.rows.size() - begin);
    table_.scratch.frames.resize(count);
    table_.store->pin(found.rows.data() + begin, count, true, table_.scratch.frames.data());
    for (size_t i = 0; i < count; ++i) {
      const std::byte* record = found.records.data() + (begin + i) * table_.payload_bytes;
      std::copy(record, record + table_.payload_bytes, table_.store->cache().record(table_.scratch.frames[i]));
    }
    table_.store->unpin(table_.scratch.frames.data(), count);
  }
  table_.store->counts().set_since(found.counts_since);
  if (!fault_is("counts_not_rewound")) {
    table_.store->reserve(table_.store->new_rows(found.counted.data(), found.counted.size()));
    table_.store->counts().set(found.counted.data(), found.counts.data(), found.counts.size());
  }
  table_.broken.clear();
  table_.committed.epoch = next;
  table_.step = found.step;
  table_.event_clock = found.clock;
  table_.meta = found.meta;
  table_.is_changed = false;
  ++table_.changes;
}

Manifest Snapshots::target_of(const std::string& name, std::optional<uint64_t> epoch) const {
  if (!epoch.has_value()) return table_.manifests.load_snapshot(name);
  const auto all = table_.manifests.epochs();
  if (std::find(all.begin(), all.end(), *epoch) != all.end()) return table_.manifests.load(*epoch);
  std::string known;
  for (const uint64_t e : all) known += (known.empty() ? "" : ", ") + std::to_string(e);
  throw Error(ErrorKind::kInvalid, "table '" + table_.name + "': commit " + std::to_string(*epoch) +
                                       " is gone; commits that remain: " + known);
}

void Snapshots::rewind(const std::string& name, std::optional<uint64_t> epoch) {
  const auto guard = device_.lock_written_back([this]() NO_THREAD_SAFETY_ANALYSIS { return table_.lock.exclusive(); });
  table_.require_writable();
  table_.require_durable("commits to go back to");
  device_.require_not_in_use();
  if (table_.store->log() == nullptr) return rewind_in_ram(name, epoch);
  const Manifest target = target_of(name, epoch);
  // The old state becomes the newest commit. Numbers of segments, versions and epochs never decrease. It is loaded
  // before it is published, because a damaged commit must not become the newest.
  Manifest manifest = target;
  manifest.epoch = table_.store->log()->epoch();
  manifest.parent_epoch = target.epoch;
  manifest.keep.clear();
  manifest.optimizer = table_.spec.optimizer;
  manifest.retention = table_.spec.retention;
  manifest.next_segment = table_.store->log()->next_segment();
  manifest.next_version = table_.store->log()->next_version();
  // All are kept, because a consumer of the change feed may come at any time. Of very many, the two oldest become one,
  // which refuses some commits that are ancestors.
  constexpr size_t kMostRewinds = 1000;
  manifest.rewinds.push_back({target.epoch, manifest.epoch});
  if (manifest.rewinds.size() > kMostRewinds) {
    manifest.rewinds[1].to = manifest.rewinds[0].to;
    manifest.rewinds.erase(manifest.rewinds.begin());
  }
  device_.give_up_all();
  loader_.drop_store();
  try {
    loader_.load(target);
    failpoint("rewind.loaded");
    committer_.publish(manifest);
  } catch (const std::exception& error) {
    table_.broken = std::string("going back to an earlier commit failed (") + error.what() + ")";
    throw;
  }
  table_.store->log()->begin_epoch(manifest.epoch + 1, manifest.next_segment, manifest.next_version);
  collector_.try_collect();
}

}  // namespace bunkbed
