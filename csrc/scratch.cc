#include "scratch.h"

#include "error.h"

namespace bunkbed {

bool is_scratch(const Manifests& manifests) {
  try {
    return (manifests.load_newest().reader_flags & kReaderFlagScratch) != 0;
  } catch (const Error&) {
    return false;  // whoever opens it is told
  }
}

void clear_scratch(vfs::Vfs& vfs, const std::string& path) {
  for (const std::string& entry : vfs.list(path)) {
    uint64_t number;
    const bool is_ours = parse_name(entry, "manifest-", &number) || parse_name(entry, "segment-", &number) ||
                         entry.rfind(kTemporaryPrefix, 0) == 0;
    if (is_ours) vfs.remove(path + "/" + entry);
  }
}

void refuse_scratch(const std::string& name, const std::string& path) {
  throw Error(ErrorKind::kFormat,
              "table '" + name + "' at " + path +
                  " is a scratch table: its rows are seen by the process that made it and gone once that closes it; "
                  "create(path, durability=\"scratch\") there begins an empty one");
}

}  // namespace bunkbed
