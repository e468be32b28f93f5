// The log: append-only segments of fixed-width records. Background threads write the chunks; records are read by their
// position. The log knows bytes and positions. The directory knows which record is the newest of its row.
//
// Rules it keeps (docs/design/engine.md, rules 10 to 13):
//   1. A chunk is whole blocks: records, their ids and versions, a checksummed trailer at the end. It is written by
//      one write and never rewritten once its epoch is committed, so a torn tail is never confused with bit rot.
//   2. A record stays readable from its chunk's buffer until the chunk's write has ended. A failed write keeps its
//      buffer. The next call that needs a buffer, or the commit, tries the write again and reports the error.
//   3. A segment belongs to one epoch. A commit ends the running epoch and begins the next one. From then on append()
//      adds to the next epoch, and append_ending() adds the records that the ending epoch still lacks, to segments of
//      that epoch. begin_next_epoch() reserves versions for those records, below every version of the next epoch. So
//      the newest record of a row has the highest version, in whatever segment it is and whenever it is written.
//   4. The CRC-32C of every record read from disk is checked before the record is used.
//
// Each call requires the table's lock unless its comment says otherwise. Chunk writes, and the helpers of reads, run on
// other threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "format/format.h"
#include "log/chunk_buffers.h"
#include "log/record_reads.h"
#include "log/segment.h"
#include "log/segment_reader.h"
#include "vfs/vfs.h"

namespace bunkbed {

// Sizes of the log's own memory, all inside the table's RAM budget.
struct LogMemory {
  size_t chunk_bytes = 1 << 20;
  size_t num_chunks = 4;
  size_t read_slice_bytes = 8192;
  size_t num_read_slices = 64;
  // Bytes of all these, and of each chunk's index (16 bytes a record), which is kept until the chunk is written.
  size_t total(size_t stride) const {
    return num_chunks * (chunk_bytes + chunk_bytes / stride * 16) + 2 * read_slice_bytes * num_read_slices;
  }
};

class Log {
 public:
  Log(vfs::Vfs& vfs, std::string directory, const Uuid& uuid, size_t payload_bytes, uint64_t slots_per_segment,
      const LogMemory& memory);
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  // Opens the segments a manifest names and checks their headers and lengths.
  void adopt(const std::vector<SegmentEntry>& entries);
  // Sets the epoch of later appends, and the next numbers of segment and record version.
  void begin_epoch(uint64_t epoch, uint64_t next_segment, uint64_t next_version);
  void set_memory(const LogMemory& memory);
  // Lets the cache of descriptors close synced segments that are not in use (file_cache.h). Only for a writer, whose
  // segments keep their names while they are in the log. A reader keeps its segments open: the writer may remove them.
  void close_unused() { closes_unused_ = true; }
  // The name of each new segment is removed at once (scratch.h).
  void make_nameless() { is_nameless_ = true; }
  const LogMemory& memory() const { return memory_; }
  // `room` returns the bytes by which files may still grow. Opening a chunk that needs more is Error(kSystem), ENOSPC.
  void set_room(std::function<uint64_t()> room) { room_ = std::move(room); }
  // Most bytes that the open chunks may still add to their segments.
  uint64_t open_bytes() const {
    return ((running_.chunk != nullptr ? 1 : 0) + (ending_.chunk != nullptr ? 1 : 0)) * uint64_t{memory_.chunk_bytes};
  }
  // Most bytes that a record of a full chunk takes on disk, with its share of the chunk's trailer and padding.
  uint64_t record_disk_bytes() const { return record_disk_bytes(layout_.stride, memory_.chunk_bytes); }
  static uint64_t record_disk_bytes(size_t stride, size_t chunk_bytes) {
    const size_t overhead = stride + kChunkTrailerBytes + 8;  // the gap before the first record is less than one
    const size_t records = std::max<size_t>(1, (chunk_bytes - std::min(chunk_bytes, overhead)) / (stride + 16));
    return (chunk_bytes + records - 1) / records;
  }

  // Copies the record into the open chunk and returns its position. `version` 0 means the next version; compaction
  // passes the version that the record had. May wait for a buffer. Throws where the retry of a failed chunk write
  // fails; the record was then not appended.
  uint64_t append(int64_t id, const std::byte* payload, uint64_t version = 0);
  // Appends as many of n >= 1 records as the open chunk has room for, in the order of `sources`, and returns their
  // number, at least 1. All compute threads copy and checksum. The payloads must not change meanwhile.
  struct Source {
    int64_t id;
    const std::byte* payload;
  };
  size_t append(const Source* sources, size_t n, uint64_t* positions);
  // Appends tombstones of n ids or, where `counts` is not null, their counts, which are directory entries; in chunks of
  // their own, of the running epoch. `versions`: null for the next versions; compaction passes those that the
  // tombstones or counts had. When it throws, some may have been appended.
  void append_others(const int64_t* ids, const uint64_t* versions, const uint64_t* counts, size_t n);
  // Most bytes that n tombstones take on disk when they are appended in one call.
  uint64_t tombstone_disk_bytes(uint64_t n) const;
  // The payload of a record that is still in memory, or null when it is on disk.
  const std::byte* pending(uint64_t position);
  // Closes the open chunk and waits until every chunk is in its file (not yet durable). No epoch may be ending.
  void drain();
  // drain(); then the next append opens another segment, of the epoch then current.
  void rotate();

