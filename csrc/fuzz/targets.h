// Fuzz targets: one for each parser of bytes that come from disk. A target takes any bytes and must end in an Error or
// in a valid use. A failed must() ends the process.
//
// Without repair, a wrong checksum would end the parsing of nearly every mutation. The bits of the first byte say which
// checksums are repaired first, so that both sides of each check are reached.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bunkbed::fuzz {

void manifest(const uint8_t* data, size_t size);
// A segment: its header, and the trailer at its end.
void segment(const uint8_t* data, size_t size);
// An index snapshot, read into directories of both forms and verified.
void directory(const uint8_t* data, size_t size);
// A table of a manifest and one segment: opened, up to 40 rows read. data: the bits, u16 length of the manifest, the
// manifest, the segment.
void table(const uint8_t* data, size_t size);

}  // namespace bunkbed::fuzz
