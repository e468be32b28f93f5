// Every stored row once, in log order: chunk by chunk with large sequential reads.
//
// 1. The chunks that come next are read ahead, several at once, each whole with one read: a disk asked for one at a time
//    gives a third of what it can.
// 2. Which records of a chunk are the newest of their rows is settled when the scan comes to it, under the table's lock,
//    and only then are they verified. What was read ahead is bytes and no more: the rows and their order do not depend on
//    when a read ends.
// 3. Rows whose frames hold what is asked are copied from there, wherever the scan comes to their records: order and bits
//    are the log's. While all stored rows are in RAM, no more than the chunks' indexes is read. What has left RAM when the
//    scan comes to it is read then.
// 4. A read ahead that failed, or that nobody began, is left out: the chunk is then read by whoever comes to it, and what
//    that meets is the scan's error. So a part that nobody needs cannot end a scan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "table/table.h"

namespace bunkbed {

// Walks every stored row once, in log order. Fails when the table is changed meanwhile.
class Scan {
 public:
  // Of each row these fields.
  Scan(Table* table, std::vector<size_t> fields);
  ~Scan();
  Scan(const Scan&) = delete;
  Scan& operator=(const Scan&) = delete;
  // Up to n rows; 0 at the end. values: for each field (n, its length).
  size_t next(size_t n, int64_t* ids, std::span<float* const> values);

 private:
  struct ReadAhead;
  bool is_in_frames() const;
  void read_ahead();
  void take(const Segment& segment, const ChunkTrailer& chunk);
  void copy(const std::byte* record, size_t row, std::span<float* const> values) const;

  Table::Parts& parts_;
  TableState& table_;
  const std::vector<size_t> fields_;
  bool is_in_frames_ = false;
  uint64_t changes_;
  uint64_t moves_ = 0;  // records that compaction had moved when the scan began
  std::vector<uint64_t> segments_;
  size_t segment_ = 0;
  std::vector<ChunkTrailer> chunks_;
  size_t chunk_ = 0;
  size_t record_ = 0;
  bool has_chunks_ = false;
  std::vector<int64_t> ids_;
  std::vector<uint64_t> versions_;
  std::vector<Entry> entries_;
  Span span_;
  std::deque<std::shared_ptr<ReadAhead>> ahead_;  // in the order of the scan
  Span spare_;  // memory for the next one
  const int owner_pid_;
  uint32_t frame_ = 0;
};

}  // namespace bunkbed
