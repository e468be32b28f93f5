// 16-bit fields: bfloat16 (8 bits of exponent, 7 of fraction) and IEEE float16 (5 and 10).
// Included once by each translation unit of the kernels; see kernels_impl.h.
//
// Uses integer arithmetic throughout, not the processor's conversion instructions: every level then gives the same
// bits, NaN payloads included, and the scalar level needs no F16C.
//
// Nearest: to nearest, ties to even, overflow to infinity, as the frameworks convert. A NaN stays a (quiet) NaN.
//
// Stochastic: a finite value x between two neighbouring values lo < x < hi of the narrow type becomes hi with
// probability (x - lo) / (hi - lo), so its expectation is x. A value that the narrow type can represent does not
// change. Element i of a field of row `id` uses 16 bits of the Philox stream of philox_impl.h: block kRoundingStream +
// field * kFieldStream + i / 8, extra = step mod 2^32, bits 16 (i mod 2) to 16 (i mod 2) + 15 of word (i mod 8) / 2.
// The probability is exact for bfloat16 and for normal float16; for subnormal float16 it is rounded down to a multiple
// of 2^-16. A finite value beyond the largest finite one becomes that one: an infinite weight would make the row
// useless for all later steps. Infinities and NaNs do not change.

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline uint16_t bfloat16_nearest(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

inline float float16_widen(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + 0x38000000u + (magnitude >= 0x7c00u ? 0x38000000u : 0u);
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return float_of(sign | (magnitude < 0x400u ? subnormal : normal));
}

// The bits of infinity, or of the NaN with its upper payload bits.
inline uint32_t float16_special(uint32_t magnitude) {
  return magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
}

inline uint16_t float16_nearest(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // The last bit of 0.5 is 2^-24: adding 0.5 rounds the sum to a multiple of 2^-24.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t rounded = magnitude >= 0x47800000u ? float16_special(magnitude) : finite;
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | rounded);
}

inline void widen_halves(DType dtype, int64_t n, const uint16_t* __restrict halves, float* __restrict out) {
  if (dtype == DType::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) out[i] = float_of(uint32_t{halves[i]} << 16);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = float16_widen(halves[i]);
  }
}

void widen(DType dtype, int64_t n, const void* x, float* __restrict out) {
  if (dtype == DType::kFloat32) {
    __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  widen_halves(dtype, n, static_cast<const uint16_t*>(x), out);
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

// ---- Stochastic rounding, a vector at a time

typedef uint32_t Words32 __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints32 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Words16 __attribute__((vector_size(kVectorBytes / 2)));  // as many as Words32 has

constexpr int64_t kVectorFloats = kVectorBytes / sizeof(float);

// All ones in lanes where x < limit. Both must be below 2^31: only signed comparisons exist at every level.
inline Words32 is_below(Words32 x, int32_t limit) { return (Words32)((Ints32)x < limit); }

inline Words32 bfloat16_stochastic(Words32 bits, Words32 random16) {
  const Words32 magnitude = bits & 0x7fffffffu;
  // Values from the largest finite one on are not raised: they become that one, or stay infinite.
  const Words32 raise = random16 & is_below(magnitude, 0x7f7f0000);
  const Words32 quiet = ~is_below(magnitude, 0x7f800001) & 0x40u;
  return ((bits + raise) >> 16) | quiet;
}

inline Words32 float16_stochastic(Words32 bits, Words32 random16) {
  const Words32 magnitude = bits & 0x7fffffffu;
  const Words32 normal = (magnitude - 0x38000000u + (random16 & 0x1fffu)) >> 13;
  const Words32 is_subnormal = is_below(magnitude, 0x38800000);
  // In units of 2^-24, the spacing of subnormals. Larger values must not be converted to an integer.
  const Floats units = (Floats)(magnitude & is_subnormal) * 0x1p24f;
  const Ints32 whole = __builtin_convertvector(units, Ints32);
  const Ints32 part = __builtin_convertvector((units - __builtin_convertvector(whole, Floats)) * 0x1p16f, Ints32);
  const Words32 subnormal = (Words32)whole + (((Words32)part + random16) >> 16);
  const Words32 raised = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  // Compares values, not encodings: beyond the range `raised` exceeds the exponent's five bits.
  const Words32 fits = is_below(raised, 0x7c00);
  const Words32 finite = (raised & fits) | (0x7bffu & ~fits);
  const Words32 is_nan = ~is_below(magnitude, 0x7f800001);
  const Words32 special = 0x7c00u | (is_nan & (0x200u | ((magnitude >> 13) & 0x3ffu)));
  const Words32 is_finite = is_below(magnitude, 0x7f800000);
  return ((bits >> 16) & 0x8000u) | (finite & is_finite) | (special & ~is_finite);
}

// 64 random 16-bit numbers, for elements [begin, begin + 64) of a field. On a little-endian machine the words of a
// group, in stream order, are these numbers in order. They are kept as vectors: a load of another width would stall on
// the store.
constexpr int64_t kGroupRoundings = 8 * kGroupBlocks;
constexpr size_t kGroupVectors = kGroupRoundings * sizeof(uint16_t) / kVectorBytes;
struct RandomGroup {
  Words64 at[kGroupVectors];
};

// Returns lanes begin, begin + 1, ... of a and b alternately, as one vector.
inline Words64 interleave(Words64 a, Words64 b, size_t begin) {
  constexpr size_t kWords = PhiloxState::kWords;
#if defined(__clang__)
  Words64 out;
  for (size_t i = 0; i < kWords; ++i) out[i] = (i % 2 == 0 ? a : b)[begin + i / 2];
  return out;
#else
  Words64 from;
  for (size_t i = 0; i < kWords; ++i) from[i] = begin + i / 2 + kWords * (i % 2);
  return __builtin_shuffle(a, b, from);
#endif
}

template <size_t kFields>
[[gnu::always_inline]] inline void random_groups(const RoundingKey& key, const uint32_t* fields, int64_t begin,
                                                 RandomGroup* random) {
  uint32_t first_blocks[kFields];
  for (size_t f = 0; f < kFields; ++f) {
    first_blocks[f] = kRoundingStream + fields[f] * kFieldStream + static_cast<uint32_t>(begin / 8);
  }
  PhiloxState groups[kFields];
  const auto extra = static_cast<uint32_t>(key.step);
  const RoundKeys& keys = key.seed;
  const auto key_of = [&keys](int round, uint64_t* key0, uint64_t* key1) {
    *key0 = keys.low[round];
    *key1 = keys.high[round];
  };
  if constexpr (kVectorBytes == 64) {
    philox_rounds<kFields>(key_of, key.id, first_blocks, extra, groups);
  } else {
    // One group fills the registers and has enough vectors to keep the multiplier busy.
    for (size_t f = 0; f < kFields; ++f) philox_rounds<1>(key_of, key.id, first_blocks + f, extra, groups + f);
  }
  constexpr size_t kWords = PhiloxState::kWords;
  for (size_t f = 0; f < kFields; ++f) {
    for (size_t v = 0; v < PhiloxState::kVectors; ++v) {
      const Words64 first = (groups[f].c0[v] & 0xffffffffu) | (groups[f].c1[v] << 32);
      const Words64 second = (groups[f].c2[v] & 0xffffffffu) | (groups[f].c3[v] << 32);
      // The four words of a block are its lane of `first` and its lane of `second`.
      random[f].at[2 * v] = interleave(first, second, 0);
      random[f].at[2 * v + 1] = interleave(first, second, kWords / 2);
    }
  }
}

// Intrinsics, because GCC makes two conversions of half the width and a shuffle of each of these functions.
inline Words32 widen_words(Words16 x) {
#if defined(__AVX512F__)
  return (Words32)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x);
#elif defined(__AVX2__)
  return (Words32)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Words32);
#endif
}

