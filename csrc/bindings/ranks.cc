// Mirrors ranks.h.
#include "recsys/ranks.h"

#include "base/error.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

void bind_ranks(nb::module_& m) {
  using Scores = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
  using Floors = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using Counts = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  m.def(
      "count_reaching",
      [](const Scores& scores, const Ids& hidden, const Ids& starts, const Floors& floors, const Counts& counts) {
        const size_t rows = scores.shape(0), columns = scores.shape(1);
        if (starts.shape(0) != rows + 1 || counts.shape(0) != floors.shape(0)) {
          throw Error(ErrorKind::kInvalid, std::to_string(rows) + " rows of scores need " + std::to_string(rows + 1) +
                                               " starts, got " + std::to_string(starts.shape(0)) + "; " +
                                               std::to_string(floors.shape(0)) + " floors need as many counts, got " +
                                               std::to_string(counts.shape(0)));
        }
        if (scores.stride(1) != 1 || scores.stride(0) < static_cast<int64_t>(columns) || columns == 0) {
          throw Error(ErrorKind::kInvalid, "scores of a row must be neighbours in memory, and at least one");
        }
        const WithoutGil without_gil;
        count_reaching({scores.data(), rows, columns, static_cast<size_t>(scores.stride(0))}, hidden.shape(0),
                       hidden.data(), {starts.data(), floors.data(), floors.shape(0)}, counts.data());
      },
      "scores"_a, "hidden"_a, "starts"_a, "floors"_a, "counts"_a,
      "Set the scores float32[R, C] at hidden places, int64[H] of row * (scores between rows) + column, to -inf. Then "
      "add to counts int64[F] the number of scores of its row that are at least floors float32[F]; row r has the "
      "floors from starts[r] to starts[r + 1], int64[R + 1].");
}

}  // namespace bunkbed
