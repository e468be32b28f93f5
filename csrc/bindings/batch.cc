// Mirrors batch.h, gradients.h and split.h.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "base/error.h"
#include "base/float_mode.h"
#include "base/memory.h"
#include "batch/bag_gradients.h"
#include "batch/gradients.h"
#include "batch/overlap.h"
#include "batch/split.h"
#include "bindings/bindings.h"
#include "format/shard_rule.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOfOne = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Parts = nb::ndarray<const uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Returns (the sums of a batch of num_unique rows, what `finish` makes of the sum of their squares). `sum` fills the
// sums and returns the sum of squares.
template <typename Sum, typename Finish>
nb::tuple sums_and(size_t num_unique, size_t dim, Sum&& sum, Finish&& finish) {
  const size_t bytes = num_unique * dim * sizeof(float);
  auto* sums = static_cast<float*>(allocate_array(bytes));
  const nb::object owner = own_block(sums, bytes);
  ExactSum squares;
  {
    const WithoutGil without_gil;
    const DefaultFloatMode mode;
    squares = sum(sums);
  }
  return nb::make_tuple(nb::ndarray<nb::numpy, float, nb::ndim<2>>(sums, {num_unique, dim}, owner), finish(squares));
}

double norm(const ExactSum& squares) { return std::sqrt(squares.rounded()); }

nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> words(const ExactSum& squares) {
  constexpr size_t kBytes = ExactSum::kWords * sizeof(int64_t);
  const ExactSum::Words words = squares.words();
  auto* copy = static_cast<int64_t*>(allocate_array(kBytes));
  std::copy(words.begin(), words.end(), copy);
  return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(copy, {ExactSum::kWords}, own_block(copy, kBytes));
}

// Raises unless there is one gradient for each id.
void require_gradients(const Batch& batch, const FloatsIn& grads) {
  if (grads.shape(0) == batch.size()) return;
  throw Error(ErrorKind::kInvalid, "a batch of " + std::to_string(batch.size()) + " ids got " +
                                       std::to_string(grads.shape(0)) + " gradients");
}

void require_count(size_t count, const char* what) {
  if (count >= 1 && count <= 65536) return;
  throw Error(ErrorKind::kInvalid,
              "the number of " + std::string(what) + " must be 1 to 65,536, got " + std::to_string(count));
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> filled(size_t n, const std::function<void(T*)>& fill) {
  auto* values = static_cast<T*>(allocate_array(std::max<size_t>(1, n) * sizeof(T)));
  const nb::object owner = own_block(values, std::max<size_t>(1, n) * sizeof(T));
  {
    const WithoutGil without_gil;
    fill(values);
  }
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(values, {n}, owner);
}

// A copy as int64, the index type of the frameworks.
nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> wide(const ArrayVector<uint32_t>& values) {
  const size_t n = values.size();
  auto* copy = static_cast<int64_t*>(allocate_array(n * sizeof(int64_t)));
  std::copy(values.begin(), values.end(), copy);
  return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(copy, {n}, own_block(copy, n * sizeof(int64_t)));
}

}  // namespace

void require_room(size_t numbers, const IdsOut& out) {
  if (out.shape(0) >= numbers) return;
  throw Error(ErrorKind::kInvalid, "an array of " + std::to_string(out.shape(0)) + " has no room for " +
                                       std::to_string(numbers) + " numbers");
}

