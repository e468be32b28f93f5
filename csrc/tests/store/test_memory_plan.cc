// The division of a RAM budget: what the parts sum to, and what a larger budget changes.
#include "store/memory_plan.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cache/cache.h"
#include "directory/directory.h"
#include "format/record.h"
#include "state/table_spec.h"
#include "tests/check.h"

using namespace bunkbed;

namespace {

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

struct Shape {
  TableSpec spec;
  size_t payload;
  size_t stride;
  uint64_t slots;
};

// Records up to 192 KiB. With records of more than 300 KiB the steps of the plan at 16 MiB and 256 MiB exceed what the
// smallest budget leaves.
std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const int64_t num_rows : {int64_t{-1}, int64_t{1}, int64_t{1000}, int64_t{300'000}, int64_t{8'000'000}}) {
    for (const uint32_t dim : {1u, 16u, 64u, 300u, 1024u, 8192u, 16'384u}) {
      Shape shape;
      shape.spec.num_rows = num_rows;
      shape.spec.dim = dim;
      shape.spec.optimizer.kind = dim % 2 == 0 ? OptimizerKind::kAdam : OptimizerKind::kSgd;
      shape.payload = record_payload(fields_of(shape.spec));
      shape.stride = record_stride(shape.payload);
      shape.slots = slots_per_segment(shape.spec, shape.payload);
      all.push_back(shape);
    }
  }
  return all;
}

// Each about a seventieth more than the one before, so that they come close to every step of the plan.
std::vector<size_t> budgets(size_t from, size_t to = 100 * kGiB) {
  std::vector<size_t> all;
  for (size_t budget = from; budget < to; budget += budget / 70 + 1) all.push_back(budget);
  for (const size_t step : {16 * kMiB, 256 * kMiB, kGiB}) {
    for (const size_t near : {step - 1, step}) {
      if (near >= from) all.push_back(near);
    }
  }
  std::sort(all.begin(), all.end());
  return all;
}

void require(bool holds, const std::string& what, const Shape& shape, size_t budget) {
  if (holds) return;
  test::fail(__FILE__, __LINE__,
             what + ": dim " + std::to_string(shape.spec.dim) + ", " + std::to_string(shape.spec.num_rows) +
                 " rows, budget " + std::to_string(budget));
}

// Without the default of a field that no log uses.
size_t log_bytes(const MemoryPlan& plan, size_t stride) {
  const size_t index = plan.log.chunk_bytes / stride * 16;
  return plan.log.num_chunks * (plan.log.chunk_bytes + index) +
         2 * plan.log.num_read_slices * plan.log.read_slice_bytes;
}

}  // namespace

TEST(memory_plan_parts_never_exceed_the_budget_from_the_minimum_up) {
  for (const Shape& shape : shapes()) {
    for (const bool on_disk : {true, false}) {
      const size_t minimum = minimum_ram(shape.spec, 0, on_disk);
      for (const size_t budget : budgets(minimum)) {
        const MemoryPlan plan = plan_memory(budget, shape.payload, shape.slots, kAssumedReadUnit, on_disk);
        CHECK_EQ(plan.total_bytes, budget);
        const size_t steps = vfs::round_down(budget, 4096);
        const size_t threads = on_disk && steps > 8 * kMiB ? std::min(2 * kMiB, (steps - 8 * kMiB) / 4) : 0;
        const size_t parts = log_bytes(plan, shape.stride) + plan.compaction_bytes + plan.scratch_bytes + threads;
        require(plan.fixed_bytes == parts, "the fixed bytes are not the sum of the parts", shape, budget);
        const auto num_rows = static_cast<uint64_t>(shape.spec.num_rows);
        const bool is_all_flat = is_flat(shape.spec, plan, shape.payload);
        const size_t directory = shape.spec.num_rows < 0 ? hashed_directory_bytes(0)
                                 : is_all_flat           ? flat_directory_bytes(num_rows)
                                                         : bounded_directory_bytes(num_rows, 0);
        require(parts + directory + kMinFrames * Cache::frame_cost(shape.payload) <= budget,
                "no room is left for the rows", shape, budget);
      }
    }
  }
}

TEST(memory_plan_of_a_larger_budget_has_no_smaller_part) {
  for (const Shape& shape : shapes()) {
    for (const bool on_disk : {true, false}) {
      MemoryPlan before;
      before.log = {0, 0, 0, 0};
      for (const size_t budget : budgets(64 * kKiB)) {
        const MemoryPlan plan = plan_memory(budget, shape.payload, shape.slots, kAssumedReadUnit, on_disk);
        require(plan.scratch_bytes >= before.scratch_bytes, "less scratch", shape, budget);
        require(plan.compaction_bytes >= before.compaction_bytes, "a smaller buffer of the compactor", shape, budget);
        require(plan.log.chunk_bytes >= before.log.chunk_bytes, "smaller chunks", shape, budget);
        require(plan.log.num_chunks >= before.log.num_chunks, "fewer chunks", shape, budget);
        require(plan.log.num_read_slices * plan.log.read_slice_bytes + plan.log.read_slice_bytes >=
                    before.log.num_read_slices * before.log.read_slice_bytes,
                "less memory for reads", shape, budget);
        require(plan.fixed_bytes >= before.fixed_bytes, "less in all", shape, budget);
        before = plan;
      }
    }
  }
}

// But for the two steps of the plan, the frames get more, too.
TEST(memory_plan_leaves_more_for_rows_when_the_budget_grows) {
  for (const Shape& shape : shapes()) {
    for (const bool on_disk : {true, false}) {
      const size_t minimum = minimum_ram(shape.spec, 0, on_disk);
      size_t left = 0, before = 0;
      for (const size_t budget : budgets(minimum)) {
        const MemoryPlan plan = plan_memory(budget, shape.payload, shape.slots, kAssumedReadUnit, on_disk);
        const bool is_step =
            (before < 16 * kMiB && budget >= 16 * kMiB) || (before < 256 * kMiB && budget >= 256 * kMiB);
        // Whole chunks and slices: a byte more may bring a block more of each chunk, or a slice more.
        const size_t rounding = (plan.log.num_chunks + 1) * 2 * vfs::kBlockBytes + 2 * plan.log.read_slice_bytes;
        require(is_step || budget - plan.fixed_bytes + rounding >= left, "less is left for rows", shape, budget);
        left = budget - plan.fixed_bytes;
        before = budget;
      }
    }
  }
}

TEST(memory_plan_gives_buffers_the_sizes_that_their_users_need) {
  for (const Shape& shape : shapes()) {
    for (const size_t read_unit : {size_t{1}, size_t{512}, size_t{4096}}) {
      for (const size_t budget : budgets(32 * kKiB, 2 * kGiB)) {
        const MemoryPlan plan = plan_memory(budget, shape.payload, shape.slots, read_unit, true);
        const LogMemory& log = plan.log;
        require(log.chunk_bytes % vfs::kBlockBytes == 0, "a chunk of broken blocks", shape, budget);
        // The largest gap before the first record, a record, its index, the trailer and its alignment.
        require(log.chunk_bytes >= shape.stride - 8 + shape.stride + 16 + kChunkTrailerBytes + 8,
                "a chunk holds no record", shape, budget);
        require(log.num_chunks >= 3 && log.num_read_slices >= 4, "too few buffers", shape, budget);
        require(plan.compaction_bytes >= log.chunk_bytes + 2 * vfs::kBlockBytes, "the compactor cannot hold a chunk",
                shape, budget);
        require(plan.scratch_bytes >= 8 * shape.payload, "scratch of few records", shape, budget);
        const size_t read_bytes = 2 * log.num_read_slices * log.read_slice_bytes;
        const size_t least = 2 * 4 * vfs::round_up(shape.stride + kAssumedReadUnit, kAssumedReadUnit);
        require(read_bytes <= std::max(least, budget / 8), "too much memory for reads", shape, budget);
        require(budget < kGiB || shape.stride > 8192 || log.num_read_slices >= 128, "few reads at once", shape, budget);
        require(log.read_slice_bytes % read_unit == 0, "a slice of broken reads", shape, budget);
        for (size_t at = 0; at < read_unit; at += 8) {  // where a record may begin within the unit of reads
          require(vfs::round_up(at + shape.stride, read_unit) <= log.read_slice_bytes, "a slice holds no record", shape,
                  budget);
        }
      }
    }
  }
}

// The unit of reads is known only when there is a file.
TEST(memory_plan_of_the_wanted_budget_has_room_for_every_row) {
  for (const Shape& shape : shapes()) {
    if (shape.spec.num_rows < 0) continue;
    const size_t wanted = wanted_ram(shape.spec, true);
    const auto rows = static_cast<uint64_t>(shape.spec.num_rows);
    for (const size_t read_unit : {size_t{1}, size_t{512}, size_t{4096}}) {
      require(memory_use(shape.spec, rows, wanted, read_unit, true).frames >= rows, "a row without a frame", shape,
              wanted);
    }
  }
}

TEST(memory_plan_without_a_log_has_no_log_memory) {
  for (const Shape& shape : shapes()) {
    for (const size_t budget : budgets(64 * kKiB)) {
      const MemoryPlan plan = plan_memory(budget, shape.payload, 1, kAssumedReadUnit, false);
      CHECK_EQ(plan.log.total(shape.stride), size_t{0});
      CHECK_EQ(plan.log.chunk_bytes, size_t{0});
      CHECK_EQ(plan.compaction_bytes, size_t{0});
      CHECK_EQ(plan.fixed_bytes, plan.scratch_bytes);
    }
  }
  const MemoryPlan unbounded = plan_memory(0, 100, 1, kAssumedReadUnit, false);
  CHECK_EQ(unbounded.total_bytes, size_t{0});
  CHECK_EQ(unbounded.fixed_bytes, size_t{0});
  CHECK(unbounded.scratch_bytes >= 32 * kMiB);
}

// 0 is no bound, not a budget of nothing.
TEST(memory_plan_without_bound_is_that_of_a_large_budget) {
  const Shape shape = shapes()[2];
  const MemoryPlan unbounded = plan_memory(0, shape.payload, shape.slots, 512, true);
  const MemoryPlan large = plan_memory(64 * kGiB, shape.payload, shape.slots, 512, true);
  CHECK_EQ(unbounded.total_bytes, size_t{0});
  CHECK_EQ(unbounded.fixed_bytes, large.fixed_bytes);
  CHECK_EQ(unbounded.scratch_bytes, large.scratch_bytes);
  CHECK_EQ(unbounded.log.num_read_slices, large.log.num_read_slices);
}

// What a disk limit may shrink chunks to is what the smallest budgets have.
TEST(memory_plan_has_no_chunks_below_the_smallest) {
  for (const Shape& shape : shapes()) {
    const size_t smallest = smallest_chunk_bytes(shape.stride);
    CHECK_EQ(plan_memory(1, shape.payload, shape.slots, 512, true).log.chunk_bytes, smallest);
    for (const size_t budget : budgets(64 * kKiB)) {
      require(plan_memory(budget, shape.payload, shape.slots, 512, true).log.chunk_bytes >= smallest, "a smaller chunk",
              shape, budget);
    }
  }
  CHECK_EQ(smallest_chunk_bytes(8), kSmallestChunk);
  CHECK_EQ(smallest_chunk_bytes(4096), kSmallestChunk);
  CHECK_EQ(smallest_chunk_bytes(4104), size_t{20} * kKiB);
  CHECK_EQ(smallest_chunk_bytes(100'000), vfs::round_up(208'192, vfs::kBlockBytes));
}

// A small budget gives a larger part to chunks, up to 32 KiB, because small writes cost processor time.
TEST(memory_plan_of_a_small_budget_writes_chunks_of_a_48th) {
  constexpr uint64_t kManySlots = 1u << 20;
  const auto chunk_of = [](size_t budget) { return plan_memory(budget, 768, kManySlots, 512, true).log.chunk_bytes; };
  CHECK_EQ(chunk_of(512 * kKiB), kSmallestChunk);
  CHECK_EQ(chunk_of(48 * 32 * kKiB), 32 * kKiB);
  CHECK_EQ(chunk_of(48 * 64 * kKiB), 32 * kKiB);
  CHECK_EQ(chunk_of(96 * 32 * kKiB), 32 * kKiB);
  CHECK_EQ(chunk_of(96 * 80 * kKiB), 80 * kKiB);
}

// A chunk is at most a quarter of a segment, so that the segments of small tables are not mostly one chunk.
TEST(memory_plan_chunks_are_a_part_of_a_segment) {
  for (const Shape& shape : shapes()) {
    for (const size_t budget : budgets(kMiB)) {
      const size_t chunk = plan_memory(budget, shape.payload, shape.slots, 512, true).log.chunk_bytes;
      const size_t most =
          std::max(smallest_chunk_bytes(shape.stride), shape.slots * shape.stride / 4 + vfs::kBlockBytes);
      require(chunk <= most && chunk <= std::max<size_t>(kMiB, smallest_chunk_bytes(shape.stride)), "a large chunk",
              shape, budget);
    }
  }
}

// One figure for create, open, plan and messages: it works, as does every larger budget, and much less does not.
TEST(memory_plan_of_the_minimum_has_room_for_the_rows_it_is_for) {
  for (const Shape& shape : shapes()) {
    const auto num_rows = static_cast<uint64_t>(std::max<int64_t>(shape.spec.num_rows, 0));
    for (const uint64_t stored : {uint64_t{0}, num_rows / 20, num_rows / 4, num_rows}) {
      const size_t minimum = minimum_ram(shape.spec, stored, true);
      const auto works = [&](size_t budget, size_t unit) {
        const MemoryUse use = memory_use(shape.spec, stored, budget, unit, true);
        return use.fixed_bytes + use.directory_bytes + kMinFrames * use.frame_bytes <= budget;
      };
      std::vector<size_t> larger = budgets(minimum);
      for (size_t more = 1; more < 4 * kMiB; more = more * 5 / 4 + 1) larger.push_back(minimum + more);
      for (const size_t budget : larger) {
        for (const size_t unit : {size_t{1}, size_t{512}, size_t{4096}}) {
          require(works(budget, unit), "no room for the rows of the minimum", shape, budget);
        }
      }
      if (stored > 0 && stored == num_rows && minimum > 4 * kMiB) {
        require(!works(minimum - minimum / 8, 4096), "the minimum is too large", shape, minimum);
      }
    }
  }
}

TEST(memory_plan_knows_how_many_rows_a_budget_can_store) {
  for (const Shape& shape : shapes()) {
    const auto most = shape.spec.num_rows < 0 ? ~uint64_t{0} : static_cast<uint64_t>(shape.spec.num_rows);
    for (const bool on_disk : {true, false}) {
      for (const size_t budget : {1 * kMiB, 37 * kMiB, 5 * kGiB}) {
        const uint64_t rows = rows_within(shape.spec, budget, on_disk);
        if (rows > 0) require(minimum_ram(shape.spec, rows, on_disk) <= budget, "too many rows", shape, budget);
        if (rows < most) require(minimum_ram(shape.spec, rows + 1, on_disk) > budget, "too few rows", shape, budget);
      }
    }
    CHECK(rows_within(shape.spec, 0, true) >= std::min(most, kMaxPosition));
  }
}

// What create() tells a caller is what the table then stores: with a flat directory, or with one that grows with rows.
TEST(memory_plan_in_ram_has_a_frame_for_each_row_that_it_promises) {
  for (const Shape& shape : shapes()) {
    for (const size_t budget : budgets(minimum_ram(shape.spec, 0, false))) {
      const uint64_t rows = rows_within(shape.spec, budget, false);
      require(memory_use(shape.spec, rows, budget, kAssumedReadUnit, false).frames >= rows,
              "fewer frames than " + std::to_string(rows) + " rows", shape, budget);
    }
  }
}
