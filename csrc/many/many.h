// Lookups, sums and updates of several tables in one call, for models with a table for each column.
//
//   1. Checks the arguments and the state of every table. An error is that of the first bad part, in the order of the
//      parts, and nothing has changed.
//   2. Runs the parts, each as a call of its own with the lock of its table. No thread holds two of these locks. The
//   bits
//      are those of single calls in the order of the parts: parts of one table keep their order.
//
// Another thread may change a table between the two steps. A part that fails in step 2 changes its table as a single
// call does; the other parts run nevertheless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "batch/bag_gradients.h"
#include "batch/batch.h"
#include "table/table.h"

namespace bunkbed {

// The bags of a pooled part; see Table::lookup_bags().
struct PartBags {
  const int64_t* offsets;  // (num_bags)
  size_t num_bags;
  Pooling pooling;
  const float* weights;  // (n) or null
};

// A lookup of ids[0..n) of `table` into `out`.
struct LookupPart {
  Table* table;
  const int64_t* ids;
  size_t n;
  bool touch;
  std::optional<PartBags> bags;
  float* out;    // (n, dim), or (num_bags, dim)
  Batch* batch;  // receives the ids' batch, for a training step; or null
};
void lookup_many(const std::vector<LookupPart>& parts);

// The sums of the gradients of a batch; those of bags when `bags` has offsets.
struct SumPart {
  const Batch* batch;
  BagGradients bags;  // grads and dim are set always
  uint32_t step;      // the gradient of place i begins at grads[i * step * dim]; 1 with bags
  float* sums;        // (batch->num_unique(), dim)
  ExactSum squares;   // the result; see sum_gradients()
};
void sum_many(std::vector<SumPart>* parts);

// An optimizer step of `table` with sums that are known to be finite. The tables are distinct.
struct UpdatePart {
  Table* table;
  const Batch* batch;
  const float* sums;
  std::optional<double> lr;
  std::optional<int64_t> step;
};
void update_many(const std::vector<UpdatePart>& parts);

}  // namespace bunkbed
