// Reads of many records at once, in the order of their positions, each verified. Reads are planned by cost:
// neighbouring records share a read where the bytes between them take less of the device's time than one more read.
// Where a batch wants many records of a segment, its reads so become a sweep over the segment. Each call requires the
// table's lock unless its comment says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "log/segment.h"
#include "vfs/batch_reads.h"

namespace bunkbed {

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
    bool is_sweep;  // begins where the extent before it ends
  };
  std::vector<ReadRequest> requests;  // by position
  std::vector<Extent> extents;
  // Keeps the files open until the reads have ended, because compaction may drop their segments meanwhile.
  std::vector<std::shared_ptr<vfs::File>> held;
  uint64_t bytes = 0;
};

// How many bytes a device of common rates reads in the time of one more read: at 100,000 reads and 2 GB a second.
inline constexpr size_t kReadGap = 16u << 10;

class RecordReads {
 public:
  // All outlive this; `stats` counts the reads.
  RecordReads(const LogLayout& layout, const Segments& segments, LogStats* stats)
      : layout_(layout), segments_(segments), stats_(stats) {}
  RecordReads(const RecordReads&) = delete;
  RecordReads& operator=(const RecordReads&) = delete;
  // The memory of the reads. Requires that none is under way.
  void resize(size_t slice_bytes, size_t num_slices);
  // The most bytes between two records that share a read.
  void set_gap(size_t bytes) { gap_bytes_ = bytes; }

  // Plans the reads of records. Compaction may drop their segments before they are read: the plan keeps the files open.
  ReadPlan plan(std::vector<ReadRequest> requests);
  // Reads and verifies records and copies the first `read_bytes` of each payload. The caller runs `meanwhile` while
  // other threads read. After an error no payload may be used.
  void read(const ReadPlan& plan, size_t read_bytes, const std::function<void()>& meanwhile);
  // read() in parts, for reads without the table's lock: count() requires the lock, execute() does not.
  void execute(const ReadPlan& plan, size_t read_bytes, vfs::ReadLane* lane,
               const std::function<void()>& meanwhile) const;
  // Verifies the records of an extent that was read and copies their payloads. Any thread.
  void deliver(const ReadPlan& plan, size_t extent, const std::byte* data, size_t read_bytes) const;
  // The same for an extent whose read failed: reads its records one by one, because the error may be in the bytes
  // between them. Throws the error of the first record that cannot be read.
  void read_alone(const ReadPlan& plan, size_t extent, size_t read_bytes) const;
  void count(const ReadPlan& plan, double waited_s);
  vfs::ReadLane* staging_lane() { return &staging_lane_; }

 private:
  const LogLayout& layout_;
  const Segments& segments_;
  LogStats* const stats_;
  size_t gap_bytes_ = kReadGap;
  vfs::ReadLane lane_;          // of calls that wait for their reads
  vfs::ReadLane staging_lane_;  // of staging, which runs concurrently
};

}  // namespace bunkbed
