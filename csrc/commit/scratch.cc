#include "commit/scratch.h"

#include <vector>

#include "base/error.h"

namespace bunkbed {

bool is_scratch(const Manifests& manifests) {
  try {
    return (manifests.load_newest().reader_flags & kReaderFlagScratch) != 0;
  } catch (const Error&) {
    return false;  // opening the table reports the error
  }
}

void clear_scratch(vfs::Vfs& vfs, const std::string& path) {
  const std::vector<std::string> entries = vfs.list(path);
  const auto remove_named = [&](const char* prefix) {
    uint64_t number;
    for (const std::string& entry : entries) {
      if (parse_name(entry, prefix, &number)) vfs.remove(path + "/" + entry);
    }
  };
  // The manifest is removed last: after a failure it still marks the directory as a scratch table's.
  remove_named("segment-");
  remove_named("manifest-");
}

void refuse_scratch(const std::string& name, const std::string& path) {
  throw Error(ErrorKind::kFormat,
              "table '" + name + "' at " + path +
                  " is a scratch table: its rows are seen by the process that made it and gone once that closes it; "
                  "create(path, durability=\"scratch\") there begins an empty one");
}

}  // namespace bunkbed
