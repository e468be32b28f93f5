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
constexpr size_t kMostBytes = size_t{1} << 60;  // a size that no machine has

// The number of rows whose directory the smallest budget must hold: all rows of the table when these need little
// memory, otherwise the stored rows and at least 4096.
uint64_t rows_to_hold(const TableSpec& spec, uint64_t stored_rows) {
  constexpr size_t kLittle = 4u << 20;
  if (spec.num_rows >= 0 && flat_directory_bytes(static_cast<uint64_t>(spec.num_rows)) <= kLittle) {
    return static_cast<uint64_t>(spec.num_rows);
  }
  const uint64_t rows = std::max<uint64_t>(stored_rows, 4096);
  return spec.num_rows < 0 ? rows : std::min(rows, static_cast<uint64_t>(spec.num_rows));
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
  spec.retention = manifest.retention;
  spec.belongs_to_run = (manifest.writer_flags & kWriterFlagRun) != 0;
  spec.is_scratch = (manifest.reader_flags & kReaderFlagScratch) != 0;
  return spec;
}

std::vector<Field> fields_of(const TableSpec& spec) { return record_fields(spec.dim, spec.dtype, spec.optimizer); }

size_t payload_of(const TableSpec& spec) {
  return record_payload(fields_of(spec)) + (spec.retention.is_set() ? kUsageBytes : 0);
}

uint64_t slots_per_segment(const TableSpec& spec, size_t payload_bytes) {
  const size_t stride = record_stride(payload_bytes);
  const uint64_t rows = spec.num_rows < 0 ? (uint64_t{64} * 64 << 20) / stride : static_cast<uint64_t>(spec.num_rows);
  const long double part = static_cast<long double>(rows) * static_cast<long double>(stride) / 64;
  const auto bytes = static_cast<uint64_t>(std::clamp<long double>(part, 1 << 20, 256 << 20));
  return std::max<uint64_t>({bytes / stride, (16 * stride + kSegmentHeaderBytes) / stride + 1});
}

namespace {

// Of a table in RAM only: one for each row, and one to spare.
uint64_t frames_for(uint64_t rows) { return std::max<uint64_t>(kMinFrames, rows) + 1; }

}  // namespace

bool is_flat(const TableSpec& spec, const MemoryPlan& plan, size_t frame_bytes) {
  if (spec.num_rows < 0) return false;
  const auto rows = static_cast<uint64_t>(spec.num_rows);
  const size_t budget = plan.total_bytes == 0 ? size_t{4} << 30 : plan.total_bytes;
  const size_t flat = flat_directory_bytes(rows);
  if (flat > budget / 4 || flat > most_directory_bytes(plan, frame_bytes)) return false;
  if (plan.has_log || plan.total_bytes == 0) return true;
  return frames_for(rows) <= (plan.total_bytes - plan.fixed_bytes - flat) / Cache::frame_cost(frame_bytes);
}

namespace {

// Of the directory of a store (Loader::make_directory) when so many rows are stored.
size_t directory_bytes(const TableSpec& spec, uint64_t stored_rows) {
  return spec.num_rows < 0 ? hashed_directory_bytes(stored_rows)
                           : bounded_directory_bytes(static_cast<uint64_t>(spec.num_rows), stored_rows);
}
size_t directory_bytes(const TableSpec& spec, uint64_t stored_rows, const MemoryPlan& plan, size_t payload) {
  return is_flat(spec, plan, payload) ? flat_directory_bytes(static_cast<uint64_t>(spec.num_rows))
                                      : directory_bytes(spec, stored_rows);
}

}  // namespace

size_t minimum_ram(const TableSpec& spec, uint64_t stored_rows, bool on_disk) {
  const size_t payload = payload_of(spec);
  const uint64_t slots = slots_per_segment(spec, payload);
  const size_t frame_cost = Cache::frame_cost(payload);
  // On disk the fewest frames do, however many rows are stored.
  const auto smallest = [&](size_t directory, uint64_t rows) {
    const uint64_t frames = on_disk ? kMinFrames + 1 : frames_for(rows);
    if (frames > kMostBytes / frame_cost || directory > kMostBytes) return kMostBytes;
    return smallest_budget(directory + frames * frame_cost, payload, slots, kAssumedReadUnit, on_disk);
  };
  const uint64_t rows = on_disk ? rows_to_hold(spec, stored_rows) : std::max<uint64_t>(kMinFrames, stored_rows);
  const size_t any_form = smallest(directory_bytes(spec, rows), rows);
  if (spec.num_rows < 0) return any_form;
  // A directory that is all flat in this budget is so in every larger one.
  const auto all_rows = static_cast<uint64_t>(spec.num_rows);
  const size_t flat = flat_directory_bytes(all_rows);
  const size_t all_flat = smallest(flat, all_rows);
  return flat <= all_flat / 4 ? std::min(any_form, all_flat) : any_form;
}

uint64_t rows_within(const TableSpec& spec, size_t ram_bytes, bool on_disk) {
  uint64_t fit = 0;
  uint64_t beyond = std::min(spec.num_rows < 0 ? kMaxPosition : static_cast<uint64_t>(spec.num_rows), kMaxPosition) + 1;
  if (ram_bytes == 0) return beyond - 1;
  while (fit + 1 < beyond) {
    const uint64_t middle = fit + (beyond - fit) / 2;
    (minimum_ram(spec, middle, on_disk) <= ram_bytes ? fit : beyond) = middle;
  }
  return fit;
}

size_t wanted_ram(const TableSpec& spec, bool on_disk) {
  if (spec.num_rows < 0) return 0;
  const size_t payload = payload_of(spec);
  const auto rows = static_cast<size_t>(spec.num_rows);
  const long double base = static_cast<long double>(rows) * (Cache::frame_cost(payload) + 5) + (1u << 20);
  if (base > 1e15L) return 0;
  size_t wanted = static_cast<size_t>(base);
  for (int round = 0; round < 64; ++round) {
    const MemoryPlan plan = plan_memory(wanted, payload, slots_per_segment(spec, payload), kAssumedReadUnit, on_disk);
    const size_t directory = directory_bytes(spec, rows, plan, payload);
    const size_t needed = plan.fixed_bytes + directory + (rows + 1) * Cache::frame_cost(payload);
    if (needed <= wanted) return wanted;
    wanted = needed;
  }
  return wanted;
}

MemoryUse memory_use(const TableSpec& spec, uint64_t stored_rows, size_t ram_bytes, size_t read_unit, bool on_disk) {
  const size_t payload = payload_of(spec);
  const MemoryPlan plan = plan_memory(ram_bytes, payload, slots_per_segment(spec, payload), read_unit, on_disk);
  MemoryUse use;
  use.most_segments = Compactor::most_segments(
      static_cast<uint64_t>(static_cast<double>(stored_rows * (record_stride(payload) + 16)) / kTargetLive),
      slots_per_segment(spec, payload) * record_stride(payload));
  use.record_bytes = payload;
  use.stored_bytes = record_stride(payload) + sizeof(int64_t) + sizeof(uint64_t);
  use.frame_bytes = Cache::frame_cost(payload);
  use.directory_bytes = directory_bytes(spec, stored_rows, plan, payload);
  use.fixed_bytes = plan.fixed_bytes;
  const size_t taken = use.fixed_bytes + use.directory_bytes;
  use.frames = ram_bytes == 0 ? stored_rows : (ram_bytes > taken ? ram_bytes - taken : 0) / use.frame_bytes;
  if (spec.num_rows >= 0) use.frames = std::min(use.frames, static_cast<size_t>(spec.num_rows));
  return use;
}

}  // namespace bunkbed
