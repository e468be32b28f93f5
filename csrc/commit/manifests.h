// The commits of a table's directory: which exist, how one is written so that power loss leaves either the old or
// the new one, and what may be removed.
//
// Writing (docs/design/engine.md, rule 14d): (1) the bytes go to a temporary name; (2) fdatasync; (3) link() to the
// commit's name, which refuses to replace; (4) fsync of the directory; (5) the temporary name goes. The segments a
// manifest names are durable before (1): Log::sync() saw to that.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "format/format.h"
#include "vfs/vfs.h"

namespace bunkbed {

class Manifests {
 public:
  // Commits that nobody asked to keep and that may be there at once: those of a run's last two, and one on its way.
  static constexpr size_t kMostRecent = 3;

  Manifests(vfs::Vfs& vfs, std::string directory) : vfs_(vfs), directory_(std::move(directory)) {}

  // For the writer, who alone changes them: each is read once from now on, and the directory is listed once for them.
  void remember() { remembers_ = true; }

  // Epochs with a manifest, ascending. Error(kFormat) when the directory is no table.
  std::vector<uint64_t> epochs() const;
  Manifest load(uint64_t epoch) const;
  // The newest one. Damage is an error that names the older commits that remain: never a silent roll-back.
  Manifest load_newest() const;
  // The newest commit kept under `name`; Error(kInvalid) listing the names there are.
  Manifest load_snapshot(const std::string& name) const;
  void write(const Manifest& manifest) const;
  // Removes commits for good; durable when it returns.
  void remove(const std::vector<uint64_t>& epochs) const;

  struct Snapshot {
    std::string name;
    uint64_t epoch;
  };
  std::vector<Snapshot> snapshots() const;
  // Commits that carry this name, ascending; Error(kInvalid) listing the names there are when none does.
  std::vector<uint64_t> epochs_kept_as(const std::string& name) const;

  static constexpr uint64_t kNoEnd = ~uint64_t{0};
  // What a collection leaves alone beside the newest commits and the named ones.
  struct Spared {
    std::set<uint64_t> pinned = {};  // commits
    std::set<uint64_t> kept = {};    // of these, those that stay until somebody drops them
    std::set<uint64_t> segments = {};
    uint64_t segments_end = kNoEnd;  // what is made meanwhile has this number or a higher one
    std::set<uint64_t> checkpoints = {};
    uint64_t checkpoints_end = kNoEnd;
    size_t newest = 2;  // commits
  };
  // What the commits that remain hold on disk.
  struct Held {
    std::map<uint64_t, uint64_t> segments = {};  // number -> bytes
    std::set<uint64_t> kept = {};  // of them, those of kept commits, and of pinned ones beyond the newest kMostRecent
    uint64_t other_bytes = 0;      // manifests and directory checkpoints
  };
  // Removes every commit but the newest, the named and the pinned ones; then every segment file and directory checkpoint
  // that no remaining commit names and that is not spared.
  // The writer's looks at the directory once; then it knows which files may go: those that no commit named the last time,
  // those of the commits that go, and those of numbers given out since. One at a time, and remove() too.
  Held collect(const Spared& spared) const;
  // A seeded bug's, and of no other use: what a commit that is not there yet will not name.
  void remove_segments_unnamed_by(const Manifest& manifest) const;
  // Files of an unfinished commit.
  void remove_temporaries() const;

  const std::string& directory() const { return directory_; }

 private:
  // What collecting and snapshots need of a manifest.
  struct Facts {
    std::string keep;
    std::vector<SegmentEntry> segments;  // by number
    std::vector<CheckpointEntry> checkpoints;
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
  // By one listing.
  Manifest load_newest_listed() const;
  Manifest load_snapshot_listed(const std::string& name) const;
  std::vector<Snapshot> snapshots_listed() const;
  std::map<uint64_t, uint64_t> every_segment() const;
  Held everything(uint64_t newest) const;

  vfs::Vfs& vfs_;
  std::string directory_;
  bool remembers_ = false;
  mutable std::mutex mutex_;  // guards known_, is_listed_ and has_files_
  mutable std::map<uint64_t, std::shared_ptr<const Facts>> known_;  // null: not read yet
  mutable bool is_listed_ = false;  // known_ has every epoch there is
  mutable bool has_files_ = false;  // what follows, collect()'s own, is true
  struct Files {
    std::vector<uint64_t> segments = {};
    std::vector<uint64_t> checkpoints = {};
  };
  mutable Files loose_;  // spared by the last collect() and named by no commit, or named by commits that went since
  mutable uint64_t segments_seen_ = 0, checkpoints_seen_ = 0;  // its ends of what is spared
};

}  // namespace bunkbed
