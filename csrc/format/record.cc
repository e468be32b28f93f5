#include "format/record.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "format/optimizer.h"
#include "kernels/kernels.h"

namespace bunkbed {

namespace {

constexpr size_t kFieldAlignment = 4;

size_t aligned(size_t bytes) { return (bytes + kFieldAlignment - 1) / kFieldAlignment * kFieldAlignment; }

}  // namespace

std::vector<Field> record_fields(uint32_t dim, DType dtype, const OptimizerSpec& optimizer) {
  std::vector<Field> fields;
  fields.push_back({"weight", static_cast<uint8_t>(dtype), dim, 0});
  for (const Slot& slot : optimizer_slots(optimizer, dim)) {
    const size_t offset = fields.back().offset + field_bytes(fields.back());
    fields.push_back({std::string(slot.name), static_cast<uint8_t>(optimizer.state_dtype),
                      static_cast<uint32_t>(slot.length), static_cast<uint32_t>(offset)});
  }
  return fields;
}

size_t record_payload(const std::vector<Field>& fields) { return fields.back().offset + field_bytes(fields.back()); }

size_t payload_of(const Manifest& manifest) {
  return record_payload(manifest.fields) + (manifest.retention.is_set() ? kUsageBytes : 0);
}

std::vector<Field> usage_fields(const std::vector<Field>& fields) {
  const auto at = static_cast<uint32_t>(record_payload(fields));
  return {{"last_step", kFieldInt64, 1, at}, {"count", kFieldUint32, 1, at + static_cast<uint32_t>(sizeof(int64_t))}};
}

DType field_dtype(const Field& field) { return static_cast<DType>(field.dtype); }

size_t field_bytes(const Field& field) { return aligned(field.length * dtype_bytes(field_dtype(field))); }

void read_field(const Field& field, const std::byte* record, float* values) {
  kernels().widen(field_dtype(field), field.length, record + field.offset, values);
}

void write_field(const Field& field, const float* values, std::byte* record) {
  kernels().narrow_nearest(field_dtype(field), field.length, values, record + field.offset);
}

double field_limit(const Field& field) {
  switch (field_dtype(field)) {
    case DType::kFloat32:
      break;
    case DType::kBFloat16:
      return 0x1.ffp127;  // half a unit beyond the largest finite value; the tie rounds up
    case DType::kFloat16:
      return 65520.0;
  }
  return std::numeric_limits<double>::infinity();
}

void write_initial_slots(const std::vector<Field>& fields, const OptimizerSpec& optimizer, std::byte* record) {
  for (size_t f = 1; f < fields.size(); ++f) {
    const float initial = initial_value(optimizer);
    std::byte* const at = record + fields[f].offset;
    if (field_dtype(fields[f]) == DType::kFloat32) {
      std::fill_n(reinterpret_cast<float*>(at), fields[f].length, initial);
    } else {
      uint16_t half;
      kernels().narrow_nearest(field_dtype(fields[f]), 1, &initial, &half);
      std::memset(at, 0, field_bytes(fields[f]));
      std::fill_n(reinterpret_cast<uint16_t*>(at), fields[f].length, half);
    }
  }
}

}  // namespace bunkbed
