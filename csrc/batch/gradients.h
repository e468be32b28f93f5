// Gradient sums of a batch: the work between a backward pass and the optimizer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "batch/exact_sum.h"
#include "batch/batch.h"

namespace bunkbed {

// Sums the gradients of each unique row in batch order. grads: (batch.size(), dim), or more rows if the batch has
// members; sums: (batch.num_unique(), dim), or null if only the result is needed. Returns the sum of squares of the
// sums: exact over the rows, in double within a row. It is finite if and only if all sums are.
ExactSum sum_gradients(const Batch& batch, const float* grads, size_t dim, float* sums);
// The same where the gradient of place order()[o] is row rows[o] of `grads`.
ExactSum sum_gradients(const Batch& batch, const uint32_t* rows, const float* grads, size_t dim, float* sums);
// The same without the sum of squares: only whether all sums are finite.
bool sum_finite_gradients(const Batch& batch, const float* grads, size_t dim, float* sums);

// The sum of the parts.
ExactSum total(const ExactSum* parts, size_t n);

// x[i] = x[i] * scale; true when every result is finite.
bool scale(size_t n, float scale, float* x);

}  // namespace bunkbed
