#include "format/optimizer.h"

#include <algorithm>

namespace bunkbed {

float initial_value(const OptimizerSpec& spec) {
  return spec.kind == OptimizerKind::kAdagrad ? static_cast<float>(spec.initial_accumulator) : 0.0f;
}

std::vector<Slot> optimizer_slots(const OptimizerSpec& spec, int64_t dim) {
  switch (spec.kind) {
    case OptimizerKind::kSgd:
      return {};
    case OptimizerKind::kAdagrad:
      return {{"sum", dim, initial_value(spec)}};
    case OptimizerKind::kRowwiseAdagrad:
      return {{"sum", 1, initial_value(spec)}};
    case OptimizerKind::kAdam:
      return {{"exp_avg", dim, 0.0f}, {"exp_avg_sq", dim, 0.0f}};
  }
  return {};
}

int64_t slot_floats(OptimizerKind kind, int64_t dim) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return 0;
    case OptimizerKind::kAdagrad:
      return dim;
    case OptimizerKind::kRowwiseAdagrad:
      return 1;
    case OptimizerKind::kAdam:
      return 2 * dim;
  }
  return 0;
}

void init_slots(const OptimizerSpec& spec, int64_t dim, float* slots) {
  std::fill_n(slots, slot_floats(spec.kind, dim), initial_value(spec));
}

}  // namespace bunkbed
