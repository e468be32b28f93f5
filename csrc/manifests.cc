#include "manifests.h"

#include <algorithm>
#include <map>
#include <memory>

#include "error.h"
#include "failpoints.h"

namespace bunkbed {

namespace {

constexpr int kLooks = 20;

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

// A reader lists manifests beside a writer that collects them: one that is gone when it is opened has a successor, which
// another listing names.
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
  std::vector<uint64_t> found;
  bool is_empty = true;
  for (const std::string& name : vfs_.list(directory_)) {
    uint64_t epoch;
    if (parse_name(name, "manifest-", &epoch)) found.push_back(epoch);
    is_empty = false;
  }
  if (found.empty()) {
    throw Error(ErrorKind::kFormat, directory_ + " is not a bunkbed table: it holds no manifest" +
                                        (is_empty ? " (the directory is empty)" : ""));
  }
  std::sort(found.begin(), found.end());
  return found;
}

Manifest Manifests::load(uint64_t epoch) const {
  const std::string path = directory_ + "/" + manifest_name(epoch);
  const auto file = vfs_.open(path, false);
  const uint64_t size = file->size();
  if (size > (1u << 30)) throw Error(ErrorKind::kCorruption, "manifest " + path + " is too large to be one");
  Bytes bytes(size);
  file->read(bytes.data(), size, 0);
  Manifest manifest = decode_manifest(bytes, path);
  if (manifest.epoch != epoch) {
    throw Error(ErrorKind::kCorruption, "manifest " + path + " holds epoch " + std::to_string(manifest.epoch));
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
                                   : "older commits remain: epoch " + join(older) +
                                         "; to go back to one: bunkbed check '" + directory_ +
                                         "' --repair --fall-back-to EPOCH"));
  }
}

std::vector<Manifests::Snapshot> Manifests::snapshots() const {
  return look_again([this] { return snapshots_listed(); });
}

std::vector<Manifests::Snapshot> Manifests::snapshots_listed() const {
  std::map<std::string, uint64_t> newest;
  for (const uint64_t epoch : epochs()) {
    try {
      const Manifest manifest = load(epoch);
      if (!manifest.keep.empty()) newest[manifest.keep] = epoch;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCorruption) throw;  // check() reports it; the sound ones can still be opened
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
  std::vector<std::string> names;
  for (const Snapshot& snapshot : snapshots_listed()) {
    if (snapshot.name == name) return load(snapshot.epoch);
    names.push_back("'" + snapshot.name + "'");
  }
  throw Error(ErrorKind::kInvalid, directory_ + " has no snapshot '" + name + "'; " +
                                       (names.empty() ? "it has none: keep one with commit(keep=\"" + name + "\")"
                                                      : "there are: " + join(names)));
}

void Manifests::write(const Manifest& manifest) const {
  const Bytes bytes = encode_manifest(manifest);
  const std::string name = manifest_name(manifest.epoch);
  const std::string temporary = directory_ + "/" + kTemporaryPrefix + name;
  vfs_.remove(temporary);
  // Whole blocks would pad a manifest; it is small and goes through the page cache.
  {
    const auto file = vfs_.create_small(temporary);
    file->write(bytes.data(), bytes.size(), 0);
    failpoint("manifest.written");
    file->sync();
  }
  failpoint("manifest.synced");
  vfs_.link(temporary, directory_ + "/" + name);
  failpoint("manifest.linked");
  try {
    vfs_.sync_directory(directory_);
  } catch (const Error& error) {
    // The name is there and may or may not survive: only a new opening can tell.
    throw Error(ErrorKind::kSync, error.what(), error.error_number(), error.path());
  }
  failpoint("manifest.durable");
  try {
    vfs_.remove(temporary);
  } catch (const Error&) {  // the commit is durable; the next writer removes the temporary
  }
}

void Manifests::remove(const std::vector<uint64_t>& epochs) const {
  if (epochs.empty()) return;
  for (const uint64_t epoch : epochs) vfs_.remove(directory_ + "/" + manifest_name(epoch));
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

// What commits up to this one may name.
Manifests::Held Manifests::everything(uint64_t newest) const {
  Held held;
  held.segments = every_segment();
  try {
    held.segments.erase(held.segments.lower_bound(load(newest).next_segment), held.segments.end());
  } catch (const Error&) {  // it is the damaged one
  }
  for (const std::string& name : vfs_.list(directory_)) {
    uint64_t number;
    if (!parse_name(name, "manifest-", &number) && !parse_name(name, "directory-", &number)) continue;
    held.other_bytes += vfs_.open(directory_ + "/" + name, false)->size();
  }
  return held;
}

Manifests::Held Manifests::collect(const Spared& spared) const {
  const auto all = epochs();
  std::map<std::string, uint64_t> newest_of_name;
  std::map<uint64_t, Manifest> manifests;
  for (const uint64_t epoch : all) {
    try {
      manifests[epoch] = load(epoch);
    } catch (const Error&) {
      // An old commit is damaged: nobody knows what it names, so nothing goes. check() reports it.
      return everything(all.back());
    }
    if (!manifests[epoch].keep.empty()) newest_of_name[manifests[epoch].keep] = epoch;
  }
  std::vector<uint64_t> dropped;
  Held held;
  std::map<uint64_t, uint64_t> checkpoints;
  for (size_t i = 0; i < all.size(); ++i) {
    const Manifest& manifest = manifests[all[i]];
    const bool is_recent = i + spared.newest >= all.size();
    const bool is_named = !manifest.keep.empty() && newest_of_name[manifest.keep] == all[i];
    const bool is_pinned = spared.pinned.contains(all[i]);
    if (!is_recent && !is_named && !is_pinned) {
      dropped.push_back(all[i]);
      continue;
    }
    for (const SegmentEntry& segment : manifest.segments) {
      held.segments[segment.segment] = segment.bytes;
      if (is_named || spared.kept.contains(all[i]) || i + kMostRecent < all.size()) held.kept.insert(segment.segment);
    }
    for (const CheckpointEntry& checkpoint : manifest.checkpoints) checkpoints[checkpoint.file] = checkpoint.bytes;
    held.other_bytes += encode_manifest(manifest).size();
  }
  // The names must be gone for good before the segments they name are: otherwise power loss could leave a commit
  // whose segments are missing.
  remove(dropped);
  for (const std::string& name : vfs_.list(directory_)) {
    uint64_t number;
    if (parse_name(name, "segment-", &number) && number < spared.segments_end && !held.segments.contains(number) &&
        !spared.segments.contains(number)) {
      vfs_.remove(directory_ + "/" + name);
      failpoint("collect.segment");
    } else if (parse_name(name, "directory-", &number) && number < spared.checkpoints_end &&
               !checkpoints.contains(number) && !spared.checkpoints.contains(number)) {
      vfs_.remove(directory_ + "/" + name);
    }
  }
  for (const auto& [number, bytes] : checkpoints) held.other_bytes += bytes;
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
