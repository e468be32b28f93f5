// One optimizer step on one record, in place: weights and slots widen to float32, the row is updated in float32, and is
// narrowed again. An update does this for each row after it made the row resident.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"
#include "format/format.h"
#include "kernels/kernels.h"

namespace bunkbed {

// Records in frames: frame f's at base + f * stride.
struct FramedRecords {
  std::byte* base;
  size_t stride;
  size_t record_bytes;
};

// Constants of a step that are the same for all records. Made once per step; used from any number of threads, each on
// records of its own. Allocates nothing.
class RecordUpdate {
 public:
  // `fields` as in the manifest: the weights, then the optimizer's slots. `seed` and `step` key the rounding.
  RecordUpdate(const std::vector<Field>& fields, const StepConstants& constants, uint64_t seed, int64_t step);

  // grad: float32[dim], summed over the row's places in the batch; record: the row's payload.
  void operator()(int64_t row, const float* grad, std::byte* record) const {
    if (is_narrow_) {
      kernels_.update_narrow(constants_, layout_, dim_, grad, {seed_, row, step_}, record);
    } else {
      kernels_.update_row(constants_, dim_, grad, reinterpret_cast<float*>(record),
                          reinterpret_cast<float*>(record + layout_.offsets[1]));
    }
  }

  // Updates rows [from, to) of `count`, grads: float32[count, dim], frames: (count), those in RowPlaces::kNowhere not.
  // Prefetches rows from `to` on too.
  void step_rows(size_t from, size_t to, size_t count, const int64_t* rows, const float* grads, const uint32_t* frames,
                 const FramedRecords& records) const;

 private:
  const Kernels& kernels_;
  const StepConstants constants_;
  const RoundKeys seed_;
  const int64_t step_;
  const int64_t dim_;
  NarrowRecord layout_;
  bool is_narrow_;  // any field is stored in 16 bits
};

}  // namespace bunkbed
