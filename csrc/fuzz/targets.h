// What the fuzzers feed: every parser of bytes that come from disk. Each takes any bytes and must end in an Error or in
// a right use; an assertion here ends the process.
//
// A mutation that breaks a checksum would get no further than that. The first byte says how many checksums are mended
// before the rest is parsed, so that both sides of each check are reached.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bunkbed::fuzz {

void manifest(const uint8_t* data, size_t size);
// A segment: header, then the trailer at its end, its index.
void segment(const uint8_t* data, size_t size);
// A directory checkpoint, read into directories of both forms and verified.
void directory(const uint8_t* data, size_t size);
// A table of a manifest and one segment: opened, every row read, checked. data: mending, u16 bytes of the manifest, it,
// the segment.
void table(const uint8_t* data, size_t size);

}  // namespace bunkbed::fuzz
