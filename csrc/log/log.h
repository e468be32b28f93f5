// The on-disk store: append-only segments of fixed-width records, written in chunks through the background, read
// one record at a time. Knows bytes and places; which record is the current one of its row is the directory's
// business.
//
// Rules it keeps (docs/design/engine.md, rules 10 to 13):
//   1. A chunk is whole blocks: records, their ids and versions, a checksummed trailer at the end. It is written by
//      one write and never rewritten once its epoch is committed, so a torn tail is never confused with bit rot.
//   2. A record on its way to disk stays readable from its chunk's buffer until the write has finished. A write
//      that fails keeps its buffer and is tried again by the next call that needs room; the call reports the error.
//   3. A segment belongs to one epoch. At a commit the running epoch ends and the next one begins: append() goes to the
//      new one at once, append_ending() adds what the old one still lacks, in segments of its own. Versions for those
//      records are set aside when the epoch ends, below every version of the next one: wherever the records of a row
//      come to lie, and in whatever order they get there, the newest has the highest version.
//   4. Every record read from disk is checked against its CRC-32C before anyone sees it.
//
// The table's lock covers every call, except where one says otherwise; only the chunk writes and the reads' helpers run
// on other threads.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "format/format.h"
#include "vfs/batch_reads.h"
#include "vfs/file_cache.h"
#include "vfs/vfs.h"

namespace bunkbed {

// Bytes of a segment as they were last read, so that neighbouring parts of it cost one read.
struct Span {
  vfs::Buffer memory;
  uint64_t segment = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct Segment {
  uint64_t id = 0;
  uint64_t epoch = 0;
  uint64_t bytes = 0;        // end of the last complete chunk handed to a writer
  uint64_t records = 0;      // data records ever appended
  uint64_t live = 0;         // of them, those that are the newest of their row
  uint64_t tombstones = 0;   // ids deleted here; the segment stays while it has any
  bool is_sealed = true;
  bool needs_sync = false;   // has writes that no fdatasync covered
  bool is_new = false;       // its directory entry is not known to be durable
  bool is_ending = false;    // holds records of the epoch being committed: its manifest will name it, live or not
  std::vector<ChunkTrailer> chunks;  // first to last, once known; 80 bytes for each chunk
  std::shared_ptr<vfs::CachedFile> file;
};

struct ReadRequest {
  uint64_t position;
  int64_t id;
  std::byte* payload;  // where its first bytes go
};

// A batch of reads that knows its files: it can run without the table's lock.
struct ReadPlan {
  struct Extent {
    vfs::File* file;
    uint64_t offset;
    uint32_t bytes;
    uint32_t first;  // of the requests
    uint32_t count;
  };
  std::vector<ReadRequest> requests;  // by position
  std::vector<Extent> extents;
  // Compaction may drop a segment while its records are being read: the files can be read until the reads are done.
  std::vector<std::shared_ptr<vfs::File>> held;
  uint64_t bytes = 0;
};

struct LogStats {
  uint64_t reads = 0;          // reads issued (neighbouring records share one)
  uint64_t read_bytes = 0;     // of those reads
  uint64_t read_records = 0;
  uint64_t written_bytes = 0;  // chunks, headers included
  uint64_t written_records = 0;
  double read_wait_s = 0.0;
};

// Sizes of the log's own memory, all inside the table's RAM budget.
struct LogMemory {
  size_t chunk_bytes = 1 << 20;
  size_t num_chunks = 4;
  size_t read_slice_bytes = 8192;
  size_t num_read_slices = 64;
  // Bytes the above takes; the index of a chunk (16 bytes a record) is kept beside it until it is written.
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
  // Numbers of the next segment and record version, and the epoch that appends from now on belong to.
  void begin_epoch(uint64_t epoch, uint64_t next_segment, uint64_t next_version);
  void set_memory(const LogMemory& memory);
  // Synced segments may be closed while they are not used (file_cache.h). For writers: their segments keep their names as
  // long as they are in the log. A reader holds its segments open, since the writer may remove them.
  void close_unused() { closes_unused_ = true; }
  // Segments lose their names as soon as they are made (scratch.h).
  void make_nameless() { is_nameless_ = true; }
  const LogMemory& memory() const { return memory_; }
  // Asked for the bytes that files may still grow by before a chunk is begun: Error(kSystem), ENOSPC, where it is fewer.
  void set_room(std::function<uint64_t()> room) { room_ = std::move(room); }
  // What the chunks that are open may yet add to their segments.
  uint64_t open_bytes() const {
    return ((running_.chunk != nullptr ? 1 : 0) + (ending_.chunk != nullptr ? 1 : 0)) * uint64_t{memory_.chunk_bytes};
  }
  // Most bytes that a record of a full chunk takes on disk, its part of the chunk's trailer and padding included.
  uint64_t record_disk_bytes() const { return record_disk_bytes(stride_, memory_.chunk_bytes); }
  static uint64_t record_disk_bytes(size_t stride, size_t chunk_bytes) {
    const size_t overhead = stride + kChunkTrailerBytes + 8;  // the gap before the first record is less than one
    const size_t records = std::max<size_t>(1, (chunk_bytes - std::min(chunk_bytes, overhead)) / (stride + 16));
    return (chunk_bytes + records - 1) / records;
  }

