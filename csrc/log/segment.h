// The segments of a log, and the facts that all parts of the log share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "format/format.h"
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
  uint64_t bytes = 0;             // end of the last complete chunk handed to a writer
  uint64_t records = 0;           // data records ever appended
  uint64_t live = 0;              // records that are the newest of their row
  uint64_t tombstones = 0;        // ids deleted here; the segment stays while it has any
  uint64_t counts = 0;            // counts of ids here, newest ones or not; the segment stays while it has any
  uint64_t oldest_tombstone = 0;  // a lower bound of their versions
  bool is_sealed = true;
  bool needs_sync = false;  // has writes that no fdatasync covered
  bool is_new = false;      // its directory entry is not known to be durable
  bool is_ending = false;   // of the epoch being committed: the manifest will name it even without live records
  std::vector<ChunkTrailer> chunks;  // first to last, once known; 80 bytes for each chunk
  std::shared_ptr<vfs::CachedFile> file;
  uint64_t others() const { return tombstones + counts; }  // what it has without a record
};

struct LogStats {
  uint64_t reads = 0;       // reads issued (neighbouring records share one)
  uint64_t read_bytes = 0;  // of those reads
  // The records read alone, with neighbours, and by a read that goes on where the one before it ends
  uint64_t single_records = 0, merged_records = 0, swept_records = 0;
  uint64_t read_records() const { return single_records + merged_records + swept_records; }
  uint64_t written_bytes = 0;  // chunks, headers included
  uint64_t written_records = 0;
  uint64_t written_tombstones = 0;
  uint64_t written_counts = 0;
  uint64_t appended() const { return written_records + written_tombstones + written_counts; }
  double read_wait_s = 0.0;
};

// What a log is made of; never changes.
struct LogLayout {
  std::string directory;
  Uuid uuid;
  uint32_t crc_seed;
  size_t payload_bytes;
  size_t stride;  // bytes from one record to the next
  uint64_t slots_per_segment;

  uint64_t segment_bytes() const { return slots_per_segment * stride; }
  uint64_t position(uint64_t segment, uint64_t slot) const { return segment * slots_per_segment + slot; }
  uint64_t slot_of(uint64_t position) const { return position % slots_per_segment; }
  // Throws Error(kCorruption) when the checksum of a record does not match it and its id.
  void verify(int64_t id, const std::byte* record, const vfs::File& file, uint64_t slot) const;
};

// The segments of a log by number. Requires the table's lock.
class Segments {
 public:
  using ById = std::map<uint64_t, std::unique_ptr<Segment>>;
  const ById& all() const { return all_; }
  // Null when there is none.
  Segment* find(uint64_t id) const {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : found->second;
  }
  // Of a record. Throws Error(kCorruption) when the log has no such segment.
  Segment& at(const LogLayout& layout, uint64_t position) const;
  void add(std::unique_ptr<Segment> segment);
  void erase(uint64_t id);
  void clear();

 private:
  ById all_;
  std::unordered_map<uint64_t, Segment*> by_id_;
};

}  // namespace bunkbed
