// Commits, snapshots, rewinds, readers. A commit, in order (ENGINE rule 14):
//
//   1. every dirty record is appended to the log and every chunk is in its file;
//   2. the touched segments are synced, and the directory when a segment is new; the segments are sealed, so bytes
//      below a committed length never change again;
//   3. the manifest is written under a temporary name, synced, linked under its epoch, the directory synced: from
//      here on the commit is durable;
//   4. what no remaining manifest names is removed.
//
// A failure before 3 leaves the last commit as it was and the rows in memory as they are. A failed sync leaves the
// kernel's idea of what is clean unknown: the table then refuses writes until it is reopened.
#include <algorithm>

#include "error.h"
#include "table.h"

namespace bunkbed {

Manifest Table::manifest_now(uint64_t epoch) const {
  Manifest manifest = committed_;
  Log* log = store_->log();
  manifest.epoch = epoch;
  manifest.parent_epoch = committed_.epoch;
  manifest.step = step_;
  manifest.next_version = log->next_version();
  manifest.next_segment = log->next_segment();
  manifest.optimizer = spec_.optimizer;
  manifest.stored_rows = store_->directory().stored_rows();
  manifest.keep.clear();
  manifest.meta = meta_;
  manifest.segments.clear();
  for (const auto& [id, segment] : log->segments()) {
    if (segment->live > 0) manifest.segments.push_back({segment->id, segment->epoch, segment->bytes});
  }
  return manifest;
}

void Table::publish(const Manifest& manifest) {
  try {
    manifests_.write(manifest);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kSync) read_only_reason_ = error.what();
    throw;
  }
  committed_ = manifest;
}

uint64_t Table::commit(const std::optional<std::string>& meta, const std::string& keep) {
  const std::lock_guard guard(mutex_);
  require_writable();
  Log* log = store_->log();
  if (log == nullptr) {
    if (!keep.empty()) {
      throw Error(ErrorKind::kInvalid, "table '" + name_ +
                                           "' lives in RAM only and cannot keep snapshot '" + keep + "'; give it a path");
    }
    if (meta.has_value()) meta_ = *meta;
    changed_ = false;
    ++commits_;
    return ++committed_.epoch;
  }
  const bool same_meta = !meta.has_value() || *meta == meta_;
  if (!changed_ && same_meta && keep.empty() && committed_.epoch > 0) return committed_.epoch;

  store_->flush();
  store_->compact_some();
  log->drain();
  try {
    log->sync_and_seal();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kSync) read_only_reason_ = error.what();
    throw;
  }
  const std::string old_meta = meta_;
  if (meta.has_value()) meta_ = *meta;
  Manifest manifest = manifest_now(committed_.epoch + 1);
  manifest.keep = keep;
  try {
    publish(manifest);
  } catch (...) {
    meta_ = old_meta;
    throw;
  }
  log->begin_epoch(committed_.epoch + 1, log->next_segment(), log->next_version());
  changed_ = false;
  ++commits_;
  collect_locked();
  return committed_.epoch;
}

void Table::collect_locked() {
  // A run collects after its own manifest is durable: until then the commits that manifest names must stay.
  if (spec_.belongs_to_run && pinned_epochs_.empty()) return;
  std::set<uint64_t> in_use;
  for (const auto& [id, segment] : store_->log()->segments()) in_use.insert(id);
  store_->set_named_segments(manifests_.collect(pinned_epochs_, in_use));
}

void Table::set_pinned_epochs(std::set<uint64_t> epochs) {
  const std::lock_guard guard(mutex_);
  pinned_epochs_ = std::move(epochs);
}

void Table::collect() {
  const std::lock_guard guard(mutex_);
  require_writable();
  if (store_->log() != nullptr) collect_locked();
}

uint64_t Table::compact() {
  const std::lock_guard guard(mutex_);
  require_writable();
  ++changes_;
  return store_->compact_all();
}

std::vector<Manifests::Snapshot> Table::snapshots() {
  const std::lock_guard guard(mutex_);
  require_usable();
  if (store_->log() == nullptr) return {};
  return manifests_.snapshots();
}

void Table::drop(const std::string& name) {
  const std::lock_guard guard(mutex_);
  require_writable();
  if (store_->log() == nullptr) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "' lives in RAM only and has no snapshots");
  }
  (void)manifests_.load_snapshot(name);  // an unknown name is an error that lists the known ones
  if (committed_.keep == name) {
    // The newest commit itself carries the name: commit the same state again without it.
    Manifest manifest = committed_;
    manifest.epoch = committed_.epoch + 1;
    manifest.parent_epoch = committed_.epoch;
    manifest.keep.clear();
    manifest.next_segment = store_->log()->next_segment();
    manifest.next_version = store_->log()->next_version();
    publish(manifest);
    store_->log()->begin_epoch(committed_.epoch + 1, store_->log()->next_segment(), store_->log()->next_version());
  }
  std::vector<uint64_t> dropped;
  for (const uint64_t epoch : manifests_.epochs()) {
    if (epoch != committed_.epoch && !pinned_epochs_.contains(epoch) && manifests_.load(epoch).keep == name) {
      dropped.push_back(epoch);
    }
  }
  manifests_.remove(dropped);
  collect_locked();
}

void Table::rewind(const std::string& name, std::optional<uint64_t> epoch) {
  const std::lock_guard guard(mutex_);
  require_writable();
  if (store_->log() == nullptr) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "' lives in RAM only and has no commit to go back to; give it a path");
  }
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
  // The old state becomes the newest commit; numbers of segments, versions and epochs never go back.
  Manifest manifest = target;
  manifest.epoch = committed_.epoch + 1;
  manifest.parent_epoch = target.epoch;
  manifest.keep.clear();
  manifest.optimizer = spec_.optimizer;
  manifest.next_segment = store_->log()->next_segment();
  manifest.next_version = store_->log()->next_version();
  publish(manifest);
  store_.reset();
  try {
    load(manifest);
  } catch (const std::exception& error) {
    broken_ = std::string("going back to an earlier commit failed (") + error.what() + ")";
    throw;
  }
}

uint64_t Table::refresh() {
  const std::lock_guard guard(mutex_);
  require_usable();
  if (options_.writable) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "' is open for writing and always up to date; refresh() is for readers");
  }
  if (!options_.snapshot.empty()) return committed_.epoch;  // a snapshot stands still
  for (int attempt = 0;; ++attempt) {
    try {
      const Manifest newest = manifests_.load_newest();
      if (newest.epoch == committed_.epoch) return committed_.epoch;
      // The old epoch stays in use until the new one is complete.
      std::unique_ptr<Store> old = std::move(store_);
      try {
        load(newest);
      } catch (...) {
        store_ = std::move(old);
        throw;
      }
      return committed_.epoch;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kNotFound || attempt >= 20) throw;  // collected meanwhile: look again
    }
  }
}

}  // namespace bunkbed
