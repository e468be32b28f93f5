// The fields of a record and their places: weights first, then the optimizer's slots, each at a multiple of 4 bytes.
// FORMAT.md, "Records". A field may be stored in 16 bits; callers see float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/bytes.h"
#include "base/types.h"
#include "format/format.h"

namespace bunkbed {

// Returns the fields of a record, in order.
std::vector<Field> record_fields(uint32_t dim, DType dtype, const OptimizerSpec& optimizer);
size_t record_payload(const std::vector<Field>& fields);  // bytes

// Of a table with rules of retention: when a row was last named, and by how many steps. The last bytes of the payload,
// after the fields above, which are all of floats.
struct Usage {
  int64_t last_step = 0;  // of the table's clock
  uint32_t count = 0;     // stays at its largest value
};
// The last_step of a row that no sweep removes and that no step or set dates: a padding row.
inline constexpr int64_t kNeverGoes = std::numeric_limits<int64_t>::max();
inline constexpr size_t kUsageBytes = sizeof(int64_t) + sizeof(uint32_t);
inline Usage read_usage(const std::byte* usage) {
  return {load<int64_t>(usage), load<uint32_t>(usage + sizeof(int64_t))};
}
inline void write_usage(const Usage& usage, std::byte* out) {
  store(out, usage.last_step);
  store(out + sizeof(int64_t), usage.count);
}
size_t payload_of(const Manifest& manifest);  // with the usage, if the table has it
// The fields of usage, for the manifest of a table whose other fields these are.
std::vector<Field> usage_fields(const std::vector<Field>& fields);

// The type of a field, and its bytes in the record.
DType field_dtype(const Field& field);
size_t field_bytes(const Field& field);  // with the padding after it

// values: float32[field.length]. Reading widens exactly; writing rounds to nearest, ties to even.
void read_field(const Field& field, const std::byte* record, float* values);
void write_field(const Field& field, const float* values, std::byte* record);
// The least magnitude that write_field() would make infinite.
double field_limit(const Field& field);

// Slots of a row that was never updated: the optimizer's initial values, rounded to nearest.
void write_initial_slots(const std::vector<Field>& fields, const OptimizerSpec& optimizer, std::byte* record);

}  // namespace bunkbed
