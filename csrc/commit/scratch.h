// Scratch tables use the disk as overflow. None of their rows is made durable.
//
// - One manifest, of epoch 0 and with kReaderFlagScratch, marks the directory. It is written once, like any manifest.
// - The name of each segment file is removed when the file is made. The filesystem frees the bytes when the last
//   descriptor is closed, however the process ends. (Removing files in close() would leave them after a kill.) So the
//   directory of a table that is not open holds no row, and a new table may replace it.
#pragma once

#include <string>

#include "commit/manifests.h"
#include "vfs/vfs.h"

namespace bunkbed {

// Whether the newest commit in this directory is a scratch table's; false when it cannot be read.
bool is_scratch(const Manifests& manifests);
// Removes the files that a scratch table left in a directory. Requires the directory's lock. Other files stay.
void clear_scratch(vfs::Vfs& vfs, const std::string& path);
[[noreturn]] void refuse_scratch(const std::string& name, const std::string& path);

}  // namespace bunkbed