  // Copies the record into the open chunk and returns its position. `version` 0 takes the next one; compaction
  // passes the version the record had. May wait for a buffer; a failed write surfaces here, before anything of
  // this record was taken.
  uint64_t append(int64_t id, const std::byte* payload, uint64_t version = 0);
  // The same of as many of n >= 1 records as the open chunk takes, copied and checksummed by all threads; their number,
  // at least 1. The payloads must not change meanwhile. They lie in the order of `sources`, whatever the threads.
  struct Source {
    int64_t id;
    const std::byte* payload;
  };
  size_t append(const Source* sources, size_t n, uint64_t* positions);
  // The payload of a record that is still in memory, or null when it is on disk.
  const std::byte* pending(uint64_t position);
  // Reads and verifies records and copies the first `read_bytes` of each payload; `meanwhile` runs on the caller while
  // others read. On an error some payloads may have been written and none may be used.
  void read(std::vector<ReadRequest> requests, size_t read_bytes, const std::function<void()>& meanwhile);
  // The same in parts, for reads that go on without the table's lock: plan_reads() and count_reads() under it,
  // execute() anywhere.
  ReadPlan plan_reads(std::vector<ReadRequest> requests);
  void execute(const ReadPlan& plan, size_t read_bytes, vfs::ReadLane* lane,
               const std::function<void()>& meanwhile) const;
  // One extent that was read: verifies its records and copies their payloads. Any thread.
  void deliver(const ReadPlan& plan, size_t extent, const std::byte* data, size_t read_bytes) const;
  void count_reads(const ReadPlan& plan, double waited_s);
  vfs::ReadLane* staging_lane() { return &staging_lane_; }

  // Closes the open chunk and waits until every chunk is in its file (not yet durable). No epoch may be ending.
  void drain();
  // drain(), and the next append begins another segment, of the epoch then current.
  void rotate();

  // ---- The end of an epoch, in order:
  // The next epoch begins. `records` may be added to the one that ends.
  void begin_next_epoch(uint64_t records);
  uint64_t append_ending(int64_t id, const std::byte* payload);
  size_t append_ending(const Source* sources, size_t n, uint64_t* positions);
  // Whether an append finds a buffer without waiting and leaves others one.
  bool has_free_buffers() { return spare_buffers() > 0; }
  // So many records can be appended without waiting, and others are left a buffer.
  size_t spare_records() { return spare_buffers() * (memory_.chunk_bytes / record_disk_bytes()); }
  // Nothing will be added: hands the last chunk to its writer and seals the segment. Also when the commit failed.
  void finish_ending();
  // Whether all chunks of the epochs up to this one are in their files; tries failed ones again and throws what they do.
  bool is_written(uint64_t epoch);
  // Chunk writes that came to an end so far; waits for another one. Without the table's lock.
  uint64_t writes_ended();
  void wait_for_write(uint64_t seen);
  // What makes the epochs up to this one durable, once is_written(): sync() without the table's lock, Error(kSync) when
  // it fails, then mark_synced().
  struct Unsynced {
    std::vector<uint64_t> segments;
    std::vector<std::shared_ptr<vfs::File>> files;
    bool has_new_names = false;
  };
  Unsynced unsynced(uint64_t epoch) const;
  void sync(const Unsynced& unsynced) const;
  void mark_synced(const Unsynced& unsynced);
  uint64_t epoch() const { return running_.epoch; }
  // Segments of earlier ones take no more records.
  uint64_t oldest_open_epoch() const { return is_ending_ ? ending_.epoch : running_.epoch; }

  // Forgets everything not yet written, waits for what is being written, closes all files.
  void abandon();

