// 16-bit weights: bfloat16 (8 bits of exponent, 7 of fraction) and IEEE float16 (5 and 10).
// Included once by each translation unit of the kernels; see kernels_impl.h.
//
// Integer arithmetic throughout, not the processor's conversion instructions: every level then gives the same bits,
// NaN payloads included, and the scalar level needs no F16C.
//
// Nearest: to nearest, ties to even, overflow to infinity, as the frameworks convert. A NaN stays a NaN (made quiet).
//
// Stochastic: a finite value x between two neighbouring values lo < x < hi of the narrow type becomes hi with
// probability (x - lo) / (hi - lo), so its expectation is x; a value that the narrow type has stays as it is.
// Element i of row `id` uses 16 bits of the Philox stream of philox_impl.h: block kRoundingStream + i / 8,
// extra = step mod 2^32, bits 16 (i mod 2) to 16 (i mod 2) + 15 of word (i mod 8) / 2. That is exact for
// bfloat16 and for normal float16; for subnormal float16 the probability is rounded down to a multiple of 2^-16.
// A finite value never becomes infinite: beyond the largest finite value it becomes that value. (Rounding to
// infinity with some probability would lose a row for good.) Infinities and NaNs stay what they are.

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline uint16_t bfloat16_nearest(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

inline uint16_t bfloat16_stochastic(float x, uint32_t random16) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t raised = (magnitude + random16) >> 16;
  const uint32_t finite = raised < 0x7f80u ? raised : 0x7f7fu;
  const uint32_t special = (magnitude >> 16) | (magnitude > 0x7f800000u ? 0x40u : 0u);
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (magnitude >= 0x7f800000u ? special : finite));
}

inline float float16_widen(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + 0x38000000u + (magnitude >= 0x7c00u ? 0x38000000u : 0u);
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return float_of(sign | (magnitude < 0x400u ? subnormal : normal));
}

// Infinity, or the NaN with its upper payload bits.
inline uint32_t float16_special(uint32_t magnitude) {
  return magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
}

inline uint16_t float16_nearest(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5, whose last bit is worth 2^-24, makes the adder round to a multiple of it.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t rounded = magnitude >= 0x47800000u ? float16_special(magnitude) : finite;
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | rounded);
}

inline uint16_t float16_stochastic(float x, uint32_t random16) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + (random16 & 0x1fffu)) >> 13;
  // Masks from the borrow of a subtraction: GCC makes branches of conditions that guard this much work, and then
  // no vectors.
  const uint32_t is_subnormal = 0u - ((magnitude - 0x38800000u) >> 31);
  const uint32_t is_special = 0u - ((0x7f7fffffu - magnitude) >> 31);
  // In units of 2^-24, the subnormals' spacing. Larger values must not reach the conversion to an integer.
  const float units = float_of(magnitude & is_subnormal) * 0x1p24f;
  const auto whole = static_cast<int32_t>(units);
  const auto part = static_cast<int32_t>((units - static_cast<float>(whole)) * 0x1p16f);
  const uint32_t subnormal = static_cast<uint32_t>(whole) + ((static_cast<uint32_t>(part) + random16) >> 16);
  const uint32_t raised = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  // As values, not encodings: beyond the range `raised` has run past the exponent's five bits.
  const uint32_t finite = raised < 0x7c00u ? raised : 0x7bffu;
  const uint32_t rounded = (float16_special(magnitude) & is_special) | (finite & ~is_special);
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | rounded);
}

void widen(DType dtype, int64_t n, const void* x, float* __restrict out) {
  if (dtype == DType::kFloat32) {
    __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(x);
  if (dtype == DType::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) out[i] = float_of(uint32_t{halves[i]} << 16);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = float16_widen(halves[i]);
  }
}

void narrow_nearest(DType dtype, int64_t n, const float* __restrict x, void* out) {
  if (dtype == DType::kFloat32) {
    __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  auto* __restrict halves = static_cast<uint16_t*>(out);
  if (dtype == DType::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) halves[i] = bfloat16_nearest(x[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) halves[i] = float16_nearest(x[i]);
  }
}

constexpr int64_t kGroupRoundings = 8 * kGroupBlocks;

// The group's words in stream order are its 16-bit numbers in stream order, on a little-endian machine.
inline void random_group(uint64_t seed, int64_t id, int64_t step, int64_t begin, uint16_t* random16) {
  PhiloxWords words;
  philox_group(seed, id, kRoundingStream + static_cast<uint32_t>(begin / 8), static_cast<uint32_t>(step), &words);
  alignas(64) uint32_t in_order[2 * kGroupPairs];
  for (int64_t p = 0; p < kGroupPairs; ++p) {
    in_order[2 * p] = words.even[p];
    in_order[2 * p + 1] = words.odd[p];
  }
  __builtin_memcpy(random16, in_order, sizeof in_order);
}

void narrow_stochastic(DType dtype, int64_t n, const float* __restrict x, uint64_t seed, int64_t id, int64_t step,
                       void* out) {
  if (dtype == DType::kFloat32) {
    __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  auto* __restrict halves = static_cast<uint16_t*>(out);
  for (int64_t begin = 0; begin < n; begin += kGroupRoundings) {
    alignas(64) uint16_t random16[kGroupRoundings];
    random_group(seed, id, step, begin, random16);
    const int64_t count = n - begin < kGroupRoundings ? n - begin : kGroupRoundings;
    if (dtype == DType::kBFloat16) {
      for (int64_t i = 0; i < count; ++i) halves[begin + i] = bfloat16_stochastic(x[begin + i], random16[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) halves[begin + i] = float16_stochastic(x[begin + i], random16[i]);
    }
  }
}
