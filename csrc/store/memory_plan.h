// How a RAM budget is divided between the parts of a table: pure functions of the budget and the record.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "log/log.h"

namespace bunkbed {

// The alignment that reads need, while there is no file that reports it. No smaller one needs more memory.
inline constexpr size_t kAssumedReadUnit = 4096;

struct MemoryPlan {
  size_t total_bytes = 0;    // 0: without bound
  size_t payload_bytes = 0;  // the facts from which it was made
  uint64_t slots_per_segment = 0;
  size_t read_unit = 0;
  bool has_log = true;
  LogMemory log;
  size_t compaction_bytes = 0;
  size_t scratch_bytes = 0;  // unique ids, gradient sums, copies of rows
  size_t fixed_bytes = 0;    // all of the above and threads; the rest: directory, window, frames
};
// `has_log` false: a table in RAM only. `read_unit`: the alignment that reads need.
MemoryPlan plan_memory(size_t total_bytes, size_t payload_bytes, uint64_t slots_per_segment, size_t read_unit,
                       bool has_log);
// The smallest budget that leaves `others` bytes to directory and frames, as does every larger one.
size_t smallest_budget(size_t others, size_t payload_bytes, uint64_t slots_per_segment, size_t read_unit, bool has_log);
// No plan has smaller chunks.
inline constexpr size_t kSmallestChunk = 16u << 10;
inline size_t smallest_chunk_bytes(size_t stride) {
  return vfs::round_up(std::max(kSmallestChunk, 2 * stride + 2 * vfs::kBlockBytes), vfs::kBlockBytes);
}
// The fewest frames with which a table works.
inline constexpr size_t kMinFrames = 16;
// The most bytes of a directory, so that the fewest frames have room. `frame_bytes`: of a record in a frame.
size_t most_directory_bytes(const MemoryPlan& plan, size_t frame_bytes);

}  // namespace bunkbed
