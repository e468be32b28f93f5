// Numbers in files, at any alignment, little-endian like all supported processors (csrc/bindings/module.cc).
#pragma once

#include <cstddef>
#include <cstring>

namespace bunkbed {

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

template <typename T>
void store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof(value));
}

}  // namespace bunkbed
