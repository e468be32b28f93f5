// Lists, drops and collects a table's commits from its files, without opening the table.
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

// Drops the snapshot `name` and removes files that only it named, under the writer's lock. Where the newest commit has
// the name, commits the same state again without it. For an unknown name Error(kInvalid) lists the existing ones.
void drop_snapshot(vfs::Vfs& vfs, const std::string& path, const std::string& name);

// Removes commits that are neither the newest two, nor kept by name, nor in `pinned`, and files that only they named,
// under the writer's lock.
void collect_commits(vfs::Vfs& vfs, const std::string& path, const std::set<uint64_t>& pinned);

}  // namespace bunkbed
