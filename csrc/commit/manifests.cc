#include "commit/manifests.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/mutex.h"
#include "directory/directory_file.h"

namespace bunkbed {

namespace {

constexpr int kLooks = 20;

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

// A reader may list manifests while the writer collects them. A manifest that is missing when it is opened has a
// successor, which another listing finds.
template <typename Find>
auto look_again(const Find& find) {
  for (int attempt = 0;; ++attempt) {
    try {
      return find();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kNotFound || attempt == kLooks) throw;
    }
  }
}

}  // namespace

std::vector<uint64_t> Manifests::epochs() const {
  if (remembers_) {
    const MutexLock guard(mutex_);
    if (is_listed_) {
      std::vector<uint64_t> found;
      for (const auto& [epoch, facts] : known_) found.push_back(epoch);
      return found;
    }
  }
  return epochs_in(vfs_.list(directory_));
}

// The epochs in a listing of the directory.
std::vector<uint64_t> Manifests::epochs_in(const std::vector<std::string>& names) const {
  std::vector<uint64_t> found;
  for (const std::string& name : names) {
    uint64_t epoch;
    if (parse_name(name, "manifest-", &epoch)) found.push_back(epoch);
  }
  if (found.empty()) {
    // Another process is creating a table there, or was interrupted.
    const bool is_unfinished = std::all_of(names.begin(), names.end(), [](const std::string& name) {
      return name == kLockName || name.rfind(kTemporaryPrefix, 0) == 0;
    });
    if (is_unfinished) {
      throw Error(ErrorKind::kNotFound, "no table at " + directory_ + ": it holds no commit yet" +
                                            (names.empty() ? " (the directory is empty)" : "") +
                                            "; make one with bb.create");
    }
    throw Error(ErrorKind::kFormat, directory_ + " is not a bunkbed table: it holds no manifest");
  }
  std::sort(found.begin(), found.end());
  if (!remembers_) return found;
  const MutexLock guard(mutex_);
  std::erase_if(known_,
                [&](const auto& entry) { return !std::binary_search(found.begin(), found.end(), entry.first); });
  for (const uint64_t epoch : found) known_.try_emplace(epoch);
  is_listed_ = true;
  return found;
}

// After a failure it is unknown which names changed: the next call lists the directory.
void Manifests::forget_listing() const {
  const MutexLock guard(mutex_);
  is_listed_ = false;
}

std::shared_ptr<const Manifests::Facts> Manifests::facts_of(const Manifest& manifest, uint64_t bytes) {
  auto facts = std::make_shared<Facts>(Facts{manifest.keep, manifest.segments, manifest.index_snapshots, bytes});
  std::sort(facts->segments.begin(), facts->segments.end(),
            [](const SegmentEntry& a, const SegmentEntry& b) { return a.segment < b.segment; });
  return facts;
}

std::shared_ptr<const Manifests::Facts> Manifests::facts(uint64_t epoch) const {
  if (remembers_) {
    const MutexLock guard(mutex_);
    const auto found = known_.find(epoch);
    if (found != known_.end() && found->second != nullptr) return found->second;
  }
  uint64_t bytes;
  const Manifest manifest = load(epoch, &bytes);
  auto facts = facts_of(manifest, bytes);
  if (!remembers_) return facts;
  const MutexLock guard(mutex_);
  const auto found = known_.find(epoch);
  if (found != known_.end()) found->second = facts;
  return facts;
}

Manifest Manifests::load(uint64_t epoch) const {
  uint64_t bytes;
  return load(epoch, &bytes);
}

Manifest Manifests::load(uint64_t epoch, uint64_t* num_bytes) const {
  const std::string path = directory_ + "/" + manifest_name(epoch);
  const auto file = vfs_.open(path, false);
  const uint64_t size = file->size();
  *num_bytes = size;
  if (size > (1u << 30)) throw Error(ErrorKind::kCorruption, "manifest " + path + " is too large to be one");
  Bytes bytes(size);
  file->read(bytes.data(), size, 0);
  Manifest manifest = decode_manifest(bytes, path);
  if (manifest.epoch != epoch) {
    throw Error(ErrorKind::kCorruption, "manifest " + path + " holds commit " + std::to_string(manifest.epoch));
  }
  return manifest;
}

