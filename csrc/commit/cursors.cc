#include "commit/cursors.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"
#include "kernels/kernels.h"

namespace bunkbed {

namespace {

constexpr char kCursorMagic[] = "BBEDCUR\n";
constexpr uint32_t kCursorVersion = 1;
constexpr size_t kCursorBytes = 52;

}  // namespace

Bytes encode_cursor(const Uuid& uuid, const Cursor& cursor) {
  Bytes bytes(kCursorBytes);
  std::byte* const out = bytes.data();
  std::memcpy(out, kCursorMagic, 8);
  store(out + 8, kCursorVersion);
  store<uint32_t>(out + 12, cursor.is_new ? 1 : 0);
  std::memcpy(out + 16, uuid.data(), uuid.size());
  store(out + 32, cursor.epoch);
  store(out + 40, cursor.next_version);
  store(out + 48, kernels().crc32c(0, out, 48));
  return bytes;
}

Cursor decode_cursor(std::span<const std::byte> bytes, const Uuid& uuid, const std::string& path) {
  const auto refuse = [&](const std::string& why) -> void {
    throw Error(ErrorKind::kCorruption,
                "cursor " + path + " " + why + "; remove the file, and read the table from the start");
  };
  if (bytes.size() != kCursorBytes || std::memcmp(bytes.data(), kCursorMagic, 8) != 0 ||
      load<uint32_t>(bytes.data() + 48) != kernels().crc32c(0, bytes.data(), 48)) {
    refuse("is damaged");
  }
  if (const auto version = load<uint32_t>(bytes.data() + 8); version != kCursorVersion) {
    throw Error(ErrorKind::kFormat, "cursor " + path + " has format version " + std::to_string(version) +
                                        ", this release reads version " + std::to_string(kCursorVersion));
  }
  if (std::memcmp(bytes.data() + 16, uuid.data(), uuid.size()) != 0) refuse("belongs to another table");
  return {load<uint64_t>(bytes.data() + 32), load<uint64_t>(bytes.data() + 40), load<uint32_t>(bytes.data() + 12) != 0};
}

std::optional<Cursor> load_cursor(vfs::Vfs& vfs, const std::string& directory, const std::string& name,
                                  const Uuid& uuid) {
  const std::string path = directory + "/" + kCursorPrefix + name;
  Bytes bytes;
  try {
    const auto file = vfs.open(path, false);
    bytes.resize(std::min<uint64_t>(file->size(), 2 * kCursorBytes));
    file->read(bytes.data(), bytes.size(), 0);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kNotFound) return std::nullopt;
    throw;
  }
  return decode_cursor(bytes, uuid, path);
}

uint64_t oldest_cursor_version(vfs::Vfs& vfs, const std::string& directory, const Uuid& uuid) {
  uint64_t oldest = ~uint64_t{0};
  try {
    for (const std::string& file : vfs.list(directory)) {
      if (!file.starts_with(kCursorPrefix) || file.ends_with(".tmp")) continue;
      const auto cursor = load_cursor(vfs, directory, file.substr(std::strlen(kCursorPrefix)), uuid);
      if (cursor.has_value()) oldest = std::min(oldest, cursor->next_version);  // its consumer may have removed it
    }
  } catch (const Error&) {
    return 0;
  }
  return oldest;
}

}  // namespace bunkbed
