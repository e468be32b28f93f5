#include "kernels/impl/kernels_impl.h"

namespace bunkbed {

extern const Kernels kKernelsAvx2;
constinit const Kernels kKernelsAvx2 = make_kernels(Simd::kAvx2);

}  // namespace bunkbed
