#include "log/log.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/memory.h"
#include "base/workers.h"
#include "kernels/kernels.h"
#include "kernels/stream_copy.h"

namespace bunkbed {

using vfs::kBlockBytes;
using vfs::round_down;
using vfs::round_up;

namespace {

// Sizes for batched appends: the bytes that are worth another thread, and the bytes assembled in the first-level cache
// before a store that bypasses the caches. A buffer whose write has just ended is in no cache, and plain stores would
// first load its lines: 250 ns instead of 135 for a record of 768 bytes, measured while chunks were written.
constexpr size_t kThreadBytes = 32u << 10;
constexpr size_t kStagedBytes = 8u << 10;
constexpr size_t kAheadBytes = 6u << 10;  // payloads are scattered in memory: how far ahead they are prefetched

}  // namespace

Log::Log(vfs::Vfs& vfs, std::string directory, const Uuid& uuid, size_t payload_bytes, uint64_t slots_per_segment,
         const LogMemory& memory)
    : vfs_(vfs),
      layout_{.directory = std::move(directory),
              .uuid = uuid,
              .crc_seed = record_crc_seed(uuid),
              .payload_bytes = payload_bytes,
              .stride = record_stride(payload_bytes),
              .slots_per_segment = slots_per_segment},
      memory_(memory),
      buffers_(memory.num_chunks, memory.chunk_bytes) {
  vfs::current_io();  // reports a wrong BUNKBED_IO now, not at the first read
  reads_.resize(memory_.read_slice_bytes, memory_.num_read_slices);
}

Log::~Log() {
  try {
    abandon();
  } catch (...) {  // uncommitted bytes need not be durable
  }
}

void Log::adopt(const std::vector<SegmentEntry>& entries) {
  vfs::Buffer block(kBlockBytes);
  for (const SegmentEntry& entry : entries) {
    auto segment = std::make_unique<Segment>();
    segment->id = entry.segment;
    segment->epoch = entry.epoch;
    segment->bytes = entry.bytes;
    const std::string path = layout_.directory + "/" + segment_name(entry.segment);
    segment->file = std::make_shared<vfs::CachedFile>(vfs_, vfs_.open(path, true));
    const uint64_t size = segment->file->size();
    if (size < entry.bytes) {
      throw Error(ErrorKind::kCorruption, "segment " + path + " is " + std::to_string(size) +
                                              " bytes long, the commit names " + std::to_string(entry.bytes));
    }
    segment->file->read(block.data(), kBlockBytes, 0);
    const SegmentHeader header = decode_segment_header({block.data(), kBlockBytes}, path);
    if (header.uuid != layout_.uuid || header.segment != entry.segment || header.epoch != entry.epoch ||
        header.stride != layout_.stride) {
      throw Error(ErrorKind::kCorruption, "segment " + path + " belongs to another table or commit");
    }
    if (closes_unused_) segment->file->let_close();
    segments_.add(std::move(segment));
  }
}

void Log::begin_epoch(uint64_t epoch, uint64_t next_segment, uint64_t next_version) {
  running_ = {epoch, next_version, nullptr, nullptr};
  next_segment_ = next_segment;
}

void Log::set_memory(const LogMemory& memory) {
  drain();
  running_.chunk = nullptr;  // at most an empty one: drain() closed the others
  buffers_.reset(memory.num_chunks, memory.chunk_bytes);
  memory_ = memory;
  reads_.resize(memory_.read_slice_bytes, memory_.num_read_slices);
}

// ---- Appends -------------------------------------------------------------------------------------------------

size_t Log::chunk_capacity(uint64_t begin) const {
  const uint64_t first_slot = (begin + layout_.stride - 1) / layout_.stride;
  const uint64_t limit = std::min<uint64_t>(begin + memory_.chunk_bytes,
                                            round_down(layout_.slots_per_segment * layout_.stride, kBlockBytes));
  const uint64_t overhead = first_slot * layout_.stride + kChunkTrailerBytes + 8;
  if (limit < overhead + layout_.stride + 16) return 0;
  return (limit - overhead) / (layout_.stride + 16);
}

void Log::open_segment(Stream* stream) {
  // A session that died may have left a file with this number. No commit names it; it is skipped, not removed.
  while (vfs_.exists(layout_.directory + "/" + segment_name(next_segment_))) ++next_segment_;
  auto segment = std::make_unique<Segment>();
  segment->id = next_segment_;
  segment->epoch = stream->epoch;
  segment->is_ending = stream == &ending_;
  segment->is_sealed = false;
  segment->is_new = true;
  segment->needs_sync = true;
  segment->bytes = kSegmentHeaderBytes;
  const std::string path = layout_.directory + "/" + segment_name(segment->id);
  segment->file = std::make_shared<vfs::CachedFile>(vfs_, vfs_.create(path));
  failpoint("log.segment");
  if (is_nameless_) vfs_.remove(path);
  vfs::Buffer header(kSegmentHeaderBytes);
  encode_segment_header({layout_.uuid, segment->id, stream->epoch, layout_.stride}, header.data());
  try {
    segment->file->write(header.data(), kSegmentHeaderBytes, 0);
  } catch (...) {
    segment->file.reset();
    vfs_.remove(path);
    throw;
  }
  stats_.written_bytes += kSegmentHeaderBytes;
  ++next_segment_;
  stream->segment = segment.get();
  segments_.add(std::move(segment));
  if (should_return_heap_holes()) write_pool().submit(return_heap_holes);
}

void Log::open_chunk(Stream* stream) {
  if (room_ && room_() < memory_.chunk_bytes + kSegmentHeaderBytes) {
    throw Error(ErrorKind::kSystem, "the disk= limit of the table at " + layout_.directory + " is reached", ENOSPC,
                layout_.directory);
  }
  Chunk* const chunk = buffers_.find_free();
  const size_t enough = std::max<size_t>(1, chunk_capacity(kSegmentHeaderBytes) / 8);
  if (stream->segment != nullptr && chunk_capacity(stream->segment->bytes) < enough) {
    stream->segment->is_sealed = true;
    stream->segment = nullptr;
  }
  if (stream->segment == nullptr) open_segment(stream);
  Segment* const segment = stream->segment;
  chunk->kind = ChunkKind::kData;
  chunk->segment = segment;
  chunk->epoch = stream->epoch;
  chunk->begin = segment->bytes;
  chunk->first_slot = (chunk->begin + layout_.stride - 1) / layout_.stride;
  chunk->capacity = chunk_capacity(chunk->begin);
  chunk->ids.clear();
  chunk->versions.clear();
  chunk->ids.reserve(chunk->capacity);
  chunk->versions.reserve(chunk->capacity);
  // Clears the gap before the first record: stale bytes of an earlier chunk must not reach the disk.
  std::memset(chunk->memory.data(), 0, chunk->first_slot * layout_.stride - chunk->begin);
  buffers_.open(chunk);
  stream->chunk = chunk;
}

uint64_t Log::append(int64_t id, const std::byte* payload, uint64_t version) {
  return append_to(&running_, id, payload, version);
}

// Returns an open chunk with room for a record.
Chunk& Log::chunk_for(Stream* stream) {
  if (stream->chunk != nullptr && stream->chunk->ids.size() == stream->chunk->capacity) close_chunk(stream);
  if (stream->chunk == nullptr) open_chunk(stream);
  return *stream->chunk;
}

uint64_t Log::checked_position(const Chunk& chunk, uint64_t slot) const {
  const uint64_t place = position(chunk.segment->id, slot);
  if (place > kMaxPosition) {
    throw Error(ErrorKind::kInvalid,
                "the log is full: record number " + std::to_string(place) + " needs more than 40 bits");
  }
  return place;
}

void Log::put_record(int64_t id, const std::byte* payload, std::byte* record) const {
  std::memcpy(record, payload, layout_.payload_bytes);
  std::memset(record + layout_.payload_bytes, 0, layout_.stride - layout_.payload_bytes);
  put_record_crc(record_crc(layout_.crc_seed, id, payload, layout_.payload_bytes), record + layout_.payload_bytes);
}

uint64_t Log::append_to(Stream* stream, int64_t id, const std::byte* payload, uint64_t version) {
  Chunk& chunk = chunk_for(stream);
  const uint64_t slot = chunk.first_slot + chunk.ids.size();
  const uint64_t place = checked_position(chunk, slot);
  put_record(id, payload, chunk.memory.data() + (slot * layout_.stride - chunk.begin));
  chunk.ids.push_back(id);
  chunk.versions.push_back(version != 0 ? version : stream->next_version++);
  ++chunk.segment->records;
  ++chunk.segment->live;
  ++stats_.written_records;
  return place;
}

size_t Log::append(const Source* sources, size_t n, uint64_t* positions) {
  return append_to(&running_, sources, n, positions);
}

size_t Log::append_to(Stream* stream, const Source* sources, size_t n, uint64_t* positions) {
  Chunk& chunk = chunk_for(stream);
  const size_t before = chunk.ids.size();
  n = std::min(n, chunk.capacity - before);
  const uint64_t first_slot = chunk.first_slot + before;
  const uint64_t first = checked_position(chunk, first_slot + n - 1) - (n - 1);
  std::byte* const records = chunk.memory.data() + (first_slot * layout_.stride - chunk.begin);
  parallel_for(n, std::max<size_t>(1, kThreadBytes / layout_.stride), [&](size_t from, size_t to) {
    alignas(64) std::byte staged[kStagedBytes];
    const size_t fit = kStagedBytes / layout_.stride;
    const size_t ahead = std::max<size_t>(1, kAheadBytes / layout_.stride);
    if (fit == 0) {
      for (size_t i = from; i < to; ++i) put_record(sources[i].id, sources[i].payload, records + i * layout_.stride);
      return;
    }
    for (size_t i = from; i < to;) {
      const size_t count = std::min(fit, to - i);
      for (size_t r = 0; r < count; ++r) {
        if (i + r + ahead < to) {
          const std::byte* const coming = sources[i + r + ahead].payload;
          for (size_t at = 0; at < layout_.payload_bytes; at += 64) __builtin_prefetch(coming + at, 0, 2);
        }
        put_record(sources[i + r].id, sources[i + r].payload, staged + r * layout_.stride);
      }
      stream_copy(records + i * layout_.stride, staged, count * layout_.stride);
      i += count;
    }
  });
  for (size_t i = 0; i < n; ++i) {
    chunk.ids.push_back(sources[i].id);
    chunk.versions.push_back(stream->next_version++);
    positions[i] = first + i;
  }
  chunk.segment->records += n;
  chunk.segment->live += n;
  stats_.written_records += n;
  return n;
}

// A chunk without records has as many ids as a chunk of records, so that its index takes no more memory.
void Log::append_others(const int64_t* ids, const uint64_t* versions, const uint64_t* counts, size_t n) {
  for (size_t done = 0; done < n;) {
    if (running_.chunk != nullptr && !running_.chunk->ids.empty()) close_chunk(&running_);
    if (running_.chunk == nullptr) open_chunk(&running_);
    Chunk& chunk = *running_.chunk;
    chunk.kind = counts != nullptr ? ChunkKind::kCount : ChunkKind::kTombstone;
    const size_t count = std::min(n - done, chunk.capacity);
    chunk.ids.assign(ids + done, ids + done + count);
    for (size_t i = 0; i < count; ++i) {
      chunk.versions.push_back(versions != nullptr ? versions[done + i] : running_.next_version++);
    }
    Segment& segment = *chunk.segment;
    if (counts == nullptr) {
      const uint64_t oldest = *std::min_element(chunk.versions.begin(), chunk.versions.end());
      segment.oldest_tombstone = segment.tombstones == 0 ? oldest : std::min(segment.oldest_tombstone, oldest);
      segment.tombstones += count;
      stats_.written_tombstones += count;
    } else {
      segment.counts += count;
      stats_.written_counts += count;
    }
    close_chunk(&running_, counts != nullptr ? counts + done : nullptr);
    done += count;
  }
}

uint64_t Log::tombstone_disk_bytes(uint64_t n) const {
  if (n == 0) return 0;
  const uint64_t chunks = n / tombstones_in_chunk() + 2;
  const uint64_t bytes = n * chunk_index_bytes(1) + chunks * (2 * kBlockBytes + layout_.stride + kChunkTrailerBytes);
  return bytes + (1 + bytes / layout_.segment_bytes()) * kSegmentHeaderBytes;
}

void Log::close_chunk(Stream* stream, const uint64_t* counts) {
  Chunk& chunk = *stream->chunk;
  const size_t n = chunk.ids.size();
  const size_t records = chunk.kind == ChunkKind::kData ? n : 0;
  ChunkTrailer trailer;
  trailer.kind = chunk.kind;
  trailer.epoch = stream->epoch;
  trailer.begin = chunk.begin;
  trailer.first_slot = chunk.first_slot;
  trailer.index_offset = (chunk.first_slot + records) * layout_.stride;
  trailer.count = static_cast<uint32_t>(n);
  trailer.end = round_up(trailer.index_offset + trailer.index_bytes() + kChunkTrailerBytes, kBlockBytes);
  std::byte* base = chunk.memory.data();
  std::byte* index = base + (trailer.index_offset - chunk.begin);
  std::memset(index, 0, trailer.end - trailer.index_offset);
  std::memcpy(index, chunk.ids.data(), n * 8);
  std::memcpy(index + n * 8, chunk.versions.data(), n * 8);
  if (counts != nullptr) std::memcpy(index + n * 16, counts, n * 8);
  trailer.index_crc = kernels().crc32c(0, index, trailer.index_bytes());
  encode_chunk_trailer(trailer, layout_.uuid, chunk.segment->id,
                       base + (trailer.end - chunk.begin - kChunkTrailerBytes));
  chunk.end = trailer.end;
  chunk.segment->bytes = trailer.end;
  chunk.segment->chunks.push_back(trailer);
  chunk.segment->needs_sync = true;
  stream->chunk = nullptr;
  stats_.written_bytes += chunk.end - chunk.begin;
  buffers_.write(&chunk);
}

void Log::drain() {
  if (running_.chunk != nullptr && !running_.chunk->ids.empty()) close_chunk(&running_);
  buffers_.wait_for_all();
  buffers_.retry_failed();
}

void Log::rotate() {
  drain();
  seal(&running_);
}

void Log::seal(Stream* stream) {
  if (stream->chunk != nullptr) buffers_.free(stream->chunk);  // open and empty
  stream->chunk = nullptr;
  if (stream->segment != nullptr) stream->segment->is_sealed = true;
  stream->segment = nullptr;
}

void Log::abandon() {
  buffers_.wait_for_all();
  running_.chunk = ending_.chunk = nullptr;
  running_.segment = ending_.segment = nullptr;
  is_ending_ = false;
  buffers_.reset(memory_.num_chunks, memory_.chunk_bytes);
  for (const auto& [id, segment] : segments_.all()) {
    if (segment->file.use_count() == 1) continue;
    try {
      segment->file->keep_open();  // for reads under way: the name may be removed from now on
    } catch (const Error&) {       // those reads fail too and report it
    }
  }
  segments_.clear();
}

const std::byte* Log::pending(uint64_t place) {
  const uint64_t segment = place / layout_.slots_per_segment;
  const uint64_t slot = place % layout_.slots_per_segment;
  for (const auto& chunk : buffers_.all()) {
    if (chunk->segment == nullptr || chunk->segment->id != segment || chunk->kind != ChunkKind::kData) continue;
    if (slot < chunk->first_slot || slot >= chunk->first_slot + chunk->ids.size()) continue;
    // A write that ends after this check does no harm: the bytes stay until an append takes the buffer.
    if (chunk.get() != running_.chunk && chunk.get() != ending_.chunk && buffers_.is_free(*chunk)) return nullptr;
    return chunk->memory.data() + (slot * layout_.stride - chunk->begin);
  }
  return nullptr;
}

// ---- Segments ------------------------------------------------------------------------------------------------

void Log::forget_segment(uint64_t id, bool remove_file) {
  Segment* const segment = segments_.find(id);
  if (segment == nullptr) return;
  if (segment->file.use_count() > 1) segment->file->keep_open();  // for those reads: the name may go
  const std::string path = segment->file->path();
  for (Stream* stream : {&running_, &ending_}) {
    if (stream->segment == segment) stream->segment = nullptr;
  }
  buffers_.forget(segment);
  segments_.erase(id);
  if (remove_file && !is_nameless_) vfs_.remove(path);
}

}  // namespace bunkbed
