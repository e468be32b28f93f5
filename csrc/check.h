// Reads everything a table's commits name and lists what is wrong with it.
#pragma once

#include <string>
#include <vector>

#include "vfs/vfs.h"

namespace bunkbed {

// One line a problem; empty when the table is sound. Error only when `path` is no table at all.
std::vector<std::string> check_table(vfs::Vfs& vfs, const std::string& path);

}  // namespace bunkbed
