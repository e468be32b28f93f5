// Losses of a batch of scores and their derivatives, for the training loop.
//
// The framework's own functions read the scores six times and make six matrices; with hundreds of negatives for each
// pair these take most of a step. Bits depend neither on threads nor on the instruction set.
#pragma once

#include <cstddef>

namespace bunkbed {

// BPR: returns the sum over rows of weight * sum_k w_k softplus(negative_k - positive), where w is 1 or, for
// hardness > 0, softmax(hardness * negative) of the row. A score of -inf contributes nothing. The derivatives replace
// the scores (w taken as constant).
double bpr_slopes(size_t rows, size_t columns, float hardness,
                  const float* weights,  // (rows), or null for ones
                  float* positive,       // (rows)
                  float* negative);      // (rows, columns)

// Returns the sum of softplus(x) and replaces x by sigmoid(x).
double logistic_slopes(size_t n, float* x);  // (n)

// Scores of each query with its own items, and the sums of squares of each query's first item and of its others.
struct PairSquares {
  double first = 0.0;
  double others = 0.0;
};
PairSquares pair_scores(size_t rows, size_t items_per_row, size_t dim,
                        const float* queries,  // (rows, dim)
                        const float* items,    // (rows, items_per_row, dim)
                        float* scores);        // (rows, items_per_row)

// Gradients from the slopes of those scores and of decay / 2 |item|^2, in one pass over the items.
struct PairDecay {
  float first = 0.0f;
  float others = 0.0f;
};
void pair_grads(size_t rows, size_t items_per_row, size_t dim, PairDecay decay,
                const float* slopes,   // (rows, items_per_row)
                const float* queries,  // (rows, dim)
                const float* items,    // (rows, items_per_row, dim)
                float* query_grads,    // (rows, dim)
                float* item_grads);    // (rows, items_per_row, dim)

}  // namespace bunkbed
