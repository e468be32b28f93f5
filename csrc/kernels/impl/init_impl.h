// Initial values of a row. This is file format: FORMAT.md repeats it, the tests pin its golden bytes.
// Included once by each translation unit of the kernels; see kernels_impl.h.
//
// Element i of row `id` depends on (kind, a, b, seed, id, i) only, so a narrower row is a prefix of a wider one.
// Block i / 4 of the Philox stream (philox_impl.h, block = i / 4, extra = 0) has the words w0 w1 w2 w3; all
// arithmetic below is float32, each operation rounded to nearest even, none fused; (float)x is exact.
//
// Zeros            value = +0
//
// Uniform(a, b)    low = (float)a, high = (float)b, span = high - low, w = word i mod 4
//                  value = min(low + (float)(w >> 8) * 2^-24 * span, limit)
//                  limit = the largest float32 below high, or low where low >= high: a sum that rounds up to
//                  high must not leave [low, high)
//
// Normal(a)        Box and Muller's transform; std = (float)a; elements 2 p and 2 p + 1 come from one pair of words,
//                  (w0, w1) or (w2, w3), called (u, v) here.
//   radius   n = (u >> 8) + 1, in [1, 2^24]; n / 2^24 is the uniform variate
//            split (float)n = m * 2^e with m in [0x1.6a09e6p-1, 0x1.6a09e6p+0), as integers: with B the bits of
//            (float)n, e = (B - 0x3f3504f3) >> 23, bits of m = B - (e << 23)
//            s = m - 1                                            (exact)
//            q = Q0 + s (Q1 + s (Q2 + ... + s Q7))                (Horner, innermost first: multiply, then add)
//            radius = sqrt((float)(e - 24) * kMinusTwoLn2 + s * q) * std
//            q approximates -2 ln(1 + s) / s to 2e-7
//   angle    y = (float)(((int32)(v << 2) >> 8) | 1) * 2^-23      (arithmetic shift; an odd number in (-1, 1))
//            z = y * y
//            sine = y * (S0 + z (S1 + z (S2 + z S3)));  cosine = C0 + z (C1 + z (C2 + z C3))
//            of y * pi / 4: a quarter of the circle. Bit 30 of v reflects it, bit 31 turns it by half a circle:
//            where bit 31 of v is set, radius = -radius
//            element 2 p     = (bit 30 of v set ? sine : cosine) * radius
//            element 2 p + 1 = (bit 30 of v set ? cosine : sine) * radius
//
// No value exceeds 5.77 std. Box-Muller rather than the inverse distribution function: two values share one
// logarithm and one root and need half the arithmetic, and both are branch-free.

constexpr float kMinusTwoLn2 = -0x1.62e430p+0f;
constexpr float kQ0 = -0x1.fffffep+0f;
constexpr float kQ1 = 0x1.00007ap+0f;
constexpr float kQ2 = -0x1.5559dcp-1f;
constexpr float kQ3 = 0x1.ff623cp-2f;
constexpr float kQ4 = -0x1.978e2ep-2f;
constexpr float kQ5 = 0x1.614c08p-2f;
constexpr float kQ6 = -0x1.4c3d08p-2f;
constexpr float kQ7 = 0x1.9dfa6ep-3f;

constexpr float kS0 = 0x1.921fb6p-1f;
constexpr float kS1 = -0x1.4abbbap-4f;
constexpr float kS2 = 0x1.465e92p-9f;
constexpr float kS3 = -0x1.2d9302p-15f;

constexpr float kC0 = 0x1.fffffep-1f;
constexpr float kC1 = -0x1.3bd38cp-2f;
constexpr float kC2 = 0x1.03ae64p-6f;
constexpr float kC3 = -0x1.4e35dap-12f;

constexpr int64_t kGroupValues = 4 * kGroupBlocks;

inline void normal_group(const PhiloxWords& words, float std, float* __restrict out) {
  for (int64_t p = 0; p < kGroupPairs; ++p) {
    const auto n = static_cast<float>(static_cast<int32_t>((words.even[p] >> 8) + 1));
    const int32_t bits = __builtin_bit_cast(int32_t, n);
    const int32_t exponent = (bits - 0x3f3504f3) >> 23;
    const float s = __builtin_bit_cast(float, bits - (exponent << 23)) - 1.0f;
    const float q = kQ0 + s * (kQ1 + s * (kQ2 + s * (kQ3 + s * (kQ4 + s * (kQ5 + s * (kQ6 + s * kQ7))))));
    const float length = __builtin_sqrtf(static_cast<float>(exponent - 24) * kMinusTwoLn2 + s * q) * std;

    const uint32_t v = words.odd[p];
    const float y = static_cast<float>((static_cast<int32_t>(v << 2) >> 8) | 1) * 0x1p-23f;
    const float z = y * y;
    const float sine = y * (kS0 + z * (kS1 + z * (kS2 + z * kS3)));
    const float cosine = kC0 + z * (kC1 + z * (kC2 + z * kC3));

    const float radius = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, length) ^ (v & 0x80000000u));
    const bool is_reflected = (v & 0x40000000u) != 0;
    out[2 * p] = (is_reflected ? sine : cosine) * radius;
    out[2 * p + 1] = (is_reflected ? cosine : sine) * radius;
  }
}

inline void uniform_group(const PhiloxWords& words, float low, float span, float limit, float* __restrict out) {
  for (int64_t p = 0; p < kGroupPairs; ++p) {
    const float u0 = static_cast<float>(static_cast<int32_t>(words.even[p] >> 8)) * 0x1p-24f;
    const float u1 = static_cast<float>(static_cast<int32_t>(words.odd[p] >> 8)) * 0x1p-24f;
    const float value0 = low + u0 * span;
    const float value1 = low + u1 * span;
    out[2 * p] = value0 < limit ? value0 : limit;
    out[2 * p + 1] = value1 < limit ? value1 : limit;
  }
}

inline float largest_below(float high) {
  const int32_t bits = __builtin_bit_cast(int32_t, high);
  if (high > 0) return __builtin_bit_cast(float, bits - 1);
  if (high < 0) return __builtin_bit_cast(float, bits + 1);
  return -0x1p-149f;
}

void init_row(const InitSpec& spec, int64_t id, int64_t dim, float* out) {
  if (spec.kind == InitKind::kZeros) {
    __builtin_memset(out, 0, static_cast<size_t>(dim) * sizeof(float));
    return;
  }
  const bool is_normal = spec.kind == InitKind::kNormal;
  const auto a = static_cast<float>(spec.a);
  const auto high = static_cast<float>(spec.b);
  const float span = high - a;
  const float limit = a < high ? largest_below(high) : a;
  for (int64_t begin = 0; begin < dim; begin += kGroupValues) {
    PhiloxWords words;
    philox_group(spec.seed, id, static_cast<uint32_t>(begin / 4), 0, &words);
    alignas(64) float tail[kGroupValues];
    const int64_t count = dim - begin < kGroupValues ? dim - begin : kGroupValues;
    float* values = count == kGroupValues ? out + begin : tail;
    if (is_normal) {
      normal_group(words, a, values);
    } else {
      uniform_group(words, a, span, limit, values);
    }
    if (values == tail) __builtin_memcpy(out + begin, tail, static_cast<size_t>(count) * sizeof(float));
  }
}
