// Losses of a batch of scores together with their derivatives, for the training loop.
//
// The framework's own functions walk over the scores six times and leave six matrices; with hundreds of negatives a
// pair these are most of a step. Bits depend neither on threads nor on the instruction set.
#pragma once

#include <cstddef>

namespace bunkbed {

// BPR: the sum over rows of sum_k w_k softplus(negative_k - positive), where w is 1 or, for hardness > 0,
// softmax(hardness * negative) of the row. A score of -inf does not compete. In place of the scores stand the
// derivatives (w taken as constant).
double bpr_slopes(size_t rows, size_t columns, float hardness,
                  float* positive,   // (rows)
                  float* negative);  // (rows, columns)

// The sum of softplus(x), with sigmoid(x) in place of x.
double logistic_slopes(size_t n, float* x);  // (n)

}  // namespace bunkbed
