#include "kernels/impl/kernels_impl.h"

namespace bunkbed {

extern const Kernels kKernelsScalar;
constinit const Kernels kKernelsScalar = make_kernels(Simd::kScalar);

}  // namespace bunkbed
