// Copies past the processor's caches, for bytes that nobody here reads next.
#pragma once

#include <cstddef>

namespace bunkbed {

// As memcpy. Other threads see the bytes once they are told that it has returned.
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace bunkbed