  Segment& segment_of(uint64_t position);
  Segment* find_segment(uint64_t id);
  const std::map<uint64_t, std::unique_ptr<Segment>>& segments() const { return segments_; }
  // True while a chunk of the segment is not in its file yet.
  bool is_being_written(const Segment& segment);
  // Closes a segment nobody needs; `remove_file` false leaves the file to a commit that still names it.
  void forget_segment(uint64_t id, bool remove_file);
  uint64_t position(uint64_t segment, uint64_t slot) const { return segment * slots_per_segment_ + slot; }
  uint64_t slot_of(uint64_t position) const { return position % slots_per_segment_; }

  // The chunks of a segment, first to last; their trailers are verified. Only what drain() has seen written.
  const std::vector<ChunkTrailer>& chunks(Segment& segment);
  // The reading parts of chunks() and of read_span(), which may go on without the table's lock as long as the sealed
  // segment stays: what they find is put in place, and the bytes they return are counted, under it.
  uint64_t find_chunks(const Segment& segment, std::vector<ChunkTrailer>* found) const;
  uint64_t fetch_span(const Segment& segment, uint64_t begin, size_t bytes, Span* span) const;
  void count_read_bytes(uint64_t bytes) { stats_.read_bytes += bytes; }
  // Reads [begin, begin + bytes) of a segment, as far as it goes, unless `span` holds it already: what the next two
  // calls need of it then costs no read of its own.
  void read_span(Segment& segment, uint64_t begin, size_t bytes, Span* span);
  // Ids lie below this one; by itself a log takes any. What reads an index looks its ids up in a directory of as many.
  void set_ids_end(uint64_t end) { ids_end_ = end; }
  // Ids and versions of a chunk, verified.
  void read_index(Segment& segment, const ChunkTrailer& chunk, Span* span, std::vector<int64_t>* ids,
                  std::vector<uint64_t>* versions);
  // Records [from, from + n) of a chunk in memory; verified and packed at stride(), valid until `span` is used again.
  const std::byte* read_records(Segment& segment, const ChunkTrailer& chunk, size_t from, size_t n, const int64_t* ids,
                                Span* span);

  uint64_t segment_bytes() const { return slots_per_segment_ * stride_; }
  size_t stride() const { return stride_; }
  size_t payload_bytes() const { return payload_bytes_; }
  uint64_t slots_per_segment() const { return slots_per_segment_; }
  const Uuid& uuid() const { return uuid_; }
  uint64_t next_segment() const { return next_segment_; }
  uint64_t next_version() const { return running_.next_version; }
  const LogStats& stats() const { return stats_; }

 private:
  void verify(int64_t id, const std::byte* record, const vfs::File& file, uint64_t slot) const;

  struct Chunk {
    vfs::Buffer memory;
    std::vector<int64_t> ids;
    std::vector<uint64_t> versions;
    Segment* segment = nullptr;
    uint64_t begin = 0;
    uint64_t first_slot = 0;
    uint64_t epoch = 0;
    size_t capacity = 0;  // records
    enum class State { kFree, kOpen, kWriting, kFailed } state = State::kFree;
    uint64_t end = 0;
    std::exception_ptr error;
  };

  // Where the records of one epoch go.
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
  void resize_lanes();
  size_t chunk_capacity(uint64_t begin) const;
  void close_chunk(Stream* stream);
  void start_write(Chunk* chunk);
  Chunk* free_chunk();
  size_t spare_buffers();
  void retry_failed();
  void wait_all();

  vfs::Vfs& vfs_;
  const std::string directory_;
  const Uuid uuid_;
  const uint32_t crc_seed_;
  const size_t payload_bytes_;
  const size_t stride_;
  const uint64_t slots_per_segment_;
  LogMemory memory_;
  uint64_t next_segment_ = 1;
  Stream running_;
  Stream ending_;
  bool is_ending_ = false;
  uint64_t ending_versions_end_ = 0;
  bool is_nameless_ = false;
  bool closes_unused_ = false;
  uint64_t ids_end_ = uint64_t{1} << 63;
  std::function<uint64_t()> room_;
  std::map<uint64_t, std::unique_ptr<Segment>> segments_;
  std::unordered_map<uint64_t, Segment*> by_id_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  vfs::ReadLane lane_;          // of the calls that wait for their reads
  vfs::ReadLane staging_lane_;  // of staging, which goes on beside them
  LogStats stats_;

  std::mutex mutex_;  // guards the state and error of every Chunk, and writes_ended_
  uint64_t writes_ended_ = 0;
  std::condition_variable written_;
};

}  // namespace bunkbed
