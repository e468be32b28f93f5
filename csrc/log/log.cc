#include "log/log.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/memory.h"
#include "base/mutex.h"
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
      directory_(std::move(directory)),
      uuid_(uuid),
      crc_seed_(record_crc_seed(uuid)),
      payload_bytes_(payload_bytes),
      stride_(record_stride(payload_bytes)),
      slots_per_segment_(slots_per_segment),
      memory_(memory) {
  vfs::current_io();  // reports a wrong BUNKBED_IO now, not at the first read
  resize_lanes();
}

void Log::resize_lanes() {
  lane_.resize(memory_.read_slice_bytes, memory_.num_read_slices);
  // Staging always has more to read. It leaves a quarter of the threads to calls that wait for their reads.
  staging_lane_.resize(memory_.read_slice_bytes, memory_.num_read_slices,
                       std::max<size_t>(1, std::min(memory_.num_read_slices, kIoThreads) * 3 / 4));
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
    const std::string path = directory_ + "/" + segment_name(entry.segment);
    segment->file = std::make_shared<vfs::CachedFile>(vfs_, vfs_.open(path, true));
    const uint64_t size = segment->file->size();
    if (size < entry.bytes) {
      throw Error(ErrorKind::kCorruption, "segment " + path + " is " + std::to_string(size) +
                                              " bytes long, the commit names " + std::to_string(entry.bytes));
    }
    segment->file->read(block.data(), kBlockBytes, 0);
    const SegmentHeader header = decode_segment_header({block.data(), kBlockBytes}, path);
    if (header.uuid != uuid_ || header.segment != entry.segment || header.epoch != entry.epoch ||
        header.stride != stride_) {
      throw Error(ErrorKind::kCorruption, "segment " + path + " belongs to another table or commit");
    }
    if (closes_unused_) segment->file->let_close();
    Segment* const adopted = segment.get();
    segments_[entry.segment] = std::move(segment);  // first: it owns the segment, and forget_segment() looks there
    by_id_[entry.segment] = adopted;
  }
}

void Log::begin_epoch(uint64_t epoch, uint64_t next_segment, uint64_t next_version) {
  running_ = {epoch, next_version, nullptr, nullptr};
  next_segment_ = next_segment;
}

void Log::set_memory(const LogMemory& memory) {
  drain();
  running_.chunk = nullptr;  // at most an empty one: drain() closed the others
  chunks_.clear();
  memory_ = memory;
  resize_lanes();
}

// ---- Appends -------------------------------------------------------------------------------------------------

size_t Log::chunk_capacity(uint64_t begin) const {
  const uint64_t first_slot = (begin + stride_ - 1) / stride_;
  const uint64_t limit = std::min<uint64_t>(begin + memory_.chunk_bytes, round_down(slots_per_segment_ * stride_, kBlockBytes));
  const uint64_t overhead = first_slot * stride_ + kChunkTrailerBytes + 8;
  if (limit < overhead + stride_ + 16) return 0;
  return (limit - overhead) / (stride_ + 16);
}

void Log::open_segment(Stream* stream) {
  // A session that died may have left a file with this number. No commit names it; it is skipped, not removed.
  while (vfs_.exists(directory_ + "/" + segment_name(next_segment_))) ++next_segment_;
  auto segment = std::make_unique<Segment>();
  segment->id = next_segment_;
  segment->epoch = stream->epoch;
  segment->is_ending = stream == &ending_;
  segment->is_sealed = false;
  segment->is_new = true;
  segment->needs_sync = true;
  segment->bytes = kSegmentHeaderBytes;
  const std::string path = directory_ + "/" + segment_name(segment->id);
  segment->file = std::make_shared<vfs::CachedFile>(vfs_, vfs_.create(path));
  failpoint("log.segment");
  if (is_nameless_) vfs_.remove(path);
  vfs::Buffer header(kSegmentHeaderBytes);
  encode_segment_header({uuid_, segment->id, stream->epoch, stride_}, header.data());
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
  by_id_[segment->id] = segment.get();
  segments_[segment->id] = std::move(segment);
  if (should_return_heap_holes()) write_pool().submit(return_heap_holes);
}

