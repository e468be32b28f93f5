// The commits in a table's directory: finds, writes and collects them. Power loss during a write leaves either the old
// or the new commit.
//
// Writing (docs/design/engine.md, rule 14d): (1) the bytes go to a temporary name; (2) fdatasync; (3) link() to the
// commit's name, which refuses to replace; (4) fsync of the directory; (5) the temporary name is removed. Before (1)
// Log::sync() has made the segments durable that the manifest names.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "format/format.h"
#include "vfs/vfs.h"

namespace bunkbed {

class Manifests {
 public:
  // Most commits that exist at once without being kept: those of a run's last two commits, and one under way.
  static constexpr size_t kMostRecent = 3;

  Manifests(vfs::Vfs& vfs, std::string directory) : vfs_(vfs), directory_(std::move(directory)) {}

  // Only for the writer, which alone changes manifests: from now on each is read once, the directory is listed once.
  void remember() { remembers_ = true; }

  // Epochs with a manifest, ascending. Error(kFormat) when the directory is no table.
  std::vector<uint64_t> epochs() const;
  Manifest load(uint64_t epoch) const;
  // The newest commit. Damage is an error that names the remaining older commits; it never falls back silently.
  Manifest load_newest() const;
  // The newest commit kept under `name`; Error(kInvalid) lists the existing names.
  Manifest load_snapshot(const std::string& name) const;
  void write(const Manifest& manifest) const;
  // Removes commits; the removal is durable on return.
  void remove(const std::vector<uint64_t>& epochs) const;

  struct Snapshot {
    std::string name;
    uint64_t epoch;
  };
  std::vector<Snapshot> snapshots() const;
  // Commits kept under this name, ascending. Where there is none, Error(kInvalid) lists the existing names.
  std::vector<uint64_t> epochs_kept_as(const std::string& name) const;

  static constexpr uint64_t kNoEnd = ~uint64_t{0};
  // What collect() keeps in addition to the newest commits and the kept ones.
  struct Spared {
    std::set<uint64_t> pinned = {};  // commits
    std::set<uint64_t> kept = {};    // pinned commits that stay until they are dropped
    std::set<uint64_t> segments = {};
    uint64_t segments_end = kNoEnd;  // segments made meanwhile have this number or a higher one
    std::set<uint64_t> index_snapshots = {};
    uint64_t index_snapshots_end = kNoEnd;
    size_t newest = 2;  // commits
  };
  // What the remaining commits hold on disk.
  struct Held {
    std::map<uint64_t, uint64_t> segments = {};  // number -> bytes
    std::set<uint64_t> kept = {};  // segments of kept commits, and of any older than the newest kMostRecent
    uint64_t other_bytes = 0;      // manifests and index snapshots
  };
  // Removes every commit except the newest, the kept and the pinned ones; then every segment file and directory
  // index snapshot that no remaining commit names and that is not spared. A writer lists the directory once. After that
  // it examines files that no commit named the last time, files of removed commits, and numbers given out since.
  // `removed_segment` is called after each segment. collect() and remove() must not run concurrently.
  Held collect(const Spared& spared, const std::function<void()>& removed_segment = [] {}) const;
  // Only for a seeded bug: removes segments that `manifest`, which is not written yet, does not name.
  void remove_segments_unnamed_by(const Manifest& manifest) const;
  // Removes files of unfinished commits.
  void remove_temporaries() const;

  const std::string& directory() const { return directory_; }

 private:
  // The parts of a manifest that collect() and snapshots() need.
  struct Facts {
    std::string keep;
    std::vector<SegmentEntry> segments;  // by number
    std::vector<IndexSnapshotEntry> index_snapshots;
    uint64_t bytes = 0;
  };
  static std::shared_ptr<const Facts> facts_of(const Manifest& manifest, uint64_t bytes);
  std::shared_ptr<const Facts> facts(uint64_t epoch) const;
  Manifest load(uint64_t epoch, uint64_t* bytes) const;
  [[noreturn]] void unknown_snapshot(const std::string& name, const std::vector<Snapshot>& known) const;
  std::vector<uint64_t> epochs_in(const std::vector<std::string>& names) const;
  void forget_listing() const;
  template <typename Call>
  static void for_each_new(const Facts* before, const Facts& manifest, const Call& call);
  // From one listing of the directory.
  Manifest load_newest_listed() const;
  Manifest load_snapshot_listed(const std::string& name) const;
  std::vector<Snapshot> snapshots_listed() const;
  std::map<uint64_t, uint64_t> every_segment() const;
  Held everything(uint64_t newest) const;

  vfs::Vfs& vfs_;
  std::string directory_;
  bool remembers_ = false;
  mutable Mutex mutex_;
  mutable std::map<uint64_t, std::shared_ptr<const Facts>> known_ GUARDED_BY(mutex_);  // null: not read yet
  mutable bool is_listed_ GUARDED_BY(mutex_) = false;  // known_ has every epoch there is
  mutable bool has_files_ GUARDED_BY(mutex_) = false;  // the members below, of collect() and remove(), are valid
  struct Files {
    std::vector<uint64_t> segments = {};
    std::vector<uint64_t> index_snapshots = {};
  };
  mutable Files loose_;  // spared by the last collect() and named by no commit, or named by commits removed since
  mutable uint64_t segments_seen_ = 0, index_snapshots_seen_ = 0;  // the ends of what the last collect() saw
};

}  // namespace bunkbed