void bind_batch(nb::module_& m) {
  nb::class_<Batch>(m, "Batch", "The ids of a training step and their unique rows. Made by Table.batch().")
      .def("__len__", &Batch::num_unique)
      .def(
          "unique",
          [](const Batch& batch) {
            const size_t n = batch.num_unique();
            auto* ids = static_cast<int64_t*>(allocate_array(n * sizeof(int64_t)));
            std::copy(batch.unique().begin(), batch.unique().end(), ids);
            return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(ids, {n}, own_block(ids, n * sizeof(int64_t)));
          },
          "int64[U], each id once, in an order that depends only on the batch.")
      .def("num_ids", &Batch::size, "The number of ids, N, with repeated ones.")
      .def(
          "inverse", [](const Batch& batch) { return wide(batch.inverse()); },
          "int64[N], a copy: for each place in the batch, the index of its id in unique().")
      .def(
          "order", [](const Batch& batch) { return wide(batch.order()); },
          "int64[N], a copy: the places in the batch grouped by unique id, ascending in each group.")
      .def(
          "offsets", [](const Batch& batch) { return wide(batch.offsets()); },
          "int64[U + 1], a copy: where the groups of order() start, and where the last one ends.")
      .def("max_numbers", &max_numbers<Batch>, "most"_a, "The most numbers that write_numbers() writes.")
      .def(
          "write_numbers", &write_numbers<Batch>, "most"_a, "out"_a,
          "Write inverse() [N], order() [N], offsets() without its end [U] and, if an id is there more than `most` "
          "times, the first piece of each id [U] and the place where each piece starts [P]: a piece has at most `most` "
          "places of one id. Return P, or 0 if no id is cut.")
      .def(
          "rows_in",
          [](const Batch& batch, const Batch& other) {
            const size_t n = batch.num_unique();
            auto* found = static_cast<bool*>(allocate_array(n));
            const nb::object owner = own_block(found, n);
            {
              const WithoutGil without_gil;
              rows_in_other(batch, other, found);
            }
            return nb::ndarray<nb::numpy, bool, nb::ndim<1>>(found, {n}, owner);
          },
          "other"_a, "bool[U]: whether each id of unique() is in the other batch, too.")
      .def(
          "sum",
          [](const Batch& batch, const FloatsIn& grads) {
            const size_t dim = grads.shape(1);
            require_gradients(batch, grads);
            return sums_and(
                batch.num_unique(), dim, [&](float* sums) { return sum_gradients(batch, grads.data(), dim, sums); },
                norm);
          },
          "grads"_a,
          "Sum float32[N, dim] gradients of equal ids in batch order: (float32[U, dim] in the order of unique(), their "
          "Euclidean norm in float64, which is finite only if all sums are). The norm does not depend on the order of "
          "the ids: the squares of the rows are added exactly and rounded once.")
      .def(
          "sum_squares",
          [](const Batch& batch, const FloatsIn& grads) {
            const size_t dim = grads.shape(1);
            require_gradients(batch, grads);
            return sums_and(
                batch.num_unique(), dim, [&](float* sums) { return sum_gradients(batch, grads.data(), dim, sums); },
                words);
          },
          "grads"_a,
          "As sum(), but in place of the norm the exact sum of squares, int64[SQUARES], for norm_of(): for a norm over "
          "the rows of several batches.")
      .def(
          "sum_bags",
          [](const Batch& batch, const Ids& offsets, const FloatsIn& grads, const std::optional<Floats>& weights,
             bool is_mean) {
            const size_t dim = grads.shape(1);
            const BagGradients bags{offsets.data(), offsets.shape(0),
                                    is_mean,        weights.has_value() ? weights->data() : nullptr,
                                    grads.data(),   dim};
            return sums_and(
                batch.num_unique(), dim, [&](float* sums) { return sum_bag_gradients(batch, bags, sums); }, norm);
          },
          "offsets"_a, "grads"_a, "weights"_a.none(), "is_mean"_a,
          "The same for the ids of bags, from the gradients float32[B, dim] of the bags.");
  m.attr("SQUARES") = ExactSum::kWords;
  m.def(
      "norm_of",
      [](const Words& parts) {
        if (parts.shape(1) != ExactSum::kWords) {
          throw Error(ErrorKind::kInvalid, "sums of squares must be int64[N, " + std::to_string(ExactSum::kWords) +
                                               "], got " + std::to_string(parts.shape(1)) + " columns");
        }
        ExactSum sum;
        for (size_t i = 0; i < parts.shape(0); ++i) {
          ExactSum::Words words;
          std::copy_n(parts.data() + i * words.size(), words.size(), words.begin());
          sum.add(ExactSum::from(words));
        }
        return norm(sum);
      },
      "squares"_a,
      "The Euclidean norm of all rows whose squares Batch.sum_squares() summed: int64[N, SQUARES], one row a batch. "
      "Has the bits of the norm that sum() gives for all rows in one batch.");
  m.def(
      "shards_of",
      [](const Ids& ids, uint32_t shards) {
        require_count(shards, "shards");
        return filled<uint16_t>(ids.shape(0), [&](uint16_t* out) {
          for (size_t i = 0; i < ids.shape(0); ++i) out[i] = static_cast<uint16_t>(shard_of(ids.data()[i], shards));
        });
      },
      "ids"_a, "shards"_a, "Return the shard of each row, uint16[N].");
  m.def(
      "split",
      [](const Ids& ids, const Parts& parts, size_t num_parts) {
        require_count(parts.shape(0), "shards");
        require_count(num_parts, "parts");
        std::vector<int64_t> bounds(num_parts + 1);
        const PartRule rule{parts.data(), static_cast<uint32_t>(parts.shape(0)), num_parts};
        size_t done = 0;
        const auto order = filled<int64_t>(
            ids.shape(0), [&](int64_t* out) { done = split_ids(ids.data(), ids.shape(0), rule, out, bounds.data()); });
        if (done < ids.shape(0)) {
          throw Error(ErrorKind::kInvalid, "id " + std::to_string(ids.data()[done]) + " at position " +
                                               std::to_string(done) + " is in a shard that belongs to none of " +
                                               std::to_string(num_parts) + " parts");
        }
        return nb::make_tuple(order, bounds);
      },
      "ids"_a, nb::arg("parts").noconvert(), "num_parts"_a,
      "Group the places of int64[N] ids by part, which is that of the id's shard in uint16[shards] `parts`. Return "
      "int64[N], the places in batch order within each part, and the list of where the parts start and the last ends.");
  m.def(
      "gather_scaled",
      [](const FloatsIn& rows, const Ids& places, float factor, const FloatsOfOne& out) {
        const size_t n = places.shape(0);
        const size_t dim = rows.shape(1);
        if (out.shape(0) != n * dim) {
          throw Error(ErrorKind::kInvalid, std::to_string(n) + " rows of " + std::to_string(dim) +
                                               " values do not fill an array of " + std::to_string(out.shape(0)));
        }
        const auto bad = std::find_if(places.data(), places.data() + n, [&](int64_t place) {
          return place < 0 || static_cast<size_t>(place) >= rows.shape(0);
        });
        if (bad != places.data() + n) {
          throw Error(ErrorKind::kIndex,
                      "place " + std::to_string(*bad) + " is outside of " + std::to_string(rows.shape(0)) + " rows");
        }
        const WithoutGil without_gil;
        const DefaultFloatMode mode;
        gather_scaled(rows.data(), places.data(), n, dim, factor, out.data());
      },
      "rows"_a, "places"_a, "factor"_a, nb::arg("out").noconvert(),
      "Write float32[N, dim] rows[places] * factor to float32[N * dim] `out`.");
  m.def(
      "bag_dots",
      [](const FloatsIn& rows, const Ids& offsets, const FloatsIn& grads, const FloatsOfOne& out) {
        const WithoutGil without_gil;
        const DefaultFloatMode mode;
        bag_dots({offsets.data(), offsets.shape(0), false, nullptr, grads.data(), grads.shape(1)}, rows.shape(0),
                 rows.data(), out.data());
      },
      "rows"_a, "offsets"_a, "grads"_a, "out"_a,
      "Dot products float32[N] of rows float32[N, dim] with the gradients float32[B, dim] of their bags.");
}

}  // namespace bunkbed
