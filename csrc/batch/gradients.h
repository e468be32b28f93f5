// Gradient sums of a batch: what stands between a backward pass and the optimizer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "batch/batch.h"

namespace bunkbed {

// Sums the gradients of each unique row in batch order. grads: (batch.size(), dim), or longer where the batch was made
// with members; sums: (batch.num_unique(), dim), or null where only the result is wanted. Returns the sum of the sums' squares in float64, which is finite if and
// only if all of them are; its order is fixed, whatever the threads.
double sum_gradients(const Batch& batch, const float* grads, size_t dim, float* sums);
// The same where the gradient of place order()[o] is row rows[o] of grads.
double sum_gradients(const Batch& batch, const uint32_t* rows, const float* grads, size_t dim, float* sums);

// x[i] = x[i] * scale; true when every result is finite.
bool scale(size_t n, float scale, float* x);

}  // namespace bunkbed
