// The commits of a table's directory: which exist, how one is written so that power loss leaves either the old or
// the new one, and what may be removed.
//
// Writing (ENGINE rule 14d): (1) the bytes go to a temporary name; (2) fdatasync; (3) link() to the commit's name,
// which refuses to replace; (4) fsync of the directory; (5) the temporary name goes. The segments a manifest names
// are durable before (1): Log::sync() saw to that.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "format.h"
#include "vfs/vfs.h"

namespace bunkbed {

class Manifests {
 public:
  Manifests(vfs::Vfs& vfs, std::string directory) : vfs_(vfs), directory_(std::move(directory)) {}

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

  // Removes every commit but the newest two, the named ones and those of `pinned`; then every segment file that no
  // remaining commit names and `in_use` does not hold, as far as its number is below `segments_end`: what is made
  // meanwhile stays. The same goes for directory checkpoints. Returns the segments that remaining commits name.
  std::set<uint64_t> collect(const std::set<uint64_t>& pinned, const std::set<uint64_t>& in_use,
                             uint64_t segments_end = ~uint64_t{0},
                             const std::set<uint64_t>& checkpoints_in_use = {},
                             uint64_t checkpoints_end = ~uint64_t{0}) const;
  // A seeded bug's, and of no other use: what a commit that is not there yet will not name.
  void remove_segments_unnamed_by(const Manifest& manifest) const;
  // Files of an unfinished commit.
  void remove_temporaries() const;

  const std::string& directory() const { return directory_; }

 private:
  std::set<uint64_t> every_segment() const;

  vfs::Vfs& vfs_;
  std::string directory_;
};

}  // namespace bunkbed
