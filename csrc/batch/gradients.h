// Gradient sums of a batch: the work between a backward pass and the optimizer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "batch/batch.h"

namespace bunkbed {

// Sums the gradients of each unique row in batch order. grads: (batch.size(), dim), or more rows if the batch has
// members; sums: (batch.num_unique(), dim), or null if only the result is needed. Returns the sum of squares of the
// sums in float64, in a fixed order for any number of threads. It is finite if and only if all sums are.
double sum_gradients(const Batch& batch, const float* grads, size_t dim, float* sums);
// The same where the gradient of place order()[o] is row rows[o] of `grads`.
double sum_gradients(const Batch& batch, const uint32_t* rows, const float* grads, size_t dim, float* sums);

// x[i] = x[i] * scale; true when every result is finite.
bool scale(size_t n, float scale, float* x);

}  // namespace bunkbed
