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

struct alignas(64) LaneSums {
  float at[kLanes];
};

// Adds term(i) for i = 0, ..., n - 1, in this order, to lane i mod 16. `term(load, i)` computes from load(pointer + i),
// which is one value or a vector of the values from i on. Several calls may add to one sum if n is a multiple of 16 in
// all calls but the last.
template <typename Term>
inline void add_to_lanes(int64_t n, Term term, LaneSums* lanes) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(float);
  constexpr int64_t kVectors = kLanes / kWidth;
  Floats acc[kVectors];
  __builtin_memcpy(acc, lanes->at, sizeof acc);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t v = 0; v < kVectors; ++v) acc[v] = acc[v] + term(load_floats, i + v * kWidth);
  }
  __builtin_memcpy(lanes->at, acc, sizeof acc);
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes->at[lane] = lanes->at[lane] + term(load_one, i);
}

// Returns the sum of all term(i) over 16 lanes, which are folded 8, 4, 2, 1.
template <typename Term>
inline float sum_over_lanes(int64_t n, Term term) {
  LaneSums lanes{};
  add_to_lanes(n, term, &lanes);
  return fold_lanes(lanes.at);
}

float dot(int64_t dim, const float* x, const float* y) {
  return sum_over_lanes(dim, [&](auto load, int64_t i) { return load(x + i) * load(y + i); });
}

typedef double Doubles __attribute__((vector_size(kVectorBytes)));
typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));

// The sum of squares of x in double over 16 lanes: element i counts in lane i mod 16. The lanes are vectors: the
// compiler would unpack and pack an array for every row.
inline double squares_of(int64_t n, const float* x) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(double);
  constexpr int64_t kVectors = kLanes / kWidth;
  Doubles acc[kVectors] = {};
  const auto add = [&](const float* from) {
    for (int64_t v = 0; v < kVectors; ++v) {
      HalfFloats half;
      __builtin_memcpy(&half, from + v * kWidth, sizeof half);
      const Doubles value = __builtin_convertvector(half, Doubles);
      acc[v] = acc[v] + value * value;
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add(x + i);
  if (i < n) {
    float rest[kLanes] = {};
    for (int64_t lane = 0; i < n; ++i, ++lane) rest[lane] = x[i];
    add(rest);
  }
  for (int64_t half = kVectors / 2; half > 0; half /= 2) {
    for (int64_t v = 0; v < half; ++v) acc[v] = acc[v] + acc[v + half];
  }
  double lanes[kWidth];
  __builtin_memcpy(lanes, acc, sizeof lanes);
  for (int64_t half = kWidth / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];
  }
  return lanes[0];
}

// Sums columns [0, kVectors vectors) of rows order[0 .. n) of `grads`, in registers. The rows are scattered over the
// batch, so the next ones, up to order[known], are prefetched. Adds 0 times each sum to `probe`: NaN if one is not
// finite.
template <int64_t kVectors>
inline void sum_tile(int64_t dim, const float* grads, const uint32_t* order, uint32_t n, uint32_t known, float* out,
                     Floats* probe) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(float);
  constexpr uint32_t kAhead = 32;
  Floats acc[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) acc[v] = -Floats{};  // x + -0.0 is x for every x (-0.0 + 0.0 would be 0.0)
  for (uint32_t o = 0; o < n; ++o) {
    if (o + kAhead < known) {
      const float* const ahead = grads + static_cast<int64_t>(order[o + kAhead]) * dim;
      for (int64_t line = 0; line < kVectors * kWidth; line += 16) __builtin_prefetch(ahead + line, 0, 2);
    }
    const float* const row = grads + static_cast<int64_t>(order[o]) * dim;
    for (int64_t v = 0; v < kVectors; ++v) {
      acc[v] = acc[v] + load_floats(row + v * kWidth);
    }
  }
  __builtin_memcpy(out, acc, sizeof acc);
  for (int64_t v = 0; v < kVectors; ++v) *probe = *probe + acc[v] * 0.0f;
}

double sum_of_squares(int64_t n, const float* x) { return squares_of(n, x); }

bool sum_rows(int64_t dim, const float* grads, const uint32_t* order, const uint32_t* starts, size_t n, uint32_t known,
              float* __restrict sums, double* __restrict squares) {
  constexpr int64_t kWidth = kVectorBytes / sizeof(float);
  Floats probe{};
  float rest = 0.0f;  // the probe of the last columns
  for (size_t u = 0; u < n; ++u, sums += dim) {
    const uint32_t* const places = order + starts[u];
    const uint32_t count = starts[u + 1] - starts[u];
    int64_t i = 0;
    for (; i + 4 * kWidth <= dim; i += 4 * kWidth)
      sum_tile<4>(dim, grads + i, places, count, known - starts[u], sums + i, &probe);
    for (; i + kWidth <= dim; i += kWidth)
      sum_tile<1>(dim, grads + i, places, count, known - starts[u], sums + i, &probe);
    if (i < dim) {
      for (int64_t c = i; c < dim; ++c) sums[c] = grads[static_cast<int64_t>(places[0]) * dim + c];
      for (uint32_t o = 1; o < count; ++o) {
        const float* const row = grads + static_cast<int64_t>(places[o]) * dim;
        for (int64_t c = i; c < dim; ++c) sums[c] = sums[c] + row[c];
      }
      for (int64_t c = i; c < dim; ++c) rest = rest + sums[c] * 0.0f;
    }
    if (squares != nullptr) squares[u] = squares_of(dim, sums);
  }
  for (int64_t lane = 0; lane < kWidth; ++lane) rest = rest + probe[lane];
  return rest == 0.0f;
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
  // Tests bits, in pieces: comparisons with NaN would need a branch, and one pass could not end early.
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
