// Scratch tables: the disk is their overflow and nothing of them is made durable.
//
// - The directory's one manifest, of epoch 0 and with kReaderFlagScratch, marks it; it is written once, like any other.
// - Segments lose their names as soon as they are made: their bytes go back to the filesystem when the last one who has
//   them open closes them, and that is so whatever ends the process. (Removing files on closing would leave them behind
//   after a kill.) So a directory that nobody has open holds no row, and a new table may take its place.
#pragma once

#include <string>

#include "commit/manifests.h"
#include "vfs/vfs.h"

namespace bunkbed {

// Whether the newest commit in this directory is a scratch table's; false when it cannot be read.
bool is_scratch(const Manifests& manifests);
// Removes what a scratch table left in a directory whose lock the caller holds. Other files stay.
void clear_scratch(vfs::Vfs& vfs, const std::string& path);
[[noreturn]] void refuse_scratch(const std::string& name, const std::string& path);

}  // namespace bunkbed
