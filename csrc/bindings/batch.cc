// Mirrors batch.h and gradients.h.
#include <cmath>

#include "bindings/bindings.h"
#include "error.h"
#include "float_mode.h"
#include "gradients.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

void bind_batch(nb::module_& m) {
  nb::class_<Batch>(m, "Batch", "Ids of a training step, deduped once; Table.batch makes it.")
      .def("__len__", &Batch::num_unique)
      .def(
          "unique",
          [](const Batch& batch) {
            const size_t n = batch.num_unique();
            auto* ids = static_cast<int64_t*>(allocate_array(n * sizeof(int64_t)));
            std::copy(batch.unique().begin(), batch.unique().end(), ids);
            return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(ids, {n}, own_block(ids, n * sizeof(int64_t)));
          },
          "int64[U], each id once; the order depends on the batch alone.")
      .def(
          "sum",
          [](const Batch& batch, const FloatsIn& grads) {
            const size_t n = batch.num_unique();
            const size_t dim = grads.shape(1);
            if (grads.shape(0) != batch.size()) {
              throw Error(ErrorKind::kInvalid, "a batch of " + std::to_string(batch.size()) + " ids got " +
                                                   std::to_string(grads.shape(0)) + " gradients");
            }
            const size_t bytes = n * dim * sizeof(float);
            auto* sums = static_cast<float*>(allocate_array(bytes));
            const nb::object owner = own_block(sums, bytes);
            double squares = 0.0;
            {
              const nb::gil_scoped_release release;
              const DefaultFloatMode mode;
              squares = sum_gradients(batch, grads.data(), dim, sums);
            }
            return nb::make_tuple(nb::ndarray<nb::numpy, float, nb::ndim<2>>(sums, {n, dim}, owner),
                                  std::sqrt(squares));
          },
          "grads"_a,
          "Sum float32[N, dim] gradients of equal ids in batch order: (float32[U, dim] in the order of unique(), their "
          "Euclidean norm in float64, which is finite only if all of them are).");
}

}  // namespace bunkbed
