// Repairs what can be repaired without guessing. Goes back to an older commit only when the caller names the commit.
//
// In order, under the writer's lock; power loss after any step leaves a table that opens as before or as repaired:
//   1. the table is checked in full;
//   2. with fall_back_to: the named commit, if it is sound, is written again as the newest one, under a number that no
//      commit ever had;
//   3. a damaged or missing index snapshot is replaced by a file without entries. The next opening reads the
//      segments instead. The commits that name it, snapshots too, stay as they are;
//   4. commits that cannot be read, or only in part, are removed, except those that a run names and readable ones that
//      a name keeps. Outside a run no commit is removed while the newest is damaged;
//   5. bytes that belong to no commit are removed: unfinished commits, segments, index snapshots, bytes above the
//      committed lengths.
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
  bool through_run = false;   // the table's run calls
  std::set<uint64_t> pinned;  // commits that the run's manifests name
  size_t ram_bytes = 256u << 20;
  ShardPlace place;  // of a shard
};

struct RepairedTable {
  CheckedTable table;             // after the repair, with the remaining problems
  std::vector<std::string> done;  // one line each; empty: nothing was changed
};

// Error(kLocked) while a writer has the table open, Error(kInvalid) when the commit to go back to is not sound; then
// nothing was changed.
RepairedTable repair_table(vfs::Vfs& vfs, const std::string& path, const RepairOptions& options,
                           const CheckProgress& progress);

}  // namespace bunkbed
