// The backward pass of bags: from gradients of pooled rows to those of table rows, without a gradient for each id.
#pragma once

#include <cstddef>
#include <cstdint>

#include "batch/exact_sum.h"
#include "batch/batch.h"

namespace bunkbed {

// The bags of n ids, as in the forward pass.
struct BagGradients {
  const int64_t* offsets;  // (num_bags), as Table::lookup_bags
  size_t num_bags;
  bool is_mean;          // a bag's gradient is divided by its number of ids
  const float* weights;  // (n) factors of the rows, or null
  const float* grads;    // (num_bags, dim)
  size_t dim;
};

// Sums the gradients of each unique row in batch order: (batch.num_unique(), dim). The bits are those of
// sum_gradients() for the gradients of all ids, grads[bag of i] / length * weights[i]. Returns the sum of squares, as
// sum_gradients() does.
ExactSum sum_bag_gradients(const Batch& batch, const BagGradients& bags, float* sums);

// dots[i] = rows[i] . grads[bag of i], the gradients of the weights. rows: (n, dim), dots: (n).
void bag_dots(const BagGradients& bags, size_t n, const float* rows, float* dots);

}  // namespace bunkbed
