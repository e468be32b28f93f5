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
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "format/format.h"
#include "vfs/batch_reads.h"
#include "vfs/file_cache.h"
#include "vfs/vfs.h"

namespace bunkbed {

// The bytes of the last read of a segment, so that neighbouring parts cost one read.
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
  uint64_t live = 0;         // records that are the newest of their row
  uint64_t tombstones = 0;   // ids deleted here; the segment stays while it has any
  bool is_sealed = true;
  bool needs_sync = false;   // has writes that no fdatasync covered
  bool is_new = false;       // its directory entry is not known to be durable
  bool is_ending = false;    // of the epoch being committed: the manifest will name it even without live records
  std::vector<ChunkTrailer> chunks;  // first to last, once known; 80 bytes for each chunk
  std::shared_ptr<vfs::CachedFile> file;
};

struct ReadRequest {
  uint64_t position;
  int64_t id;
  std::byte* payload;  // where its first bytes go
};

// A batch of reads that keeps its files open: it can run without the table's lock.
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
  // Keeps the files open until the reads have ended, because compaction may drop their segments meanwhile.
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
  uint64_t record_disk_bytes() const { return record_disk_bytes(stride_, memory_.chunk_bytes); }
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
  // The payload of a record that is still in memory, or null when it is on disk.
  const std::byte* pending(uint64_t position);
  // Reads and verifies records and copies the first `read_bytes` of each payload. The caller runs `meanwhile` while
  // other threads read. After an error no payload may be used.
  void read(std::vector<ReadRequest> requests, size_t read_bytes, const std::function<void()>& meanwhile);
  // read() in parts, for reads without the table's lock: plan_reads() and count_reads() require the lock, execute()
  // does not.
  ReadPlan plan_reads(std::vector<ReadRequest> requests);
  void execute(const ReadPlan& plan, size_t read_bytes, vfs::ReadLane* lane,
               const std::function<void()>& meanwhile) const;
  // Verifies the records of an extent that was read and copies their payloads. Any thread.
  void deliver(const ReadPlan& plan, size_t extent, const std::byte* data, size_t read_bytes) const;
  void count_reads(const ReadPlan& plan, double waited_s);
  vfs::ReadLane* staging_lane() { return &staging_lane_; }

  // Closes the open chunk and waits until every chunk is in its file (not yet durable). No epoch may be ending.
  void drain();
  // drain(); then the next append opens another segment, of the epoch then current.
  void rotate();

  // ---- The end of an epoch, in order:
  // Begins the next epoch. Reserves versions for `records` that append_ending() may add to the ending one.
  void begin_next_epoch(uint64_t records);
  uint64_t append_ending(int64_t id, const std::byte* payload);
  size_t append_ending(const Source* sources, size_t n, uint64_t* positions);
  // Whether an append finds a buffer without waiting and leaves one for other appends.
  bool has_free_buffers() { return spare_buffers() > 0; }
  // Records that can be appended without waiting, with a buffer left for other appends.
  size_t spare_records() { return spare_buffers() * (memory_.chunk_bytes / record_disk_bytes()); }
  // Ends append_ending(): hands the last chunk to its writer and seals the segment. Also called after a failed commit.
  void finish_ending();
  // Whether all chunks of the epochs up to this one are in their files. Tries failed writes again; throws their errors.
  bool is_written(uint64_t epoch);
  // Number of chunk writes that have ended; wait_for_write() waits until it differs from `seen`. Needs no table lock.
  uint64_t writes_ended();
  void wait_for_write(uint64_t seen);
  // Makes the epochs up to this one durable, once is_written(): unsynced(), then sync() without the table's lock
  // (Error(kSync) when it fails), then mark_synced().
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

  Segment& segment_of(uint64_t position);
  Segment* find_segment(uint64_t id);
  const std::map<uint64_t, std::unique_ptr<Segment>>& segments() const { return segments_; }
  // True while a chunk of the segment is not in its file yet.
  bool is_being_written(const Segment& segment);
  // Drops a segment from the log. `remove_file` false leaves the file for a commit that still names it.
  void forget_segment(uint64_t id, bool remove_file);
  uint64_t position(uint64_t segment, uint64_t slot) const { return segment * slots_per_segment_ + slot; }
  uint64_t slot_of(uint64_t position) const { return position % slots_per_segment_; }

  // The chunks of a segment, first to last, with verified trailers. Requires that all chunks are in the file.
  const std::vector<ChunkTrailer>& chunks(Segment& segment);
  // The reads of chunks() and of read_span(), without the table's lock, while the sealed segment stays in the log. Both
  // return the bytes they read. The caller installs the result and counts the bytes under the lock.
  uint64_t find_chunks(const Segment& segment, std::vector<ChunkTrailer>* found) const;
  uint64_t fetch_span(const Segment& segment, uint64_t begin, size_t bytes, Span* span) const;
  void count_read_bytes(uint64_t bytes) { stats_.read_bytes += bytes; }
  // Reads [begin, begin + bytes) of a segment, up to the segment's end, unless `span` holds it already. Then
  // read_index() and read_records() within these bytes read nothing.
  void read_span(Segment& segment, uint64_t begin, size_t bytes, Span* span);
  // read_index() refuses ids from `end` on, because its callers look them up in a directory of that size.
  void set_ids_end(uint64_t end) { ids_end_ = end; }
  // Ids and versions of a chunk, verified.
  void read_index(Segment& segment, const ChunkTrailer& chunk, Span* span, std::vector<int64_t>* ids,
                  std::vector<uint64_t>* versions);
  // Returns records [from, from + n) of a chunk, verified and stride() bytes apart, valid until `span` is used again.
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
  vfs::ReadLane lane_;          // of calls that wait for their reads
  vfs::ReadLane staging_lane_;  // of staging, which runs concurrently
  LogStats stats_;

  Mutex mutex_;  // guards also the state and error of every Chunk
  uint64_t writes_ended_ GUARDED_BY(mutex_) = 0;
  std::condition_variable written_;
};

}  // namespace bunkbed