  // ---- The end of an epoch, in order:
  // Begins the next epoch. Reserves versions for `records` that append_ending() may add to the ending one.
  void begin_next_epoch(uint64_t records);
  uint64_t append_ending(int64_t id, const std::byte* payload);
  size_t append_ending(const Source* sources, size_t n, uint64_t* positions);
  // Records that can be appended without waiting, with a buffer left for other appends.
  size_t spare_records() { return buffers_.spare() * (memory_.chunk_bytes / record_disk_bytes()); }
  // Ends append_ending(): hands the last chunk to its writer and seals the segment. Also called after a failed commit.
  void finish_ending();
  // Makes the epochs up to this one durable, once ChunkBuffers::is_written(): unsynced(), then sync() without the
  // table's lock (Error(kSync) when it fails), then mark_synced().
  struct Unsynced {
    std::vector<uint64_t> segments;
    std::vector<std::shared_ptr<vfs::File>> files;
    bool has_new_names = false;
  };
  Unsynced unsynced(uint64_t epoch) const;
  void sync(const Unsynced& unsynced) const;
  void mark_synced(const Unsynced& unsynced);
  uint64_t epoch() const { return running_.epoch; }
  // Segments of earlier epochs take no more records.
  uint64_t oldest_open_epoch() const { return is_ending_ ? ending_.epoch : running_.epoch; }

  // Waits for the chunk writes under way, discards all other unwritten records, closes all files.
  void abandon();

  Segment& segment_of(uint64_t position) { return segments_.at(layout_, position); }
  Segment* find_segment(uint64_t id) { return segments_.find(id); }
  const Segments::ById& segments() const { return segments_.all(); }
  // Drops a segment from the log. `remove_file` false leaves the file for a commit that still names it.
  void forget_segment(uint64_t id, bool remove_file);

  // ---- The parts.
  ChunkBuffers& buffers() { return buffers_; }
  SegmentReader& reader() { return reader_; }
  RecordReads& reads() { return reads_; }
  const LogLayout& layout() const { return layout_; }
  uint64_t position(uint64_t segment, uint64_t slot) const { return layout_.position(segment, slot); }
  uint64_t segment_bytes() const { return layout_.segment_bytes(); }
  size_t stride() const { return layout_.stride; }
  uint64_t slots_per_segment() const { return layout_.slots_per_segment; }
  uint64_t next_segment() const { return next_segment_; }
  uint64_t next_version() const { return running_.next_version; }
  const LogStats& stats() const { return stats_; }

 private:
  // The segment and chunk that the records of one epoch are appended to.
  struct Stream {
    uint64_t epoch = 0;
    uint64_t next_version = 1;
    Segment* segment = nullptr;
    Chunk* chunk = nullptr;
  };

  uint64_t append_to(Stream* stream, int64_t id, const std::byte* payload, uint64_t version);
  size_t append_to(Stream* stream, const Source* sources, size_t n, uint64_t* positions);
  void require_ending(size_t records) const;
  Chunk& chunk_for(Stream* stream);
  uint64_t checked_position(const Chunk& chunk, uint64_t slot) const;
  void put_record(int64_t id, const std::byte* payload, std::byte* record) const;
  void seal(Stream* stream);
  void open_segment(Stream* stream);
  void open_chunk(Stream* stream);
  size_t chunk_capacity(uint64_t begin) const;
  size_t tombstones_in_chunk() const { return std::max<size_t>(1, memory_.chunk_bytes / (layout_.stride + 16)); }
  void close_chunk(Stream* stream, const uint64_t* counts = nullptr);

  vfs::Vfs& vfs_;
  const LogLayout layout_;
  LogMemory memory_;
  uint64_t next_segment_ = 1;
  Stream running_;
  Stream ending_;
  bool is_ending_ = false;
  uint64_t ending_versions_end_ = 0;
  bool is_nameless_ = false;
  bool closes_unused_ = false;
  std::function<uint64_t()> room_;
  LogStats stats_;
  Segments segments_;
  ChunkBuffers buffers_;
  SegmentReader reader_{layout_, &stats_};
  RecordReads reads_{layout_, segments_, &stats_};
};

}  // namespace bunkbed
