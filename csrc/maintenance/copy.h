// Copies one commit of a table to another directory, segment by segment. Skips segments that are there already.
//
// In order; power loss or a failure before step 4 has ended leaves the destination at its former commit:
//   1. the commit's manifest is read and every segment it names is opened, so that its writer can continue and collect;
//   2. the destination is locked. It is empty, or its newest commit was made by a copy of this table and by no writer
//      since (a writer's commit clears the flag that marks a copy);
//   3. each missing segment is linked, where both directories are on one filesystem, or else copied under a temporary
//      name, synced and linked. Then it is read from the destination, and every checksum is verified;
//   4. the directory is synced, and the manifest is written as for a commit: from here on the copy exists;
//   5. files that no commit of the destination names are removed.
//
// A segment that a manifest names never grows, so both tables can share one file: a writer appends to new segments, and
// compaction removes names. A copy has its table's uuid, because every checksum includes it; only its path differs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "maintenance/check.h"
#include "vfs/vfs.h"

namespace bunkbed {

struct CopyOptions {
  std::string snapshot;           // a kept name; empty: the newest commit
  std::optional<uint64_t> epoch;  // or exactly this one
  bool for_run = false;           // part of the copy of a run, which collects later
  bool may_link = true;
};

struct CopyResult {
  uint64_t epoch = 0;
  uint64_t linked_bytes = 0, copied_bytes = 0;
  uint64_t present_bytes = 0;  // of segments that the destination had already
};

CopyResult copy_table(vfs::Vfs& vfs, const std::string& from, const std::string& to, const CopyOptions& options,
                      const CheckProgress& progress);

}  // namespace bunkbed
