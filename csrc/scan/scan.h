// Reads every stored row once, in log order: chunk by chunk with large sequential reads.
//
// 1. The next chunks are read ahead, several at once, each with one read. A disk with one read at a time reaches a
//    third of its throughput.
// 2. When the scan reaches a chunk, it decides under the table's lock which records are the newest of their rows, and
//    then verifies these. A read ahead delivers only bytes, so the rows and their order do not depend on when a read
//    ends.
// 3. When the scan reaches a record whose row has a frame with the wanted fields, it copies the frame. Order and bits
//    are those of the log. While all stored rows are in RAM, only the chunks' indexes are read. The records of rows
//    that were evicted meanwhile are then read when the scan reaches them.
// 4. A read ahead that failed or was not started is ignored: the scan reads the chunk when it reaches it, and reports
//    the errors of that read. So an error in a part that the scan does not need cannot end the scan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "table/table.h"

namespace bunkbed {

// Walks every stored row once, in log order. Fails when the table is changed meanwhile.
class Scan {
 public:
  // Returns these fields of each row, or with no fields its whole record. Takes the lock.
  Scan(Table* table, const std::vector<size_t>& fields);
  ~Scan();
  Scan(const Scan&) = delete;
  Scan& operator=(const Scan&) = delete;
  // Returns up to n rows; 0 at the end. values: for each field (n, its length). Takes the lock.
  size_t next(size_t n, int64_t* ids, std::span<float* const> values);
  // The same for whole records: (n, payload_bytes). Requires a scan of no fields.
  size_t next_records(size_t n, int64_t* ids, std::byte* records);
  // Calls visit(id, record) for up to n rows, under the lock; returns their number, 0 at the end. A record has at least
  // the bytes up to the end of the wanted fields.
  using Visit = std::function<void(int64_t id, const std::byte* record)>;
  size_t visit(size_t n, const Visit& visit);
  uint64_t changes() const { return changes_; }  // of the table, as Table::changes() counts them

 private:
  struct ReadAhead;  // all methods below require the lock
  void read_ahead() REQUIRES(table_.lock);
  void take(const Segment& segment, const ChunkTrailer& chunk) REQUIRES(table_.lock);

  TableParts& parts_;
  TableState& table_;
  std::vector<Field> fields_;
  bool is_in_frames_ = false;
  uint64_t changes_;
  uint64_t moves_ = 0;  // Compactor::records_moved() when the scan began
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
  std::vector<vfs::Buffer> spare_;                // memory for the next reads ahead
  const int owner_pid_;
  uint32_t frame_ = 0;
};

}  // namespace bunkbed
