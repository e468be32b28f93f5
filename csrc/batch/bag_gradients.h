// The backward pass of bags: from the gradients of pooled rows to those of table rows, without one per id between.
#pragma once

#include <cstddef>
#include <cstdint>

#include "batch/batch.h"

namespace bunkbed {

// What the forward pass knew of the bags of n ids.
struct BagGradients {
  const int64_t* offsets;  // (num_bags), as Table::lookup_bags
  size_t num_bags;
  bool is_mean;          // a bag's gradient is divided by its number of ids
  const float* weights;  // (n) factors of the rows, or null
  const float* grads;    // (num_bags, dim)
  size_t dim;
};

// The sums of each unique row's gradients in batch order, (batch.num_unique(), dim): what sum_gradients() makes of the
// gradients written out, grads[bag of i] / length * weights[i] for each id i, to the last bit. Returns the sum of their
// squares, as sum_gradients() does.
double sum_bag_gradients(const Batch& batch, const BagGradients& bags, float* sums);

// dots[i] = rows[i] . grads[bag of i], the gradients of the weights. rows: (n, dim), dots: (n).
void bag_dots(const BagGradients& bags, size_t n, const float* rows, float* dots);

}  // namespace bunkbed
