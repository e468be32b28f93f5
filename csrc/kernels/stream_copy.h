// A copy that bypasses the processor's caches, for bytes that are not read soon.
#pragma once

#include <cstddef>

namespace bunkbed {

// Like memcpy. Another thread sees the bytes once it is synchronized with the return of this call.
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace bunkbed
