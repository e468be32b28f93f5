#include "record_update.h"

#include "record.h"

namespace bunkbed {

RecordUpdate::RecordUpdate(const std::vector<Field>& fields, const StepConstants& constants, uint64_t seed, int64_t step)
    : kernels_(kernels()), constants_(constants), seed_(seed), step_(step), dim_(fields.at(0).length) {
  layout_.dtype = field_dtype(fields[0]);
  layout_.state_dtype = fields.size() > 1 ? field_dtype(fields[1]) : DType::kFloat32;
  for (size_t f = 0; f < 3; ++f) layout_.offsets[f] = f < fields.size() ? fields[f].offset : 0;
  is_narrow_ = layout_.dtype != DType::kFloat32 || layout_.state_dtype != DType::kFloat32;
}

}  // namespace bunkbed
