// Sums, scaled sums and reductions over rows.
// Included once by each translation unit of the kernels; see kernels_impl.h.

constexpr int64_t kLanes = 16;

typedef float Floats __attribute__((vector_size(kVectorBytes)));

inline float load_one(const float* p) { return *p; }

inline Floats load_floats(const float* p) {
  Floats values;
  __builtin_memcpy(&values, p, sizeof values);
  return values;
}

template <typename T>
inline T fold_lanes(T* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return lanes[0];
}

// Sum over i of term(i). Lane i mod 16 adds its terms in rising i; then lanes fold 8, 4, 2, 1. `term(load, i)`
// returns what load(pointer + i) makes of it: one value, or a vector of them from i onwards.
template <typename Term>
inline float sum_over_lanes(int64_t n, Term term) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(float);
  constexpr int64_t kVectors = kLanes / kWidth;
  Floats acc[kVectors] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t v = 0; v < kVectors; ++v) acc[v] = acc[v] + term(load_floats, i + v * kWidth);
  }
  alignas(64) float lanes[kLanes];
  __builtin_memcpy(lanes, acc, sizeof lanes);
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes[lane] = lanes[lane] + term(load_one, i);
  return fold_lanes(lanes);
}

float dot(int64_t dim, const float* x, const float* y) {
  return sum_over_lanes(dim, [&](auto load, int64_t i) { return load(x + i) * load(y + i); });
}

double sum_of_squares(int64_t n, const float* x) {
  alignas(64) double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = x[i + lane];
      lanes[lane] = lanes[lane] + value * value;
    }
  }
  for (int64_t lane = 0; i < n; ++i, ++lane) {
    const double value = x[i];
    lanes[lane] = lanes[lane] + value * value;
  }
  return fold_lanes(lanes);
}

void add_row(int64_t dim, const float* __restrict x, float* __restrict acc) {
  for (int64_t i = 0; i < dim; ++i) acc[i] = acc[i] + x[i];
}

void add_scaled_row(int64_t dim, float scale, const float* __restrict x, float* __restrict acc) {
  for (int64_t i = 0; i < dim; ++i) acc[i] = acc[i] + scale * x[i];
}

void scale_row(int64_t dim, float scale, float* x) {
  for (int64_t i = 0; i < dim; ++i) x[i] = x[i] * scale;
}

bool all_finite(int64_t n, const float* x) {
  // Looks at bits, in pieces: comparisons with NaN would cost a branch, a whole pass no early end.
  constexpr int64_t kPiece = 512;
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const int64_t end = n - begin < kPiece ? n : begin + kPiece;
    uint32_t found = 0;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t exponent = __builtin_bit_cast(uint32_t, x[i]) & 0x7f800000u;
      found |= exponent == 0x7f800000u ? 1u : 0u;
    }
    if (found != 0) return false;
  }
  return true;
}
