// Mirrors many/many.h. Arrays come checked from torch/collection.py: ids of a part lie one after another in one array.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "base/error.h"
#include "base/float_mode.h"
#include "base/memory.h"
#include "bindings/bindings.h"
#include "many/many.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

namespace {

using Grads = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Weights = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Offsets, a Pooling, and weights.
using BagsIn = std::tuple<Ids, int, std::optional<Weights>>;

PartBags bags_of(const BagsIn& bags) {
  const auto& [offsets, pooling, weights] = bags;
  return {offsets.data(), offsets.shape(0), static_cast<Pooling>(pooling),
          weights.has_value() ? weights->data() : nullptr};
}

// Floats of whole cache lines, so that each part begins at one.
size_t round_to_line(size_t floats) { return (floats + 15) / 16 * 16; }

template <typename Call>
void unlocked(Call&& call) {
  const WithoutGil without_gil;
  const DefaultFloatMode mode;
  call();
}

}  // namespace

void bind_many(nb::module_& m) {
  m.def(
      "lookup_many",
      [](const std::vector<Table*>& tables, const Ids& ids, const std::vector<size_t>& sizes,
         const std::vector<bool>& touch, const std::vector<bool>& makes_batch,
         const std::vector<std::optional<BagsIn>>& bags, const FloatsOut& out, const std::vector<size_t>& places) {
        std::vector<Batch> batches(tables.size());
        std::vector<LookupPart> parts;
        parts.reserve(tables.size());
        size_t at = 0;
        for (size_t i = 0; i < tables.size(); ++i) {
          LookupPart part{tables[i],
                          ids.data() + at,
                          sizes.at(i),
                          touch.at(i),
                          std::nullopt,
                          out.data() + places.at(i),
                          makes_batch.at(i) ? &batches[i] : nullptr};
          if (bags.at(i).has_value()) part.bags = bags_of(*bags[i]);
          parts.push_back(part);
          at += sizes[i];
        }
        unlocked([&] { lookup_many(parts); });
        nb::list made;
        for (size_t i = 0; i < tables.size(); ++i) {
          made.append(makes_batch[i] ? nb::cast(std::move(batches[i])) : nb::none());
        }
        return made;
      },
      "tables"_a, "ids"_a, "sizes"_a, "touch"_a, "makes_batch"_a, "bags"_a, "out"_a, "places"_a,
      "Look up `sizes[i]` of the `ids` in each table, into `out` from the float `places[i]` on, after every table was "
      "checked. A part of bags has (offsets, pooling, weights or None). Returns the batches that are wanted, or None.");
  m.def(
      "sum_many",
      [](const std::vector<const Batch*>& batches, const std::vector<Grads>& grads,
         const std::vector<std::optional<BagsIn>>& bags) {
        std::vector<SumPart> parts;
        parts.reserve(batches.size());
        size_t floats = 0;
        for (size_t i = 0; i < batches.size(); ++i) {
          const size_t dim = grads.at(i).shape(1);
          SumPart part{batches[i], {nullptr, 0, false, nullptr, grads[i].data(), dim}, 1, nullptr, {}};
          size_t rows = batches[i]->size();
          if (bags.at(i).has_value()) {
            const PartBags of = bags_of(*bags[i]);
            part.bags.offsets = of.offsets;
            part.bags.num_bags = rows = of.num_bags;
            part.bags.is_mean = of.pooling == Pooling::kMean;
            part.bags.weights = of.weights;
          }
          const auto width = static_cast<int64_t>(dim);
          // The stride of an axis with one element means nothing.
          const int64_t stride = rows > 1 ? grads[i].stride(0) : width;
          if (grads[i].shape(0) != rows || (dim > 1 && grads[i].stride(1) != 1) || stride < 0 || stride % width != 0 ||
              stride / width * static_cast<int64_t>(rows) > int64_t{~uint32_t{0}} ||
              (bags[i].has_value() && stride != width)) {
            throw Error(ErrorKind::kInvalid, "part " + std::to_string(i) + ": these are not the gradients of " +
                                                 std::to_string(rows) + " rows of " + std::to_string(dim));
          }
          part.step = static_cast<uint32_t>(stride / width);
          parts.push_back(part);
          floats += round_to_line(batches[i]->num_unique() * dim);
        }
        auto* sums = static_cast<float*>(allocate_array(std::max<size_t>(1, floats) * sizeof(float)));
        const nb::object owner = own_block(sums, std::max<size_t>(1, floats) * sizeof(float));
        size_t at = 0;
        for (SumPart& part : parts) {
          part.sums = sums + at;
          at += round_to_line(part.batch->num_unique() * part.bags.dim);
        }
        unlocked([&] { sum_many(&parts); });
        nb::list results;
        for (const SumPart& part : parts) {
          results.append(nb::make_tuple(
              nb::ndarray<nb::numpy, float, nb::ndim<2>>(part.sums, {part.batch->num_unique(), part.bags.dim}, owner),
              std::sqrt(part.squares.rounded())));
        }
        return results;
      },
      "batches"_a, "grads"_a, "bags"_a,
      "What Batch.sum() or Batch.sum_bags() returns, for each batch. Gradients without bags may have rows apart, by a "
      "multiple of their length.");
  m.def(
      "update_many",
      [](const std::vector<Table*>& tables, const std::vector<const Batch*>& batches, const std::vector<FloatsIn>& sums,
         const std::vector<std::optional<double>>& lrs, const std::vector<std::optional<int64_t>>& steps) {
        std::vector<UpdatePart> parts;
        parts.reserve(tables.size());
        for (size_t i = 0; i < tables.size(); ++i) {
          const Batch* const batch = batches.at(i);
          if (sums.at(i).shape(0) != batch->num_unique() || sums[i].shape(1) != tables[i]->spec().dim) {
            throw Error(ErrorKind::kInvalid, "table '" + tables[i]->name() + "': the sums are not those of its batch");
          }
          parts.push_back({tables[i], batch, sums[i].data(), lrs.at(i), steps.at(i)});
        }
        unlocked([&] { update_many(parts); });
      },
      "tables"_a, "batches"_a, "sums"_a, "lrs"_a, "steps"_a,
      "Run update_batch() of each of several distinct tables, after every table was checked.");
}

}  // namespace bunkbed
