// Cursors: how far the consumers of a table's change feed have come (feed/changes.h). A consumer writes its cursor, a
// file of a few bytes, without the writer's lock. The writer keeps the tombstones that a cursor still needs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "format/format.h"
#include "vfs/vfs.h"

namespace bunkbed {

inline constexpr const char* kCursorPrefix = "cursor-";

struct Cursor {
  uint64_t epoch = 0;         // the consumer has every change of this commit and those before it
  uint64_t next_version = 0;  // of that commit
  // The consumer has not read everything yet: both are of the commit that was the newest when it came. It may have some
  // rows of later commits, from a first read that ended early.
  bool is_new = false;
};

Bytes encode_cursor(const Uuid& uuid, const Cursor& cursor);
// Error(kCorruption) when the bytes are no cursor of this table.
Cursor decode_cursor(std::span<const std::byte> bytes, const Uuid& uuid, const std::string& path);

// Nothing where there is no such cursor.
std::optional<Cursor> load_cursor(vfs::Vfs& vfs, const std::string& directory, const std::string& name,
                                  const Uuid& uuid);
// The lowest version that a cursor of the table needs; 0 when one cannot be read.
uint64_t oldest_cursor_version(vfs::Vfs& vfs, const std::string& directory, const Uuid& uuid);

}  // namespace bunkbed
