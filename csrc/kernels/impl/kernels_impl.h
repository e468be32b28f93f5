// The one source of all row kernels. kernels_scalar.cc, kernels_avx2.cc and kernels_avx512.cc each include it once
// and are compiled with the flags of their level; the loops are written so that the compiler vectorizes them.
//
// All code here and in the included parts is in an unnamed namespace. It uses no inline function of the standard
// library or of our own headers. The linker would see such a function, compiled with AVX-512 in one file and without it
// in another, as one symbol, and might keep the AVX-512 copy for all callers.

#include "kernels/kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace bunkbed {
namespace {

#include "kernels/impl/philox_impl.h"
#include "kernels/impl/init_impl.h"
#include "kernels/impl/rows_impl.h"
#include "kernels/impl/optimizer_impl.h"
#include "kernels/impl/precision_impl.h"
#include "kernels/impl/narrow_update_impl.h"
#include "kernels/impl/losses_impl.h"
#include "kernels/impl/ranks_impl.h"
#include "kernels/impl/pool_impl.h"
#include "kernels/impl/gather_impl.h"

// The checksum does not depend on the level; kernels.cc fills it in.
constexpr Kernels make_kernels(Simd level) {
  return Kernels{level,          init_row,          update_row, update_rows,    update_narrow,
                 add_row,        add_scaled_row,    sum_rows,   pool_rows,      gather_rows,
                 scale_row,      all_finite,        dot,        sum_of_squares, widen,
                 narrow_nearest, narrow_stochastic, bpr_row,    pair_grad_row,  count_reaching,
                 nullptr};
}

}  // namespace
}  // namespace bunkbed