void Log::open_chunk(Stream* stream) {
  if (room_ && room_() < memory_.chunk_bytes + kSegmentHeaderBytes) {
    throw Error(ErrorKind::kSystem, "the disk= limit of the table at " + directory_ + " is reached", ENOSPC, directory_);
  }
  Chunk* chunk = free_chunk();
  const size_t enough = std::max<size_t>(1, chunk_capacity(kSegmentHeaderBytes) / 8);
  if (stream->segment != nullptr && chunk_capacity(stream->segment->bytes) < enough) {
    stream->segment->is_sealed = true;
    stream->segment = nullptr;
  }
  if (stream->segment == nullptr) open_segment(stream);
  Segment* const segment = stream->segment;
  if (chunk->memory.size() == 0) chunk->memory = vfs::Buffer(memory_.chunk_bytes);
  chunk->segment = segment;
  chunk->epoch = stream->epoch;
  chunk->begin = segment->bytes;
  chunk->first_slot = (chunk->begin + stride_ - 1) / stride_;
  chunk->capacity = chunk_capacity(chunk->begin);
  chunk->ids.clear();
  chunk->versions.clear();
  chunk->ids.reserve(chunk->capacity);
  chunk->versions.reserve(chunk->capacity);
  // Clears the gap before the first record: stale bytes of an earlier chunk must not reach the disk.
  std::memset(chunk->memory.data(), 0, chunk->first_slot * stride_ - chunk->begin);
  {
    const MutexLock guard(mutex_);
    chunk->state = Chunk::State::kOpen;
  }
  stream->chunk = chunk;
}

uint64_t Log::append(int64_t id, const std::byte* payload, uint64_t version) {
  return append_to(&running_, id, payload, version);
}

// Returns an open chunk with room for a record.
Log::Chunk& Log::chunk_for(Stream* stream) {
  if (stream->chunk != nullptr && stream->chunk->ids.size() == stream->chunk->capacity) close_chunk(stream);
  if (stream->chunk == nullptr) open_chunk(stream);
  return *stream->chunk;
}

uint64_t Log::checked_position(const Chunk& chunk, uint64_t slot) const {
  const uint64_t place = position(chunk.segment->id, slot);
  if (place > (1ull << 40) - (1ull << 32) - 2) {
    throw Error(ErrorKind::kInvalid, "the log is full: record number " + std::to_string(place) + " needs more than 40 bits");
  }
  return place;
}

void Log::put_record(int64_t id, const std::byte* payload, std::byte* record) const {
  std::memcpy(record, payload, payload_bytes_);
  std::memset(record + payload_bytes_, 0, stride_ - payload_bytes_);
  put_record_crc(record_crc(crc_seed_, id, payload, payload_bytes_), record + payload_bytes_);
}

