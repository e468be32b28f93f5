// Mirrors recsys/seen_pairs.h and recsys/ranks.h.
#include "recsys/seen_pairs.h"

#include "base/error.h"
#include "bindings/bindings.h"
#include "recsys/ranks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

void bind_seen_pairs(nb::module_& m) {
  nb::class_<SeenPairs>(m, "SeenPairs", "A set of (user, item) pairs; see bunkbed.train.data.sampling.")
      .def(
          "__init__",
          [](SeenPairs* self, const Ids& keys, int64_t num_items) {
            const WithoutGil without_gil;
            new (self) SeenPairs(keys.data(), keys.shape(0), num_items);
          },
          "keys"_a, "num_items"_a, "keys: int64[N], user * num_items + item, ascending.")
      .def(
          "contains",
          [](const SeenPairs& pairs, const Ids& users, const Ids& items) {
            const size_t n = users.shape(0);
            if (items.shape(0) != n) {
              throw Error(ErrorKind::kInvalid,
                          std::to_string(n) + " users and " + std::to_string(items.shape(0)) + " items are no pairs");
            }
            auto* found = static_cast<bool*>(allocate_array(n));
            const nb::object owner = own_block(found, n);
            {
              const WithoutGil without_gil;
              pairs.contains(n, users.data(), items.data(), found);
            }
            return nb::ndarray<nb::numpy, bool, nb::ndim<1>>(found, {n}, owner);
          },
          "users"_a, "items"_a, "Return bool[N]: whether each pair of int64[N] users and items is in the set.")
      .def(
          "clashes",
          [](SeenPairs& pairs, const Ids& users, const Ids& items) {
            size_t bytes = 0;
            size_t n = 0;
            int64_t* places = nullptr;
            {
              const WithoutGil without_gil;
              const size_t most = pairs.most_clashes(users.shape(0), users.data(), items.shape(0), items.data());
              bytes = (most + 1) * sizeof(int64_t);
              places = static_cast<int64_t*>(allocate_array(bytes));
              n = pairs.clashes(users.shape(0), users.data(), items.shape(0), items.data(), places);
            }
            return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(places, {n}, own_block(places, bytes));
          },
          "users"_a, "items"_a,
          "Return int64[S]: the places, in a matrix of B x M, of the pairs of int64[B] users and int64[M] distinct "
          "items that "
          "are in the set.")
      .def(
          "items_of",
          [](const SeenPairs& pairs, int64_t user) {
            const SeenPairs::Items own = pairs.items_of(user);
            const size_t bytes = own.n * sizeof(int64_t);
            auto* items = static_cast<int64_t*>(allocate_array(bytes));
            for (size_t i = 0; i < own.n; ++i) items[i] = own.keys[i] - user * pairs.num_items();
            return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(items, {own.n}, own_block(items, bytes));
          },
          "user"_a, "Return int64[S]: the items of a user, ascending.");
}

namespace {

using Scores = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;

ScoreBlock score_block(const Scores& scores) {
  const size_t rows = scores.shape(0), columns = scores.shape(1);
  if (scores.stride(1) != 1 || scores.stride(0) < static_cast<int64_t>(columns) || columns == 0) {
    throw Error(ErrorKind::kInvalid, "scores of a row must be neighbours in memory, and at least one");
  }
  return {scores.data(), rows, columns, static_cast<size_t>(scores.stride(0))};
}

}  // namespace

void bind_ranks(nb::module_& m) {
  using Floors = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using Counts = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  m.def(
      "count_reaching",
      [](const Scores& scores, const Ids& hidden, const Ids& starts, const Floors& floors, const Counts& counts) {
        const ScoreBlock block = score_block(scores);
        const size_t rows = block.rows;
        if (starts.shape(0) != rows + 1 || counts.shape(0) != floors.shape(0)) {
          throw Error(ErrorKind::kInvalid, std::to_string(rows) + " rows of scores need " + std::to_string(rows + 1) +
                                               " starts, got " + std::to_string(starts.shape(0)) + "; " +
                                               std::to_string(floors.shape(0)) + " floors need as many counts, got " +
                                               std::to_string(counts.shape(0)));
        }
        const WithoutGil without_gil;
        count_reaching(block, hidden.shape(0), hidden.data(), {starts.data(), floors.data(), floors.shape(0)},
                       counts.data());
      },
      "scores"_a, "hidden"_a, "starts"_a, "floors"_a, "counts"_a,
      "Set the scores float32[R, C] at hidden places, int64[H] of row * (scores between rows) + column, to -inf. Then "
      "add to counts int64[F] the number of scores of its row that are at least floors float32[F]; row r has the "
      "floors from starts[r] to starts[r + 1], int64[R + 1].");
  using Best = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  using Columns = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  m.def(
      "keep_best",
      [](const Scores& scores, const Ids& hidden, int64_t first_column, const Best& best, const Columns& columns) {
        const ScoreBlock block = score_block(scores);
        const size_t k = best.shape(1);
        if (k == 0 || best.shape(0) != block.rows || columns.shape(0) != block.rows || columns.shape(1) != k) {
          throw Error(ErrorKind::kInvalid, std::to_string(block.rows) +
                                               " rows of scores need as many rows of best "
                                               "scores and of columns, of one length from 1 on");
        }
        const WithoutGil without_gil;
        keep_best(block, hidden.shape(0), hidden.data(), first_column, {best.data(), columns.data(), k});
      },
      "scores"_a, "hidden"_a, "first_column"_a, "best"_a, "columns"_a,
      "Set the scores float32[R, C] at hidden places, int64[H] of row * (scores between rows) + column, to -inf. Then "
      "take each score that is better than the last of its row into best float32[R, k], best first, and its column, "
      "numbered from first_column, into columns int64[R, k]. Equal scores are in the order in which they came.");
}

}  // namespace bunkbed
