#include "format/record_update.h"

#include <algorithm>

#include "format/record.h"

namespace bunkbed {

RecordUpdate::RecordUpdate(const std::vector<Field>& fields, const StepConstants& constants, uint64_t seed,
                           int64_t step)
    : kernels_(kernels()), constants_(constants), seed_(seed), step_(step), dim_(fields.at(0).length) {
  layout_.dtype = field_dtype(fields[0]);
  layout_.state_dtype = fields.size() > 1 ? field_dtype(fields[1]) : DType::kFloat32;
  for (size_t f = 0; f < 3; ++f) layout_.offsets[f] = f < fields.size() ? fields[f].offset : 0;
  is_narrow_ = layout_.dtype != DType::kFloat32 || layout_.state_dtype != DType::kFloat32;
}

void RecordUpdate::step_rows(size_t from, size_t to, size_t count, const int64_t* rows, const float* grads,
                             const uint32_t* frames, const FramedRecords& records) const {
  if (!is_narrow_) {
    kernels_.update_rows(constants_, dim_,
                         {.records = records.base,
                          .stride = records.stride,
                          .slots_offset = layout_.offsets[1],
                          .record_bytes = records.record_bytes,
                          .frames = frames + from,
                          .grads = grads + from * dim_,
                          .n = static_cast<int64_t>(to - from),
                          .known = static_cast<int64_t>(count - from)});
    return;
  }
  constexpr size_t kAheadBytes = 8192;
  const size_t ahead = std::clamp<size_t>(kAheadBytes / records.record_bytes, 4, 32);
  for (size_t i = from; i < to; ++i) {
    if (i + ahead < count && frames[i + ahead] != RowPlaces::kNowhere) {
      const std::byte* const coming = records.base + frames[i + ahead] * records.stride;
      for (size_t at = 0; at < records.record_bytes && at < 1024; at += 64) __builtin_prefetch(coming + at, 1, 2);
    }
    if (frames[i] == RowPlaces::kNowhere) continue;
    (*this)(rows[i], grads + i * dim_, records.base + frames[i] * records.stride);
  }
}

}  // namespace bunkbed
