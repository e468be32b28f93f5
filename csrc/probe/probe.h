// Rates of this machine, with which predictions and measurements are compared. Independent of tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "vfs/vfs.h"

namespace bunkbed {

// Each thread copies between two arrays of its own, `bytes` in all. Returns bytes a second, read and written together.
double probe_memory(size_t threads, size_t bytes, double seconds);

// What a loop does with each record: adds it to a sum, copies it behind the one before, or changes it in place.
enum class RowWork : uint8_t { kRead, kCopy, kChange };

// Records in memory like a table's frames, without a table: the least time that a pass over some records takes.
class RowProbe {
 public:
  // Records are `record_bytes` apart.
  RowProbe(size_t num_records, size_t record_bytes);
  // Works on the first `used_bytes`, a multiple of 4, of each of these records, in this order, on as many threads as
  // the kernels use. Returns the seconds that this takes.
  double run(const int64_t* rows, size_t n, size_t used_bytes, RowWork work);

 private:
  size_t num_records_;
  size_t record_bytes_;
  BlockVector<std::byte> records_;
  BlockVector<std::byte> copies_;
};

// Writes a new file from start to end in large blocks, without the page cache where the filesystem allows it, until the
// time is up or `max_bytes` are written, and syncs it. Returns (bytes a second, bytes written). The file stays.
std::pair<double, size_t> probe_writes(vfs::Vfs& vfs, const std::string& path, size_t max_bytes, double seconds);

// Threads read random blocks of `block_bytes`, a multiple of 4 KiB, of these files, one after another, each file in
// proportion to its size. Returns (reads a second, the alignment that reads need: 1 where they use the page cache).
std::pair<double, uint32_t> probe_reads(vfs::Vfs& vfs, const std::vector<std::string>& paths, size_t threads,
                                        double seconds, size_t block_bytes);

}  // namespace bunkbed
