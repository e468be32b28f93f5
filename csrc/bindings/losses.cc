// Mirrors losses.h.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "recsys/losses.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

void bind_losses(nb::module_& m) {
  using Weights = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  m.def(
      "bpr_slopes",
      [](const nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& positive, const FloatsOut& negative,
         float hardness, const std::optional<Weights>& weights) {
        if (positive.shape(0) != negative.shape(0)) {
          throw Error(ErrorKind::kInvalid, "positive has " + std::to_string(positive.shape(0)) +
                                               " scores and negative " + std::to_string(negative.shape(0)) + " rows");
        }
        if (weights && weights->shape(0) != negative.shape(0)) {
          throw Error(ErrorKind::kInvalid, std::to_string(weights->shape(0)) + " weights, but negative has " +
                                               std::to_string(negative.shape(0)) + " rows");
        }
        const WithoutGil without_gil;
        return bpr_slopes(negative.shape(0), negative.shape(1), hardness, weights ? weights->data() : nullptr,
                          positive.data(), negative.data());
      },
      "positive"_a, "negative"_a, "hardness"_a, "weights"_a = nb::none(),
      "Return the sum of w softplus(negative - positive) of scores float32[B] and float32[B, K], with each row "
      "multiplied by its weight (float32[B], default ones). Replace them by its derivatives.");
  m.def(
      "logistic_slopes",
      [](const nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& x) {
        const WithoutGil without_gil;
        return logistic_slopes(x.shape(0), x.data());
      },
      "x"_a, "Return the sum of softplus(x) of float32[N]. Replace x by sigmoid(x).");

  using Items = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
  using ItemsOut = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
  m.def(
      "pair_scores",
      [](const FloatsIn& queries, const Items& items, const FloatsOut& scores) {
        if (queries.shape(0) != items.shape(0) || scores.shape(0) != items.shape(0) ||
            queries.shape(1) != items.shape(2) || scores.shape(1) != items.shape(1) || items.shape(1) == 0) {
          throw Error(ErrorKind::kInvalid, "queries, items and scores must be [B, D], [B, K, D] and [B, K]");
        }
        const WithoutGil without_gil;
        const PairSquares squares =
            pair_scores(items.shape(0), items.shape(1), items.shape(2), queries.data(), items.data(), scores.data());
        return std::pair(squares.first, squares.others);
      },
      "queries"_a, "items"_a, "scores"_a,
      "Compute the scores of queries float32[B, D] with their own items float32[B, K, D]. Return the sums of squares "
      "of the first items and of the others.");
  m.def(
      "pair_grads",
      [](const FloatsIn& slopes, const FloatsIn& queries, const Items& items, float first_decay, float other_decay,
         const FloatsOut& query_grads, const ItemsOut& item_grads) {
        if (slopes.shape(0) != items.shape(0) || slopes.shape(1) != items.shape(1) || items.shape(1) == 0 ||
            queries.shape(0) != items.shape(0) || queries.shape(1) != items.shape(2) ||
            query_grads.shape(0) != queries.shape(0) || query_grads.shape(1) != queries.shape(1) ||
            item_grads.shape(0) != items.shape(0) || item_grads.shape(1) != items.shape(1) ||
            item_grads.shape(2) != items.shape(2)) {
          throw Error(ErrorKind::kInvalid, "slopes, queries and items must be [B, K], [B, D] and [B, K, D]");
        }
        const WithoutGil without_gil;
        pair_grads(items.shape(0), items.shape(1), items.shape(2), {first_decay, other_decay}, slopes.data(),
                   queries.data(), items.data(), query_grads.data(), item_grads.data());
      },
      "slopes"_a, "queries"_a, "items"_a, "first_decay"_a, "other_decay"_a, "query_grads"_a, "item_grads"_a,
      "Compute the gradients of queries and items from the slopes of their scores and a decay of the items.");
}

}  // namespace bunkbed