Manifest Manifests::load_newest() const {
  return look_again([this] { return load_newest_listed(); });
}

Manifest Manifests::load_newest_listed() const {
  const auto all = epochs();
  try {
    return load(all.back());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kCorruption) throw;
    std::vector<std::string> older;
    for (const uint64_t epoch : all) {
      if (epoch != all.back()) older.push_back(std::to_string(epoch));
    }
    throw Error(ErrorKind::kCorruption,
                std::string(error.what()) + "; " +
                    (older.empty() ? "no older commit remains"
                                   : "older commits remain: " + join(older) + "; to go back to one: bunkbed check '" +
                                         directory_ + "' --repair --fall-back-to EPOCH"));
  }
}

std::vector<Manifests::Snapshot> Manifests::snapshots() const {
  return look_again([this] { return snapshots_listed(); });
}

std::vector<Manifests::Snapshot> Manifests::snapshots_listed() const {
  std::map<std::string, uint64_t> newest;
  for (const uint64_t epoch : epochs()) {
    try {
      const auto manifest = facts(epoch);
      if (!manifest->keep.empty()) newest[manifest->keep] = epoch;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCorruption) throw;  // check() reports it; sound commits can still be opened
    }
  }
  std::vector<Snapshot> found;
  for (const auto& [name, epoch] : newest) found.push_back({name, epoch});
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.epoch < b.epoch; });
  return found;
}

Manifest Manifests::load_snapshot(const std::string& name) const {
  return look_again([&] { return load_snapshot_listed(name); });
}

Manifest Manifests::load_snapshot_listed(const std::string& name) const {
  const std::vector<Snapshot> known = snapshots_listed();
  for (const Snapshot& snapshot : known) {
    if (snapshot.name == name) return load(snapshot.epoch);
  }
  unknown_snapshot(name, known);
}

std::vector<uint64_t> Manifests::epochs_kept_as(const std::string& name) const {
  std::vector<uint64_t> found;
  for (const uint64_t epoch : epochs()) {
    try {
      if (facts(epoch)->keep == name) found.push_back(epoch);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCorruption) throw;  // as in snapshots()
    }
  }
  if (found.empty()) unknown_snapshot(name, snapshots());
  return found;
}

void Manifests::unknown_snapshot(const std::string& name, const std::vector<Snapshot>& known) const {
  std::vector<std::string> names;
  for (const Snapshot& snapshot : known) names.push_back("'" + snapshot.name + "'");
  throw Error(ErrorKind::kInvalid, directory_ + " has no snapshot '" + name + "'; " +
                                       (names.empty() ? "it has none: keep one with commit(keep=\"" + name + "\")"
                                                      : "there are: " + join(names)));
}

void Manifests::write(const Manifest& manifest) const {
  const Bytes bytes = encode_manifest(manifest);
  const std::string name = manifest_name(manifest.epoch);
  const std::string temporary = directory_ + "/" + kTemporaryPrefix + name;
  vfs_.remove(temporary);
  // A manifest is small and goes through the page cache: writes of whole blocks would pad it.
  {
    const auto file = vfs_.create_small(temporary);
    file->write(bytes.data(), bytes.size(), 0);
    failpoint("manifest.written");
    file->sync();
  }
  failpoint("manifest.synced");
  try {
    vfs_.link(temporary, directory_ + "/" + name);
    failpoint("manifest.linked");
    try {
      vfs_.sync_directory(directory_);
    } catch (const Error& error) {
      // The name exists and may not be durable: only a new opening can find out.
      throw Error(ErrorKind::kSync, error.what(), error.error_number(), error.path());
    }
  } catch (...) {
    forget_listing();
    throw;
  }
  if (remembers_) {
    const MutexLock guard(mutex_);
    known_[manifest.epoch] = facts_of(manifest, bytes.size());
  }
  failpoint("manifest.durable");
  try {
    vfs_.remove(temporary);
  } catch (const Error&) {  // the commit is durable; the next writer removes the temporary
  }
}

