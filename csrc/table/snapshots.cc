// Commits that are kept and gone back to.
#include <algorithm>

#include "base/error.h"
#include "base/failpoints.h"
#include "table/table.h"

namespace bunkbed {

std::vector<Manifests::Snapshot> Table::snapshots() {
  const auto guard = lock_.exclusive();
  require_usable();
  if (store_->log() != nullptr) return manifests_.snapshots();
  std::vector<Manifests::Snapshot> found;
  for (const RamSnapshot& snapshot : ram_snapshots_) found.push_back({snapshot.name, snapshot.epoch});
  return found;
}

void Table::drop(const std::string& name) {
  const auto guard = lock_.exclusive();
  require_writable();
  require_durable("snapshots");
  if (store_->log() == nullptr) {
    const size_t before = ram_snapshots_.size();
    std::erase_if(ram_snapshots_, [&name](const RamSnapshot& snapshot) { return snapshot.name == name; });
    if (ram_snapshots_.size() == before) {
      throw Error(ErrorKind::kInvalid, "table '" + name_ + "' has no snapshot '" + name + "'");
    }
    return;
  }
  const std::vector<uint64_t> kept = manifests_.epochs_kept_as(name);
  if (committed_.keep == name) {
    // The newest commit itself carries the name: commit the same state again without it. What was evicted since then
    // lies in segments of an epoch that this commit ends; later commits name them.
    Log* const log = store_->log();
    log->rotate();
    Manifest manifest = committed_;
    manifest.epoch = log->epoch();
    manifest.parent_epoch = committed_.epoch;
    manifest.keep.clear();
    manifest.next_segment = log->next_segment();
    manifest.next_version = log->next_version();
    log->begin_epoch(manifest.epoch + 1, manifest.next_segment, manifest.next_version);
    publish(manifest);
  }
  std::vector<uint64_t> dropped;
  for (const uint64_t epoch : kept) {
    if (!pinned_epochs_.contains(epoch)) dropped.push_back(epoch);
  }
  manifests_.remove(dropped);
  collect_after_commit();
}

// A name used before moves to the new commit.
void Table::keep_in_ram(const std::string& name) {
  RamSnapshot snapshot{name, committed_.epoch, step_, meta_, {}, {}};
  Cache& cache = store_->cache();
  for (uint32_t frame = 0; frame < cache.high_water(); ++frame) {
    if (cache.info(frame).row < 0) continue;
    snapshot.rows.push_back(cache.info(frame).row);
    snapshot.records.insert(snapshot.records.end(), cache.record(frame), cache.record(frame) + payload_bytes_);
  }
  std::erase_if(ram_snapshots_, [&name](const RamSnapshot& old) { return old.name == name; });
  ram_snapshots_.push_back(std::move(snapshot));
}

void Table::rewind_in_ram(const std::string& name, std::optional<uint64_t> epoch) {
  const auto found = std::find_if(ram_snapshots_.begin(), ram_snapshots_.end(), [&](const RamSnapshot& snapshot) {
    return epoch.has_value() ? snapshot.epoch == *epoch : snapshot.name == name;
  });
  if (found == ram_snapshots_.end()) {
    std::string known;
    for (const RamSnapshot& snapshot : ram_snapshots_) {
      known += (known.empty() ? "'" : ", '") + snapshot.name + "' (epoch " + std::to_string(snapshot.epoch) + ")";
    }
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "' has no snapshot " +
                                         (epoch.has_value() ? "of epoch " + std::to_string(*epoch) : "'" + name + "'") +
                                         "; it lives in RAM only, where " +
                                         (known.empty() ? "none is kept" : "these are kept: " + known));
  }
  give_up_above();
  const uint64_t next = committed_.epoch + 1;
  broken_ = "going back to an earlier commit failed";  // unless it succeeds
  drop_store();
  make_store(plan_memory(options_.ram_bytes, payload_bytes_, 1, 1, false), nullptr);
  store_->reserve_rows(found->rows.data(), found->rows.size());
  constexpr size_t kRows = 1024;
  for (size_t begin = 0; begin < found->rows.size(); begin += kRows) {
    const size_t count = std::min(kRows, found->rows.size() - begin);
    frames_.resize(count);
    store_->pin(found->rows.data() + begin, count, true, frames_.data());
    for (size_t i = 0; i < count; ++i) {
      const std::byte* record = found->records.data() + (begin + i) * payload_bytes_;
      std::copy(record, record + payload_bytes_, store_->cache().record(frames_[i]));
    }
    store_->unpin(frames_.data(), count);
  }
  broken_.clear();
  committed_.epoch = next;
  step_ = found->step;
  meta_ = found->meta;
  changed_ = false;
  ++changes_;
}

void Table::rewind(const std::string& name, std::optional<uint64_t> epoch) {
  const auto guard = lock_written_back([this] { return lock_.exclusive(); });
  require_writable();
  require_durable("commits to go back to");
  require_not_in_use();
  if (store_->log() == nullptr) return rewind_in_ram(name, epoch);
  Manifest target;
  if (epoch.has_value()) {
    const auto all = manifests_.epochs();
    if (std::find(all.begin(), all.end(), *epoch) == all.end()) {
      std::string known;
      for (const uint64_t e : all) known += (known.empty() ? "" : ", ") + std::to_string(e);
      throw Error(ErrorKind::kInvalid, "table '" + name_ + "': epoch " + std::to_string(*epoch) +
                                           " is gone; epochs that remain: " + known);
    }
    target = manifests_.load(*epoch);
  } else {
    target = manifests_.load_snapshot(name);
  }
  // The old state becomes the newest commit; numbers of segments, versions and epochs never go back. It is loaded
  // before it is published: a damaged one must not become the newest.
  Manifest manifest = target;
  manifest.epoch = store_->log()->epoch();
  manifest.parent_epoch = target.epoch;
  manifest.keep.clear();
  manifest.optimizer = spec_.optimizer;
  manifest.next_segment = store_->log()->next_segment();
  manifest.next_version = store_->log()->next_version();
  give_up_above();
  drop_store();
  try {
    load(target);
    failpoint("rewind.loaded");
    publish(manifest);
  } catch (const std::exception& error) {
    broken_ = std::string("going back to an earlier commit failed (") + error.what() + ")";
    throw;
  }
  store_->log()->begin_epoch(manifest.epoch + 1, manifest.next_segment, manifest.next_version);
  collect_after_commit();
}

}  // namespace bunkbed
