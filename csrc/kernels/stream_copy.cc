#include "kernels/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace bunkbed {

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__x86_64__)
  constexpr size_t kLine = 64;  // only whole lines bypass the caches
  const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* const in = reinterpret_cast<const __m128i*>(from + at);
    auto* const out = reinterpret_cast<__m128i*>(to + at);
    const __m128i parts[4] = {_mm_loadu_si128(in), _mm_loadu_si128(in + 1), _mm_loadu_si128(in + 2),
                              _mm_loadu_si128(in + 3)};
    for (int i = 0; i < 4; ++i) _mm_stream_si128(out + i, parts[i]);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();  // a lock or an atomic orders ordinary stores only
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace bunkbed
