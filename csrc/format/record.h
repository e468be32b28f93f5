// The fields of a record and their places: weights first, then the optimizer's slots, each at a multiple of 4 bytes.
// FORMAT.md, "Records". A field may be stored in 16 bits; callers see float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"
#include "format/format.h"

namespace bunkbed {

// Returns the fields of a record, in order.
std::vector<Field> record_fields(uint32_t dim, DType dtype, const OptimizerSpec& optimizer);
size_t record_payload(const std::vector<Field>& fields);  // bytes

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