void Manifests::remove(const std::vector<uint64_t>& epochs) const {
  if (epochs.empty()) return;
  try {
    for (const uint64_t epoch : epochs) vfs_.remove(directory_ + "/" + manifest_name(epoch));
  } catch (...) {
    forget_listing();
    throw;
  }
  {
    const MutexLock guard(mutex_);
    for (const uint64_t epoch : epochs) {
      const auto found = known_.find(epoch);
      if (found == known_.end()) continue;
      if (const Facts* const facts = found->second.get()) {
        for (const SegmentEntry& entry : facts->segments) loose_.segments.push_back(entry.segment);
        for (const IndexSnapshotEntry& index_snapshot : facts->index_snapshots)
          loose_.index_snapshots.push_back(index_snapshot.file);
      } else {
        has_files_ = false;
      }
      known_.erase(found);
    }
  }
  failpoint("collect.manifests");
  vfs_.sync_directory(directory_);
  failpoint("collect.durable");
}

std::map<uint64_t, uint64_t> Manifests::every_segment() const {
  std::map<uint64_t, uint64_t> found;
  for (const std::string& name : vfs_.list(directory_)) {
    uint64_t segment;
    if (parse_name(name, "segment-", &segment)) found[segment] = vfs_.open(directory_ + "/" + name, false)->size();
  }
  return found;
}

// All files that commits up to this one may name.
Manifests::Held Manifests::everything(uint64_t newest) const {
  Held held;
  held.segments = every_segment();
  try {
    held.segments.erase(held.segments.lower_bound(load(newest).next_segment), held.segments.end());
  } catch (const Error&) {  // the newest manifest is the damaged one
  }
  for (const std::string& name : vfs_.list(directory_)) {
    uint64_t number;
    if (!parse_name(name, "manifest-", &number) && !parse_name(name, "directory-", &number)) continue;
    held.other_bytes += vfs_.open(directory_ + "/" + name, false)->size();
  }
  return held;
}

// Calls `call` for segments of `manifest` that `before`, which may be null, does not name with the same length.
template <typename Call>
void Manifests::for_each_new(const Facts* before, const Facts& manifest, const Call& call) {
  size_t at = 0;
  const size_t size = before == nullptr ? 0 : before->segments.size();
  for (const SegmentEntry& entry : manifest.segments) {
    while (at < size && before->segments[at].segment < entry.segment) ++at;
    const bool is_same =
        at < size && before->segments[at].segment == entry.segment && before->segments[at].bytes == entry.bytes;
    if (!is_same) call(entry);
  }
}

