// Mirrors seen_pairs.h.
#include "recsys/seen_pairs.h"

#include "base/error.h"
#include "bindings/bindings.h"

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

}  // namespace bunkbed
