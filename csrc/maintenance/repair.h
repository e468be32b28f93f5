// Repairs what can be repaired without guessing, and goes back to an older commit only when told which one.
//
// In order, under the writer's lock; power loss after any step leaves a table that opens as before or as repaired:
//   1. the table is checked in full;
//   2. told to fall back: the named commit, if it is sound, is written again as the newest one, under a number no commit
//      ever had;
//   3. commits that cannot be read go, unless the newest is among them and nobody said where to go back to; of those
//      that can be read in part, the superseded ones that neither a name nor a run keeps;
//   4. what then belongs to no commit goes: unfinished commits, segments, directory checkpoints, bytes above the
//      committed lengths.
// Before all that a damaged or missing directory checkpoint gives way to one that says nothing: what it said can be told
// from the segments, and the next opening does so. The commits that name it, snapshots too, stay as they are.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "maintenance/check.h"
#include "vfs/vfs.h"

namespace bunkbed {

struct RepairOptions {
  std::optional<uint64_t> fall_back_to;
  bool through_run = false;     // the run it belongs to asks
  std::set<uint64_t> pinned;    // commits that run's manifests name
  size_t ram_bytes = 256u << 20;
  ShardPlace place;             // of a shard
};

struct RepairedTable {
  CheckedTable table;              // as it is now; problems that remain
  std::vector<std::string> done;   // one line each; empty: nothing was changed
};

// Error(kLocked) while somebody writes the table, Error(kInvalid) when the commit to go back to is not sound; then
// nothing was changed.
RepairedTable repair_table(vfs::Vfs& vfs, const std::string& path, const RepairOptions& options,
                           const CheckProgress& progress);

}  // namespace bunkbed