Manifests::Held Manifests::collect(const Spared& spared, const std::function<void()>& removed_segment) const {
  bool is_known;
  {
    const MutexLock guard(mutex_);
    is_known = is_listed_ && has_files_ && spared.segments_end != kNoEnd && spared.index_snapshots_end != kNoEnd;
    has_files_ = false;  // until this call succeeds
  }
  std::vector<uint64_t> all;
  if (is_known) {
    all = epochs();
    for (uint64_t number = segments_seen_; number < spared.segments_end; ++number) loose_.segments.push_back(number);
    for (uint64_t number = index_snapshots_seen_; number < spared.index_snapshots_end; ++number)
      loose_.index_snapshots.push_back(number);
  } else {  // files made meanwhile have spared numbers: one listing is enough
    const std::vector<std::string> names = vfs_.list(directory_);
    all = epochs_in(names);
    loose_ = {};
    for (const std::string& name : names) {
      uint64_t number;
      if (parse_name(name, "segment-", &number)) loose_.segments.push_back(number);
      if (parse_name(name, "directory-", &number)) loose_.index_snapshots.push_back(number);
    }
  }
  std::unordered_map<std::string_view, uint64_t> newest_of_name;
  std::vector<std::shared_ptr<const Facts>> manifests;
  for (const uint64_t epoch : all) {
    try {
      manifests.push_back(facts(epoch));
    } catch (const Error&) {
      // A commit is damaged and the files that it names are unknown, so nothing is removed. check() reports the damage.
      return everything(all.back());
    }
    if (!manifests.back()->keep.empty()) newest_of_name[manifests.back()->keep] = epoch;
  }
  std::vector<uint64_t> dropped;
  Held held;
  std::map<uint64_t, uint64_t> index_snapshots;
  const Facts *before = nullptr, *kept_before = nullptr;  // neighbours name nearly the same segments
  for (size_t i = 0; i < all.size(); ++i) {
    const Facts& manifest = *manifests[i];
    const bool is_recent = i + spared.newest >= all.size();
    const bool is_named = !manifest.keep.empty() && newest_of_name[manifest.keep] == all[i];
    const bool is_pinned = spared.pinned.contains(all[i]);
    if (!is_recent && !is_named && !is_pinned) {
      dropped.push_back(all[i]);
      continue;
    }
    for_each_new(before, manifest, [&](const SegmentEntry& entry) {
      held.segments.insert_or_assign(held.segments.end(), entry.segment, entry.bytes);
    });
    before = &manifest;
    if (is_named || spared.kept.contains(all[i]) || i + kMostRecent < all.size()) {
      for_each_new(kept_before, manifest,
                   [&](const SegmentEntry& entry) { held.kept.insert(held.kept.end(), entry.segment); });
      kept_before = &manifest;
    }
    for (const IndexSnapshotEntry& index_snapshot : manifest.index_snapshots)
      index_snapshots[index_snapshot.file] = index_snapshot.bytes;
    held.other_bytes += manifest.bytes;
  }
  // The removal of the manifests must be durable before their segments are removed: otherwise power loss could leave a
  // commit without its segments.
  remove(dropped);
  Files files = std::exchange(loose_, Files());
  const auto sort = [](std::vector<uint64_t>* numbers) {
    std::sort(numbers->begin(), numbers->end());
    numbers->erase(std::unique(numbers->begin(), numbers->end()), numbers->end());
  };
  sort(&files.segments);
  sort(&files.index_snapshots);
  for (const uint64_t number : files.segments) {
    if (number >= spared.segments_end || held.segments.contains(number)) continue;
    if (spared.segments.contains(number)) {
      loose_.segments.push_back(number);
      continue;
    }
    vfs_.remove(directory_ + "/" + segment_name(number));
    failpoint("collect.segment");
    removed_segment();
  }
  for (const uint64_t number : files.index_snapshots) {
    if (number >= spared.index_snapshots_end || index_snapshots.contains(number)) continue;
    if (spared.index_snapshots.contains(number)) {
      loose_.index_snapshots.push_back(number);
      continue;
    }
    vfs_.remove(directory_ + "/" + directory_name(number));
  }
  for (const auto& [number, bytes] : index_snapshots) held.other_bytes += bytes;
  segments_seen_ = spared.segments_end;
  index_snapshots_seen_ = spared.index_snapshots_end;
  const MutexLock guard(mutex_);
  has_files_ = remembers_;
  return held;
}

void Manifests::remove_segments_unnamed_by(const Manifest& manifest) const {
  std::set<uint64_t> named;
  for (const SegmentEntry& segment : manifest.segments) named.insert(segment.segment);
  for (const auto& [segment, bytes] : every_segment()) {
    if (!named.contains(segment)) vfs_.remove(directory_ + "/" + segment_name(segment));
  }
}

void Manifests::remove_temporaries() const {
  for (const std::string& name : vfs_.list(directory_)) {
    if (name.rfind(kTemporaryPrefix, 0) == 0) vfs_.remove(directory_ + "/" + name);
  }
}

}  // namespace bunkbed
