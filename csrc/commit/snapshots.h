// A table's commits as its files tell them, without opening the table: which there are, and letting go of a name.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "format/format.h"
#include "vfs/vfs.h"

namespace bunkbed {

// Every commit that can be read, ascending.
std::vector<Manifest> readable_commits(vfs::Vfs& vfs, const std::string& path);

// Forgets the snapshot `name` and removes what only it held, under the writer's lock. Where the newest commit itself
// carries the name, the same state is committed again without it. Error(kInvalid) listing the names there are.
void drop_snapshot(vfs::Vfs& vfs, const std::string& path, const std::string& name);

// Removes commits that are neither the newest two, nor kept by name, nor in `pinned`, and what only they held, under
// the writer's lock.
void collect_commits(vfs::Vfs& vfs, const std::string& path, const std::set<uint64_t>& pinned);

}  // namespace bunkbed
