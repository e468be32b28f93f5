// Reads of one segment: its chunks, their indexes and records, all verified. Each call requires the table's lock unless
// its comment says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "log/segment.h"

namespace bunkbed {

class SegmentReader {
 public:
  // Both outlive the reader, which counts its reads in `stats`.
  SegmentReader(const LogLayout& layout, LogStats* stats) : layout_(layout), stats_(stats) {}

  // The chunks of a segment, first to last, with verified trailers. Requires that all chunks are in the file.
  const std::vector<ChunkTrailer>& chunks(Segment& segment);
  // The reads of chunks() and of read_span(), without the table's lock, while the sealed segment stays in the log. Both
  // return the bytes they read. The caller installs the result and counts the bytes under the lock.
  uint64_t find_chunks(const Segment& segment, std::vector<ChunkTrailer>* found) const;
  uint64_t fetch_span(const Segment& segment, uint64_t begin, size_t bytes, Span* span) const;
  void count_read_bytes(uint64_t bytes) { stats_->read_bytes += bytes; }
  // Reads [begin, begin + bytes) of a segment, up to the segment's end, unless `span` holds it already. Then
  // read_index() and read_records() within these bytes read nothing, and need no lock.
  void read_span(Segment& segment, uint64_t begin, size_t bytes, Span* span);
  // read_index() refuses ids from `end` on, because its callers look them up in a directory of that size.
  void set_ids_end(uint64_t end) { ids_end_ = end; }
  // Ids and versions of a chunk, verified. `counts`, unless null, is empty for a chunk of another kind than kCount.
  void read_index(Segment& segment, const ChunkTrailer& chunk, Span* span, std::vector<int64_t>* ids,
                  std::vector<uint64_t>* versions, std::vector<uint64_t>* counts = nullptr);
  // Returns records [from, from + n) of a chunk, verified and stride() bytes apart, valid until `span` is used again.
  const std::byte* read_records(Segment& segment, const ChunkTrailer& chunk, size_t from, size_t n, const int64_t* ids,
                                Span* span);

 private:
  const LogLayout& layout_;
  LogStats* const stats_;
  uint64_t ids_end_ = uint64_t{1} << 63;
};

}  // namespace bunkbed
