// What this machine allows: the figures that predictions and measurements are held against. Nothing of a table here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "vfs/vfs.h"

namespace bunkbed {

// Every thread copies between two arrays of its own, `bytes` in all; returns bytes a second, read and written together.
double probe_memory(size_t threads, size_t bytes, double seconds);

// What a loop does to each record it comes to: adds its bytes up, copies them behind those of the one before, or changes
// them where they lie.
enum class RowWork : uint8_t { kRead, kCopy, kChange };

// Records in memory as a table's frames are, and nothing else of a table: what a pass over some of them takes at least.
class RowProbe {
 public:
  // `record_bytes` from one record to the next.
  RowProbe(size_t num_records, size_t record_bytes);
  // Works on the first `used_bytes`, a multiple of 4, of each of these records, in this order, on as many threads as the
  // kernels use; returns the seconds it took.
  double run(const int64_t* rows, size_t n, size_t used_bytes, RowWork work);

 private:
  size_t num_records_;
  size_t record_bytes_;
  BlockVector<std::byte> records_;
  BlockVector<std::byte> copies_;
};

// Writes a new file from end to end in large blocks, past the page cache where the filesystem allows it, until the
// time is up or `max_bytes` are written, and syncs it. Returns (bytes a second, bytes written); leaves the file.
std::pair<double, size_t> probe_writes(vfs::Vfs& vfs, const std::string& path, size_t max_bytes, double seconds);

// Threads read random blocks of 4 KiB of these files, one after another, each file in proportion to its size.
// Returns (reads a second, the unit reads need here: 1 where they cannot go past the page cache).
std::pair<double, uint32_t> probe_reads(vfs::Vfs& vfs, const std::vector<std::string>& paths, size_t threads,
                                        double seconds);

}  // namespace bunkbed
