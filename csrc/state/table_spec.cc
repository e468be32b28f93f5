#include "state/table_spec.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "format/record.h"
#include "store/compactor.h"
#include "store/memory_plan.h"

namespace bunkbed {

namespace {

constexpr size_t kMaxPayload = size_t{1} << 30;

// The number of rows whose directory the smallest budget must hold: all rows of the table when these need little
// memory, otherwise the stored rows and 4096 new ones.
uint64_t rows_to_hold(const TableSpec& spec, uint64_t stored_rows) {
  constexpr size_t kLittle = 16u << 20;
  if (spec.num_rows >= 0 && hashed_directory_bytes(static_cast<uint64_t>(spec.num_rows)) <= kLittle) {
    return static_cast<uint64_t>(spec.num_rows);
  }
  return stored_rows + 4096;
}

}  // namespace

void check_record_size(uint32_t dim) {
  if (size_t{dim} * 12 + 16 > kMaxPayload) {
    throw Error(ErrorKind::kInvalid, "dim " + std::to_string(dim) + " makes records larger than 1 GiB");
  }
}

TableSpec spec_of(const Manifest& manifest) {
  TableSpec spec;
  spec.num_rows = manifest.num_rows;
  spec.dim = manifest.dim;
  spec.dtype = manifest.dtype();
  spec.init = manifest.init;
  spec.optimizer = manifest.optimizer;
  spec.belongs_to_run = (manifest.writer_flags & kWriterFlagRun) != 0;
  spec.is_scratch = (manifest.reader_flags & kReaderFlagScratch) != 0;
  return spec;
}

std::vector<Field> fields_of(const TableSpec& spec) { return record_fields(spec.dim, spec.dtype, spec.optimizer); }

uint64_t slots_per_segment(const TableSpec& spec, size_t payload_bytes) {
  const size_t stride = record_stride(payload_bytes);
  const uint64_t rows = spec.num_rows < 0 ? (uint64_t{64} * 64 << 20) / stride : static_cast<uint64_t>(spec.num_rows);
  const long double part = static_cast<long double>(rows) * static_cast<long double>(stride) / 64;
  const auto bytes = static_cast<uint64_t>(std::clamp<long double>(part, 1 << 20, 256 << 20));
  return std::max<uint64_t>({bytes / stride, (16 * stride + kSegmentHeaderBytes) / stride + 1});
}

bool is_flat(int64_t num_rows, size_t ram_bytes) {
  if (num_rows < 0) return false;
  const size_t budget = ram_bytes == 0 ? size_t{4} << 30 : ram_bytes;
  return flat_directory_bytes(static_cast<uint64_t>(num_rows)) <= budget / 4;
}

size_t minimum_ram(const TableSpec& spec, uint64_t stored_rows, bool on_disk) {
  const size_t payload = record_payload(fields_of(spec));
  const uint64_t slots = slots_per_segment(spec, payload);
  // Parts of the plan grow with the budget, so the smallest budget that holds a directory is a fixed point.
  const auto smallest = [&](size_t directory, size_t at_least) {
    size_t needed = at_least;
    for (int round = 0; round < 64; ++round) {
      const MemoryPlan plan = plan_memory(needed, payload, slots, kAssumedReadUnit, on_disk);
      const size_t next = plan.fixed_bytes + directory + (kMinFrames + 1) * Cache::frame_cost(payload);
      if (next <= needed) break;
      needed = next;
    }
    return needed;
  };
  const size_t hashed = smallest(hashed_directory_bytes(rows_to_hold(spec, stored_rows)), 1);
  if (spec.num_rows < 0) return hashed;
  const size_t flat = flat_directory_bytes(static_cast<uint64_t>(spec.num_rows));
  return std::min(is_flat(spec.num_rows, hashed) ? ~size_t{0} : hashed, smallest(flat, 4 * flat));
}

size_t wanted_ram(const TableSpec& spec, bool on_disk) {
  if (spec.num_rows < 0) return 0;
  const size_t payload = record_payload(fields_of(spec));
  const auto rows = static_cast<size_t>(spec.num_rows);
  const long double base = static_cast<long double>(rows) * (Cache::frame_cost(payload) + 5) + (1u << 20);
  if (base > 1e15L) return 0;
  size_t wanted = static_cast<size_t>(base);
  for (int round = 0; round < 64; ++round) {
    size_t fixed = 0;  // the unit of reads rounds their slices, so that none needs the most memory for every budget
    for (const size_t unit : {size_t{1}, size_t{512}, kAssumedReadUnit}) {
      const MemoryPlan plan = plan_memory(wanted, payload, slots_per_segment(spec, payload), unit, on_disk);
      fixed = std::max(fixed, plan.fixed_bytes);
    }
    const size_t directory = is_flat(spec.num_rows, wanted) ? flat_directory_bytes(rows) : hashed_directory_bytes(rows);
    const size_t next = fixed + directory + rows * Cache::frame_cost(payload) + Cache::frame_cost(payload);
    if (next <= wanted) return wanted;
    wanted = next;
  }
  return wanted;
}

MemoryUse memory_use(const TableSpec& spec, uint64_t stored_rows, size_t ram_bytes, size_t read_unit,
                            bool on_disk) {
  const size_t payload = record_payload(fields_of(spec));
  const MemoryPlan plan = plan_memory(ram_bytes, payload, slots_per_segment(spec, payload), read_unit, on_disk);
  MemoryUse use;
  use.most_segments = Compactor::most_segments(
      static_cast<uint64_t>(static_cast<double>(stored_rows * (record_stride(payload) + 16)) / kTargetLive),
      slots_per_segment(spec, payload) * record_stride(payload));
  use.record_bytes = payload;
  use.stored_bytes = record_stride(payload) + sizeof(int64_t) + sizeof(uint64_t);
  use.frame_bytes = Cache::frame_cost(payload);
  use.directory_bytes = is_flat(spec.num_rows, ram_bytes) ? flat_directory_bytes(static_cast<uint64_t>(spec.num_rows))
                                                          : hashed_directory_bytes(stored_rows);
  use.fixed_bytes = plan.fixed_bytes;
  const size_t taken = use.fixed_bytes + use.directory_bytes;
  use.frames = ram_bytes == 0 ? stored_rows : (ram_bytes > taken ? ram_bytes - taken : 0) / use.frame_bytes;
  if (spec.num_rows >= 0) use.frames = std::min(use.frames, static_cast<size_t>(spec.num_rows));
  return use;
}

}  // namespace bunkbed