inline Words16 narrow_words(Words32 x) {
#if defined(__AVX512F__)
  return (Words16)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x);
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_packus_epi32((__m256i)x, (__m256i)x);
  return (Words16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
#else
  return __builtin_convertvector(x, Words16);
#endif
}

template <DType kDType>
[[gnu::always_inline]] inline void narrow_vectors(int64_t n, const float* x, const RandomGroup& random, uint16_t* out) {
  for (int64_t i = 0; i < kGroupRoundings / kVectorFloats; ++i) {
    const int64_t begin = i * kVectorFloats;
    if (begin >= n) break;
    Words32 bits;
    __builtin_memcpy(&bits, x + begin, sizeof bits);
    Words16 random16[2];
    __builtin_memcpy(random16, &random.at[i / 2], sizeof random16);
    const Words32 wide = widen_words(random16[i % 2]);
    const Words16 halves =
        narrow_words(kDType == DType::kBFloat16 ? bfloat16_stochastic(bits, wide) : float16_stochastic(bits, wide));
    if (n - begin >= kVectorFloats) {
      __builtin_memcpy(out + begin, &halves, sizeof halves);
    } else {
      __builtin_memcpy(out + begin, &halves, static_cast<size_t>(n - begin) * sizeof(uint16_t));
    }
  }
}

// Rounds x[0 .. n), n at most kGroupRoundings. x may be read up to the end of the vector that has its last value.
[[gnu::always_inline]] inline void narrow_group(DType dtype, int64_t n, const float* x, const RandomGroup& random,
                                                uint16_t* out) {
  if (dtype == DType::kBFloat16) {
    narrow_vectors<DType::kBFloat16>(n, x, random, out);
  } else {
    narrow_vectors<DType::kFloat16>(n, x, random, out);
  }
}

void narrow_stochastic(DType dtype, int64_t n, const float* __restrict x, const RoundingKey& key, void* out) {
  if (dtype == DType::kFloat32) {
    __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  auto* halves = static_cast<uint16_t*>(out);
  RandomGroup random;
  int64_t begin = 0;
  for (; begin + kGroupRoundings <= n; begin += kGroupRoundings) {
    random_groups<1>(key, &key.field, begin, &random);
    narrow_group(dtype, kGroupRoundings, x + begin, random, halves + begin);
  }
  if (begin == n) return;
  alignas(64) float rest[kGroupRoundings] = {};
  __builtin_memcpy(rest, x + begin, static_cast<size_t>(n - begin) * sizeof(float));
  random_groups<1>(key, &key.field, begin, &random);
  narrow_group(dtype, n - begin, rest, random, halves + begin);
}
