#include "record_update.h"

namespace bunkbed {

RecordUpdate::RecordUpdate(const std::vector<Field>& fields, const StepConstants& constants, uint64_t seed, int64_t step)
    : kernels_(kernels()),
      constants_(constants),
      seed_(seed),
      step_(step),
      dim_(fields.at(0).length),
      dtype_(static_cast<DType>(fields.at(0).dtype)),
      slots_offset_(fields.size() > 1 ? fields[1].offset : 0) {}

void RecordUpdate::operator()(int64_t row, const float* grad, std::byte* record) const {
  auto* const slots = reinterpret_cast<float*>(record + slots_offset_);
  if (dtype_ == DType::kFloat32) {
    kernels_.update_row(constants_, dim_, grad, reinterpret_cast<float*>(record), slots);
    return;
  }
  thread_local std::vector<float> wide;  // a row's weights, kept between calls
  wide.resize(static_cast<size_t>(dim_));
  kernels_.widen(dtype_, dim_, record, wide.data());
  kernels_.update_row(constants_, dim_, grad, wide.data(), slots);
  kernels_.narrow_stochastic(dtype_, dim_, wide.data(), seed_, row, step_, record);
}

}  // namespace bunkbed
