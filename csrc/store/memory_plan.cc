#include "store/memory_plan.h"

#include "cache/cache.h"

namespace bunkbed {

namespace {

// Budgets within a step have the same buffers.
constexpr size_t kBudgetStep = 4096;

}  // namespace

MemoryPlan plan_memory(size_t total_bytes, size_t payload_bytes, uint64_t slots_per_segment, size_t read_unit,
                       bool has_log) {
  constexpr size_t kUnbounded = size_t{64} << 30;
  const size_t total = total_bytes == 0 ? kUnbounded : vfs::round_down(total_bytes, kBudgetStep);
  MemoryPlan plan;
  plan.total_bytes = total_bytes;
  plan.payload_bytes = payload_bytes;
  plan.slots_per_segment = slots_per_segment;
  plan.read_unit = read_unit;
  plan.has_log = has_log;
  const size_t stride = record_stride(payload_bytes);
  // An eighth of a small budget. 32 MiB suffice for 350,000 ids, or for the gradient sums of 65,536 distinct rows of
  // dim 64. More scratch would gain less than frames do, except in a large budget, which has frames enough.
  const size_t enough = std::clamp<size_t>(total / 32, 32u << 20, 256u << 20);
  plan.scratch_bytes = std::max({std::min<size_t>(total / 8, enough), size_t{48} << 10, 8 * payload_bytes});
  if (!has_log) {
    plan.log.chunk_bytes = plan.log.num_chunks = plan.log.num_read_slices = 0;
    plan.fixed_bytes = total_bytes == 0 ? 0 : plan.scratch_bytes;
    return plan;
  }
  const size_t smallest_chunk = 2 * stride + 2 * vfs::kBlockBytes;
  const size_t largest_chunk = std::max(smallest_chunk, slots_per_segment * stride / 4);
  // A 96th of the budget within 16 KiB and 1 MiB, and at most a quarter of a segment; but at least two records. A small
  // budget gives a 48th, because many small writes cost processor time (docs/design/notes/train-order.md).
  const size_t of_small = std::min<size_t>(total / 48, 32u << 10);
  const size_t wished = std::min({std::max({total / 96, of_small, kSmallestChunk}), size_t{1} << 20, largest_chunk});
  plan.log.chunk_bytes = vfs::round_up(std::max(smallest_chunk, wished), vfs::kBlockBytes);
  plan.log.num_chunks =
      3 + std::min<size_t>(std::max<size_t>(total, 256u << 20) - (256u << 20), 24u << 20) / (8u << 20);
  // A slice holds one record at any offset; a read of several records takes several slices. 4 MiB suffice for the full
  // rate of a device, with 16 reads of 256 KiB. A small budget has fewer, and smaller ones. Where reads need a smaller
  // alignment, as many bytes have more slices.
  const size_t largest_slice = vfs::round_up(stride + kAssumedReadUnit, kAssumedReadUnit);
  const size_t num_largest = std::max(std::clamp<size_t>(total / 16 / largest_slice, 4, 64),
                                      std::min<size_t>(total / 32, 4u << 20) / largest_slice);
  plan.log.read_slice_bytes = vfs::round_up(stride + read_unit, std::max<size_t>(read_unit, 512));
  plan.log.num_read_slices = std::max<size_t>(4, num_largest * largest_slice / plan.log.read_slice_bytes);
  plan.compaction_bytes = std::max(plan.log.chunk_bytes, std::min<size_t>(total / 24, 1u << 20)) + 2 * vfs::kBlockBytes;
  // The stacks of the read threads, and memory that the allocator keeps: measured 1.5 MiB. Small budgets have few
  // threads and do not count it.
  const size_t threads_bytes = std::min<size_t>((std::max<size_t>(total, 8u << 20) - (8u << 20)) / 4, 2u << 20);
  plan.fixed_bytes = plan.log.total(stride) + plan.compaction_bytes + plan.scratch_bytes + threads_bytes;
  return plan;
}

size_t most_directory_bytes(const MemoryPlan& plan, size_t frame_bytes) {
  if (plan.total_bytes == 0) return ~size_t{0};
  const size_t others = plan.fixed_bytes + kMinFrames * Cache::frame_cost(frame_bytes);
  return plan.total_bytes > others ? plan.total_bytes - others : 0;
}

size_t smallest_budget(size_t others, size_t payload_bytes, uint64_t slots_per_segment, size_t read_unit,
                       bool has_log) {
  const auto plan = [&](size_t total) {
    return plan_memory(total, payload_bytes, slots_per_segment, read_unit, has_log);
  };
  // The buffers grow with the budget, so this is a fixed point.
  size_t smallest = 1;
  for (size_t needed = 0;; smallest = needed) {
    needed = plan(smallest).fixed_bytes + others;
    if (needed <= smallest) break;
  }
  // A step may add a chunk, a slice, or a block to each chunk. Beyond the slack that any step takes, none is too large.
  for (size_t total = vfs::round_up(smallest, kBudgetStep);; total += kBudgetStep) {
    const MemoryPlan here = plan(total);
    const size_t needed = here.fixed_bytes + others;
    if (needed > total) smallest = std::min(needed, total + kBudgetStep);
    const size_t step = has_log ? 2 * here.log.chunk_bytes + 16 * vfs::kBlockBytes + 4 * here.log.read_slice_bytes : 0;
    if (needed + step <= total) return smallest;
  }
}

}  // namespace bunkbed
