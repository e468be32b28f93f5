// An entry in five bytes of memory.
#pragma once

#include <cstring>

#include "directory/directory.h"

namespace bunkbed {

inline constexpr size_t kEntryBytes = 5;

// Reads eight bytes, so the last entry of an array needs three more bytes behind it.
inline Entry load_entry(const std::byte* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof(value));
  return value & ((uint64_t{1} << 40) - 1);
}
inline void store_entry(std::byte* at, Entry entry) { std::memcpy(at, &entry, kEntryBytes); }

}  // namespace bunkbed
