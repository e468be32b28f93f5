// Slopes of pairwise and logistic losses over a row of scores.
// Included once by each translation unit of the kernels; see kernels_impl.h.
//
// softplus(d) = max(d, 0) + log1p(t) and sigmoid(d) = (d < 0 ? t : 1) / (1 + t), both from one t = exp(-|d|), which is
// why they are computed together. The polynomials are our own, so that no libm decides about the bits:
//   exp(y), y <= 0   n = round(y / ln 2), r = y - n ln 2 in two steps, 2^n times a polynomial of degree 6; 2 ulp;
//                    below -40 it is 0: smaller values change no digit of a float32 loss and no optimizer step, and
//                    their squares are subnormal, which take the processor a hundred times as long
//   log1p(t)         2 s (1 + s^2 / 3 + s^4 / 5 + ... + s^12 / 13) with s = t / (2 + t): small t keep their digits

constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2High = 0x1.63p-1f;
constexpr float kLn2Low = -0x1.bd0106p-13f;
constexpr float kRoundMagic = 0x1.8p+23f;  // adding it rounds to a whole number, in the low bits
constexpr float kLowestExponent = -40.0f;

inline float exp_of_negative(float y) {
  const float bounded = y < kLowestExponent ? kLowestExponent : y;
  const float shifted = bounded * kLog2E + kRoundMagic;
  const float n = shifted - kRoundMagic;
  const float r = (bounded - n * kLn2High) - n * kLn2Low;
  const float tail =
      5.0000001201e-1f +
      r * (1.6666665459e-1f +
           r * (4.1665795894e-2f + r * (8.3334519073e-3f + r * (1.3981999507e-3f + r * 1.9875691500e-4f))));
  const float mantissa = 1.0f + (r + r * r * tail);
  const int32_t exponent = __builtin_bit_cast(int32_t, shifted) - __builtin_bit_cast(int32_t, kRoundMagic);
  const float power = __builtin_bit_cast(float, (exponent + 127) << 23);
  return y < kLowestExponent ? 0.0f : mantissa * power;
}

inline float log1p_of_fraction(float t) {
  const float s = t / (2.0f + t);
  const float z = s * s;
  const float tail =
      z *
      (0x1.555556p-2f +
       z * (0x1.99999ap-3f + z * (0x1.24924ap-3f + z * (0x1.c71c72p-4f + z * (0x1.745d18p-4f + z * 0x1.3b13b2p-4f)))));
  return (s + s) * (1.0f + tail);
}

// One block of kLanes scores: replaces each by its slope and adds to the sums lane by lane. `weight` of a score is
// exp(hardness * (score - highest)), or 1 where is_weighted is false.
template <bool is_weighted>
inline void loss_block(float hardness, float highest, float positive, float* __restrict x, float* __restrict losses,
                       float* __restrict slopes, float* __restrict weights) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const float score = x[lane];
    const float d = score - positive;
    const float t = exp_of_negative(d < 0.0f ? d : -d);
    const float loss = (d < 0.0f ? 0.0f : d) + log1p_of_fraction(t);
    const float slope = (d < 0.0f ? t : 1.0f) / (1.0f + t);
    const float weight = is_weighted ? exp_of_negative(hardness * (score - highest)) : 1.0f;
    x[lane] = slope * weight;
    losses[lane] = losses[lane] + loss * weight;
    slopes[lane] = slopes[lane] + slope * weight;
    weights[lane] = weights[lane] + weight;
  }
}

template <bool is_weighted>
inline LossSums loss_over_row(int64_t n, float hardness, float highest, float positive, float* scores) {
  alignas(64) float losses[kLanes] = {};
  alignas(64) float slopes[kLanes] = {};
  alignas(64) float weights[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    loss_block<is_weighted>(hardness, highest, positive, scores + i, losses, slopes, weights);
  }
  if (i < n) {
    alignas(64) float tail[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) tail[lane] = i + lane < n ? scores[i + lane] : -__builtin_inff();
    loss_block<is_weighted>(hardness, highest, positive, tail, losses, slopes, weights);
    __builtin_memcpy(scores + i, tail, static_cast<size_t>(n - i) * sizeof(float));
  }
  return LossSums{fold_lanes(losses), fold_lanes(slopes), fold_lanes(weights)};
}

inline float highest_of(int64_t n, const float* x) {
  alignas(64) float lanes[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = -__builtin_inff();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  }
  for (; i < n; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) lanes[0] = lanes[lane] > lanes[0] ? lanes[lane] : lanes[0];
  return lanes[0];
}

LossSums bpr_row(int64_t n, float hardness, float positive, float* scores) {
  if (hardness == 0.0f) return loss_over_row<false>(n, hardness, 0.0f, positive, scores);
  const float highest = highest_of(n, scores);
  if (highest == -__builtin_inff()) {  // all scores are -inf (or NaN, which the sums must show)
    return loss_over_row<false>(n, hardness, 0.0f, positive, scores);
  }
  LossSums sums = loss_over_row<true>(n, hardness, highest, positive, scores);
  const float share = 1.0f / sums.weight;
  for (int64_t i = 0; i < n; ++i) scores[i] = scores[i] * share;
  sums.loss = sums.loss * share;
  sums.slope = sums.slope * share;
  return sums;
}

void pair_grad_row(int64_t dim, float slope, float decay, const float* __restrict query, const float* __restrict item,
                   float* __restrict grad, float* __restrict query_grad) {
  for (int64_t i = 0; i < dim; ++i) {
    grad[i] = slope * query[i] + decay * item[i];
    query_grad[i] = query_grad[i] + slope * item[i];
  }
}
