#include "log/segment_reader.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "kernels/kernels.h"

namespace bunkbed {

using vfs::kBlockBytes;
using vfs::round_down;
using vfs::round_up;

void SegmentReader::read_span(Segment& segment, uint64_t begin, size_t bytes, Span* span) {
  const uint64_t read = fetch_span(segment, begin, bytes, span);
  if (read > 0) stats_->read_bytes += read;
}

uint64_t SegmentReader::fetch_span(const Segment& segment, uint64_t begin, size_t bytes, Span* span) const {
  const uint64_t from = round_down(begin, kBlockBytes);
  const uint64_t to = std::min<uint64_t>(round_up(begin + bytes, kBlockBytes), segment.bytes);
  if (span->segment == segment.id && span->begin <= from && to <= span->end) return 0;
  if (to <= from) {
    throw Error(ErrorKind::kCorruption,
                "segment " + segment.file->path() + " ends before byte " + std::to_string(begin));
  }
  span->segment = 0;
  if (span->memory.size() < to - from) span->memory = vfs::Buffer(to - from);
  segment.file->read(span->memory.data(), to - from, from);
  span->segment = segment.id;
  span->begin = from;
  span->end = to;
  return to - from;
}

const std::vector<ChunkTrailer>& SegmentReader::chunks(Segment& segment) {
  if (!segment.chunks.empty() || segment.bytes == kSegmentHeaderBytes) return segment.chunks;
  std::vector<ChunkTrailer> found;
  stats_->read_bytes += find_chunks(segment, &found);
  segment.chunks = std::move(found);
  return segment.chunks;
}

uint64_t SegmentReader::find_chunks(const Segment& segment, std::vector<ChunkTrailer>* chunks) const {
  std::vector<ChunkTrailer>& found = *chunks;
  uint64_t read = 0;
  Span span;
  for (uint64_t end = segment.bytes; end > kSegmentHeaderBytes;) {
    read += fetch_span(segment, end - kChunkTrailerBytes, kChunkTrailerBytes, &span);
    const std::byte* bytes = span.memory.data() + (end - kChunkTrailerBytes - span.begin);
    found.push_back(decode_chunk_trailer({bytes, kChunkTrailerBytes}, layout_.uuid, segment.id, end, layout_.stride,
                                         layout_.slots_per_segment, segment.file->path()));
    if (found.back().epoch != segment.epoch) {
      throw Error(ErrorKind::kCorruption, "segment " + segment.file->path() + ": a chunk of commit " +
                                              std::to_string(found.back().epoch) + " in a segment of commit " +
                                              std::to_string(segment.epoch));
    }
    end = found.back().begin;
  }
  std::reverse(found.begin(), found.end());
  return read;
}

void SegmentReader::read_index(Segment& segment, const ChunkTrailer& chunk, Span* span, std::vector<int64_t>* ids,
                               std::vector<uint64_t>* versions, std::vector<uint64_t>* counts) {
  read_span(segment, chunk.index_offset, chunk.index_bytes(), span);
  const std::byte* bytes = span->memory.data() + (chunk.index_offset - span->begin);
  if (kernels().crc32c(0, bytes, chunk.index_bytes()) != chunk.index_crc) {
    throw Error(ErrorKind::kCorruption, "segment " + segment.file->path() + ": the index of the chunk at byte " +
                                            std::to_string(chunk.begin) + " fails its checksum");
  }
  ids->resize(chunk.count);
  versions->resize(chunk.count);
  std::memcpy(ids->data(), bytes, chunk.count * size_t{8});
  std::memcpy(versions->data(), bytes + chunk.count * size_t{8}, chunk.count * size_t{8});
  if (counts != nullptr) {
    counts->resize(chunk.kind == ChunkKind::kCount ? chunk.count : 0);
    if (!counts->empty()) std::memcpy(counts->data(), bytes + chunk.count * size_t{16}, counts->size() * 8);
  }
  const auto stray =
      std::find_if(ids->begin(), ids->end(), [this](int64_t id) { return static_cast<uint64_t>(id) >= ids_end_; });
  if (stray == ids->end()) return;
  throw Error(ErrorKind::kCorruption, "segment " + segment.file->path() + ": the chunk at byte " +
                                          std::to_string(chunk.begin) + " holds id " + std::to_string(*stray) +
                                          ", which this table cannot have");
}

const std::byte* SegmentReader::read_records(Segment& segment, const ChunkTrailer& chunk, size_t from, size_t n,
                                             const int64_t* ids, Span* span) {
  const uint64_t slot = chunk.first_slot + from;
  read_span(segment, slot * layout_.stride, n * layout_.stride, span);
  const std::byte* bytes = span->memory.data() + (slot * layout_.stride - span->begin);
  for (size_t i = 0; i < n; ++i) layout_.verify(ids[from + i], bytes + i * layout_.stride, *segment.file, slot + i);
  return bytes;
}

}  // namespace bunkbed