uint64_t Log::append_to(Stream* stream, int64_t id, const std::byte* payload, uint64_t version) {
  Chunk& chunk = chunk_for(stream);
  const uint64_t slot = chunk.first_slot + chunk.ids.size();
  const uint64_t place = checked_position(chunk, slot);
  put_record(id, payload, chunk.memory.data() + (slot * stride_ - chunk.begin));
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
  std::byte* const records = chunk.memory.data() + (first_slot * stride_ - chunk.begin);
  parallel_for(n, std::max<size_t>(1, kThreadBytes / stride_), [&](size_t from, size_t to) {
    alignas(64) std::byte staged[kStagedBytes];
    const size_t fit = kStagedBytes / stride_;
    const size_t ahead = std::max<size_t>(1, kAheadBytes / stride_);
    if (fit == 0) {
      for (size_t i = from; i < to; ++i) put_record(sources[i].id, sources[i].payload, records + i * stride_);
      return;
    }
    for (size_t i = from; i < to;) {
      const size_t count = std::min(fit, to - i);
      for (size_t r = 0; r < count; ++r) {
        if (i + r + ahead < to) {
          const std::byte* const coming = sources[i + r + ahead].payload;
          for (size_t at = 0; at < payload_bytes_; at += 64) __builtin_prefetch(coming + at, 0, 2);
        }
        put_record(sources[i + r].id, sources[i + r].payload, staged + r * stride_);
      }
      stream_copy(records + i * stride_, staged, count * stride_);
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

void Log::close_chunk(Stream* stream) {
  Chunk& chunk = *stream->chunk;
  const size_t n = chunk.ids.size();
  ChunkTrailer trailer;
  trailer.kind = ChunkKind::kData;
  trailer.epoch = stream->epoch;
  trailer.begin = chunk.begin;
  trailer.first_slot = chunk.first_slot;
  trailer.index_offset = (chunk.first_slot + n) * stride_;
  trailer.end = round_up(trailer.index_offset + chunk_index_bytes(n) + kChunkTrailerBytes, kBlockBytes);
  trailer.count = static_cast<uint32_t>(n);
  std::byte* base = chunk.memory.data();
  std::byte* index = base + (trailer.index_offset - chunk.begin);
  std::memset(index, 0, trailer.end - trailer.index_offset);
  std::memcpy(index, chunk.ids.data(), n * 8);
  std::memcpy(index + n * 8, chunk.versions.data(), n * 8);
  trailer.index_crc = kernels().crc32c(0, index, chunk_index_bytes(n));
  encode_chunk_trailer(trailer, uuid_, chunk.segment->id, base + (trailer.end - chunk.begin - kChunkTrailerBytes));
  chunk.end = trailer.end;
  chunk.segment->bytes = trailer.end;
  chunk.segment->chunks.push_back(trailer);
  chunk.segment->needs_sync = true;
  stream->chunk = nullptr;
  stats_.written_bytes += chunk.end - chunk.begin;
  start_write(&chunk);
}

void Log::start_write(Chunk* chunk) {
  {
    const MutexLock guard(mutex_);
    chunk->state = Chunk::State::kWriting;
  }
  write_pool().submit([this, chunk, file = chunk->segment->file] {
    std::exception_ptr error;
    try {
      failpoint("log.chunk");
      file->write(chunk->memory.data(), chunk->end - chunk->begin, chunk->begin);
      failpoint("log.chunk_written");
    } catch (...) {
      error = std::current_exception();
    }
    // Notifies with the mutex held: the log may be destroyed as soon as another thread sees that the write has ended.
    const MutexLock guard(mutex_);
    chunk->error = error;
    chunk->state = error ? Chunk::State::kFailed : Chunk::State::kFree;
    ++writes_ended_;
    written_.notify_all();
  });
}

// Tries failed writes again on the calling thread; throws the first error.
void Log::retry_failed() {
  for (const auto& chunk : chunks_) {
    {
      const MutexLock guard(mutex_);
      if (chunk->state != Chunk::State::kFailed) continue;
    }
    if (chunk->segment != nullptr) {  // null: the segment was dropped, its bytes are not needed
      chunk->segment->file->write(chunk->memory.data(), chunk->end - chunk->begin, chunk->begin);
    }
    const MutexLock guard(mutex_);
    chunk->state = Chunk::State::kFree;
    chunk->error = nullptr;
  }
}

Log::Chunk* Log::free_chunk() {
  for (;;) {
    retry_failed();
    {
      MutexLock lock(mutex_);
      const auto is_free = [](const auto& chunk) { return chunk->state == Chunk::State::kFree; };
      const auto found = std::find_if(chunks_.begin(), chunks_.end(), is_free);
      if (found != chunks_.end()) return found->get();
      if (chunks_.size() < memory_.num_chunks) {
        chunks_.push_back(std::make_unique<Chunk>());
        return chunks_.back().get();
      }
      const auto is_over = [](const auto& chunk) {
        return chunk->state == Chunk::State::kFree || chunk->state == Chunk::State::kFailed;
      };
      while (std::none_of(chunks_.begin(), chunks_.end(), is_over)) lock.wait(written_);
    }
  }
}

void Log::wait_all() {
  MutexLock lock(mutex_);
  const auto is_writing = [](const auto& chunk) { return chunk->state == Chunk::State::kWriting; };
  while (std::any_of(chunks_.begin(), chunks_.end(), is_writing)) lock.wait(written_);
}

void Log::drain() {
  if (running_.chunk != nullptr && !running_.chunk->ids.empty()) close_chunk(&running_);
  wait_all();
  retry_failed();
}

void Log::rotate() {
  drain();
  seal(&running_);
}

void Log::seal(Stream* stream) {
  if (stream->chunk != nullptr) {  // open and empty
    const MutexLock guard(mutex_);
    stream->chunk->state = Chunk::State::kFree;
  }
  stream->chunk = nullptr;
  if (stream->segment != nullptr) stream->segment->is_sealed = true;
  stream->segment = nullptr;
}

void Log::abandon() {
  wait_all();
  running_.chunk = ending_.chunk = nullptr;
  running_.segment = ending_.segment = nullptr;
  is_ending_ = false;
  chunks_.clear();
  for (const auto& [id, segment] : segments_) {
    if (segment->file.use_count() == 1) continue;
    try {
      segment->file->keep_open();  // for reads under way: the name may be removed from now on
    } catch (const Error&) {  // those reads fail too and report it
    }
  }
  segments_.clear();
  by_id_.clear();
}

const std::byte* Log::pending(uint64_t place) {
  const uint64_t segment = place / slots_per_segment_;
  const uint64_t slot = place % slots_per_segment_;
  for (const auto& chunk : chunks_) {
    if (chunk->segment == nullptr || chunk->segment->id != segment) continue;
    if (slot < chunk->first_slot || slot >= chunk->first_slot + chunk->ids.size()) continue;
    // A write that ends after this check does no harm: the bytes stay until an append takes the buffer.
    if (chunk.get() != running_.chunk && chunk.get() != ending_.chunk) {
      const MutexLock guard(mutex_);
      if (chunk->state == Chunk::State::kFree) return nullptr;
    }
    return chunk->memory.data() + (slot * stride_ - chunk->begin);
  }
  return nullptr;
}

// ---- Segments ------------------------------------------------------------------------------------------------

Segment* Log::find_segment(uint64_t id) {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : found->second;
}

Segment& Log::segment_of(uint64_t place) {
  Segment* segment = find_segment(place / slots_per_segment_);
  if (segment == nullptr) {
    throw Error(ErrorKind::kCorruption, "in " + directory_ + ": record number " + std::to_string(place) +
                                            " is in a segment the table does not have");
  }
  return *segment;
}

bool Log::is_being_written(const Segment& segment) {
  const MutexLock guard(mutex_);
  return std::any_of(chunks_.begin(), chunks_.end(), [&segment](const auto& chunk) {
    return chunk->segment == &segment && chunk->state != Chunk::State::kFree;
  });
}

void Log::forget_segment(uint64_t id, bool remove_file) {
  const auto found = segments_.find(id);
  if (found == segments_.end()) return;
  if (found->second->file.use_count() > 1) found->second->file->keep_open();  // for those reads: the name may go
  const std::string path = found->second->file->path();
  for (Stream* stream : {&running_, &ending_}) {
    if (stream->segment == found->second.get()) stream->segment = nullptr;
  }
  for (const auto& chunk : chunks_) {
    if (chunk->segment == found->second.get()) chunk->segment = nullptr;
  }
  by_id_.erase(id);
  segments_.erase(found);
  if (remove_file && !is_nameless_) vfs_.remove(path);
}

void Log::read_span(Segment& segment, uint64_t begin, size_t bytes, Span* span) {
  count_read_bytes(fetch_span(segment, begin, bytes, span));
}

uint64_t Log::fetch_span(const Segment& segment, uint64_t begin, size_t bytes, Span* span) const {
  const uint64_t from = round_down(begin, kBlockBytes);
  const uint64_t to = std::min<uint64_t>(round_up(begin + bytes, kBlockBytes), segment.bytes);
  if (span->segment == segment.id && span->begin <= from && to <= span->end) return 0;
  if (to <= from) {
    throw Error(ErrorKind::kCorruption, "segment " + segment.file->path() + " ends before byte " + std::to_string(begin));
  }
  span->segment = 0;
  if (span->memory.size() < to - from) span->memory = vfs::Buffer(to - from);
  segment.file->read(span->memory.data(), to - from, from);
  span->segment = segment.id;
  span->begin = from;
  span->end = to;
  return to - from;
}

const std::vector<ChunkTrailer>& Log::chunks(Segment& segment) {
  if (!segment.chunks.empty() || segment.bytes == kSegmentHeaderBytes) return segment.chunks;
  std::vector<ChunkTrailer> found;
  count_read_bytes(find_chunks(segment, &found));
  segment.chunks = std::move(found);
  return segment.chunks;
}

uint64_t Log::find_chunks(const Segment& segment, std::vector<ChunkTrailer>* chunks) const {
  std::vector<ChunkTrailer>& found = *chunks;
  uint64_t read = 0;
  Span span;
  for (uint64_t end = segment.bytes; end > kSegmentHeaderBytes;) {
    read += fetch_span(segment, end - kChunkTrailerBytes, kChunkTrailerBytes, &span);
    const std::byte* bytes = span.memory.data() + (end - kChunkTrailerBytes - span.begin);
    found.push_back(decode_chunk_trailer({bytes, kChunkTrailerBytes}, uuid_, segment.id, end, stride_,
                                         slots_per_segment_, segment.file->path()));
    if (found.back().epoch != segment.epoch) {
      throw Error(ErrorKind::kCorruption, "segment " + segment.file->path() + ": a chunk of epoch " +
                                              std::to_string(found.back().epoch) + " in a segment of epoch " +
                                              std::to_string(segment.epoch));
    }
    end = found.back().begin;
  }
  std::reverse(found.begin(), found.end());
  return read;
}

void Log::read_index(Segment& segment, const ChunkTrailer& chunk, Span* span, std::vector<int64_t>* ids,
                     std::vector<uint64_t>* versions) {
  read_span(segment, chunk.index_offset, chunk_index_bytes(chunk.count), span);
  const std::byte* bytes = span->memory.data() + (chunk.index_offset - span->begin);
  if (kernels().crc32c(0, bytes, chunk_index_bytes(chunk.count)) != chunk.index_crc) {
    throw Error(ErrorKind::kCorruption, "segment " + segment.file->path() + ": the index of the chunk at byte " +
                                            std::to_string(chunk.begin) + " fails its checksum");
  }
  ids->resize(chunk.count);
  versions->resize(chunk.count);
  std::memcpy(ids->data(), bytes, chunk.count * size_t{8});
  std::memcpy(versions->data(), bytes + chunk.count * size_t{8}, chunk.count * size_t{8});
  const auto stray = std::find_if(ids->begin(), ids->end(), [this](int64_t id) { return static_cast<uint64_t>(id) >= ids_end_; });
  if (stray == ids->end()) return;
  throw Error(ErrorKind::kCorruption, "segment " + segment.file->path() + ": the chunk at byte " + std::to_string(chunk.begin) +
                                          " holds id " + std::to_string(*stray) + ", which this table cannot have");
}

const std::byte* Log::read_records(Segment& segment, const ChunkTrailer& chunk, size_t from, size_t n,
                                   const int64_t* ids, Span* span) {
  const uint64_t slot = chunk.first_slot + from;
  read_span(segment, slot * stride_, n * stride_, span);
  const std::byte* bytes = span->memory.data() + (slot * stride_ - span->begin);
  for (size_t i = 0; i < n; ++i) verify(ids[from + i], bytes + i * stride_, *segment.file, slot + i);
  return bytes;
}

}  // namespace bunkbed
