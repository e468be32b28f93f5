// Which slots an optimizer keeps for each row, and their initial values. The update rules are kernels (update_row).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/types.h"

namespace bunkbed {

// One per-row array of optimizer state. A record holds its slots in this order, after the weights (record.h says
// where). Names are file format; they are the framework's own.
struct Slot {
  std::string_view name;
  int64_t length;  // dim, or 1 where the whole row shares one element
  float initial;   // value of every element of a row not yet updated, before it is rounded to the state's dtype
};

// The initial value of all elements of all slots. Only Adagrad's accumulator can start above zero.
float initial_value(const OptimizerSpec& spec);

// Sgd: none. Adagrad: sum[dim]. RowwiseAdagrad: sum[1]. Adam: exp_avg[dim], exp_avg_sq[dim].
std::vector<Slot> optimizer_slots(const OptimizerSpec& spec, int64_t dim);

// Number of values in all slots of one row; never allocates.
int64_t slot_floats(OptimizerKind kind, int64_t dim);

// Slots of a row that was never updated, as float32[slot_floats(spec.kind, dim)].
void init_slots(const OptimizerSpec& spec, int64_t dim, float* slots);

}  // namespace bunkbed
