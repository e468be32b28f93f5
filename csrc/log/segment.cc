#include "log/segment.h"

#include <utility>

#include "base/error.h"

namespace bunkbed {

void LogLayout::verify(int64_t id, const std::byte* record, const vfs::File& file, uint64_t slot) const {
  if (record_crc(crc_seed, id, record, payload_bytes) == get_record_crc(record + payload_bytes)) return;
  throw Error(ErrorKind::kCorruption, "segment " + file.path() + ": record " + std::to_string(slot) + " of id " +
                                          std::to_string(id) +
                                          " fails its checksum; the table's other rows can be read");
}

Segment& Segments::at(const LogLayout& layout, uint64_t position) const {
  Segment* const segment = find(position / layout.slots_per_segment);
  if (segment == nullptr) {
    throw Error(ErrorKind::kCorruption, "in " + layout.directory + ": record number " + std::to_string(position) +
                                            " is in a segment the table does not have");
  }
  return *segment;
}

void Segments::add(std::unique_ptr<Segment> segment) {
  Segment* const added = segment.get();
  all_[added->id] = std::move(segment);  // first: it owns the segment, and erase() looks there
  by_id_[added->id] = added;
}

void Segments::erase(uint64_t id) {
  by_id_.erase(id);
  all_.erase(id);
}

void Segments::clear() {
  by_id_.clear();
  all_.clear();
}

}  // namespace bunkbed
