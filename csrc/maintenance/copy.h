// Copies one commit of a table to another directory, segment by segment, and only what is not there yet.
//
// In order; power loss or a failure after any step leaves the destination at its former commit:
//   1. the commit's manifest is read and every segment it names is opened, so that its writer may go on and collect;
//   2. the destination is locked; it is empty, or the newest of its commits is one that a copy of this table put there
//      and nobody has written since (a writer's commit clears the flag that says so);
//   3. each segment that is not there is linked, where both lie on one filesystem, or else copied under a temporary
//      name, synced and linked. Then it is read where it now lies, and every checksum is verified;
//   4. the directory is synced, and the manifest written as a commit is: from here on the copy is there;
//   5. what no commit of the destination names goes.
//
// A segment that a manifest names never grows, so both tables can share one file: a writer appends to new segments, and
// compaction removes names. A copy has its table's uuid, because every checksum has: it is told apart by where it lies.
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
  bool for_run = false;           // the copy belongs to a run's copy, which collects later
  bool may_link = true;
};

struct CopyResult {
  uint64_t epoch = 0;
  uint64_t linked_bytes = 0, copied_bytes = 0;
  uint64_t present_bytes = 0;  // of segments that were there already
};

CopyResult copy_table(vfs::Vfs& vfs, const std::string& from, const std::string& to, const CopyOptions& options,
                      const CheckProgress& progress);

}  // namespace bunkbed
