#include "kernels/impl/kernels_impl.h"

namespace bunkbed {

extern const Kernels kKernelsAvx512;
constinit const Kernels kKernelsAvx512 = make_kernels(Simd::kAvx512);

}  // namespace bunkbed
