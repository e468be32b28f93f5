// CRC-32C (Castagnoli): reflected polynomial 0x82f63b78, initial and final xor 0xffffffff (RFC 3720, B.4).
// `crc` is the result over the bytes before, 0 at the start. Both functions return the same value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bunkbed {

uint32_t crc32c_software(uint32_t crc, const void* data, size_t n);
uint32_t crc32c_hardware(uint32_t crc, const void* data, size_t n);  // only where crc32c_has_hardware()
bool crc32c_has_hardware();

}  // namespace bunkbed
