// The definition of a table, with pure functions of it: the layout of its records and the RAM that it needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/types.h"
#include "format/format.h"

namespace bunkbed {

struct MemoryPlan;

struct TableSpec {
  int64_t num_rows = -1;  // -1: any non-negative id
  uint32_t dim = 0;
  DType dtype = DType::kFloat32;
  InitSpec init;
  OptimizerSpec optimizer;
  Retention retention;
  bool belongs_to_run = false;
  bool is_scratch = false;  // the table is never made durable; see commit/scratch.h
};

struct OpenOptions {
  bool writable = true;
  size_t ram_bytes = 0;            // 0: without bound (a table in RAM only)
  std::string snapshot;            // a kept name; then the table is read-only
  std::optional<uint64_t> epoch;   // exactly this commit; a writer discards newer ones (bb.Run)
  bool through_run = false;        // opened by the run it belongs to
  uint64_t disk_bytes = 0;         // the most bytes that a writer's files may take; 0: no limit
  std::optional<size_t> read_gap;  // the most bytes between two records that share a read; the log has a default
};

// Of the table that a commit describes.
TableSpec spec_of(const Manifest& manifest);
std::vector<Field> fields_of(const TableSpec& spec);
size_t payload_of(const TableSpec& spec);  // bytes of a record, with the row's usage if the table has it
// Throws Error(kInvalid) when some optimizer would make a record too large for 32-bit offsets.
void check_record_size(uint32_t dim);
// A segment has a 64th of the table within 1 MiB and 256 MiB, so that small tables are compacted, too. A table of
// unknown size has segments of 64 MiB.
uint64_t slots_per_segment(const TableSpec& spec, size_t payload_bytes);
// Whether the whole directory is flat from the start: when it takes at most a quarter of the budget. In RAM only it
// must also leave room for all rows, because no row can be written to disk. `frame_bytes`: of a record in a frame.
bool is_flat(const TableSpec& spec, const MemoryPlan& plan, size_t frame_bytes);

// The smallest budget with which so many rows can be stored, and a table with so many stored rows can be opened.
size_t minimum_ram(const TableSpec& spec, uint64_t stored_rows, bool on_disk);
// The most rows that can be stored within a budget: the inverse of minimum_ram(). `ram_bytes`: 0 for no bound.
uint64_t rows_within(const TableSpec& spec, size_t ram_bytes, bool on_disk);
// The budget beyond which more RAM is not useful; 0: unknown, because num_rows has no bound.
size_t wanted_ram(const TableSpec& spec, bool on_disk);

// The parts of a budget when some rows are stored.
struct MemoryUse {
  size_t record_bytes = 0;  // a row's weights and optimizer state
  size_t stored_bytes = 0;  // a record in the log: with its checksum, its id and its version
  size_t frame_bytes = 0;   // a record in RAM
  size_t frames = 0;
  size_t directory_bytes = 0;
  size_t fixed_bytes = 0;  // buffers and scratch
  uint64_t most_segments = 0;
};
// For a writer. `ram_bytes`: 0 for no bound. `read_unit`: the alignment that reads of its files need.
MemoryUse memory_use(const TableSpec& spec, uint64_t stored_rows, size_t ram_bytes, size_t read_unit, bool on_disk);

}  // namespace bunkbed
