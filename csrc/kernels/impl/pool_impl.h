// Adds up the rows of a bag at their own addresses, without a copy.
// Included once by each translation unit of the kernels, after rows_impl.h and precision_impl.h; see kernels_impl.h.
//
// The accumulator stays in registers. Each element is a chain of additions in the order of the rows, each rounded once:
// the bits are those of add_row() and add_scaled_row(), called for one row after another.

constexpr int64_t kPoolWidth = kVectorBytes / sizeof(float);
constexpr int64_t kPoolVectors = 8;  // columns of one pass over the rows, in vectors; each has an accumulator

// Prefetches into the second-level cache, far ahead: the first level has too few places for lines in flight (1.7 times
// as fast as near ones into the first). `kOwnBytes` are those of the pass; more of a longer row is prefetched too.
template <int64_t kOwnBytes>
inline void prefetch_row(const void* row, int64_t bytes) {
  const auto* line = static_cast<const char*>(row);
  for (int64_t at = 0; at < kOwnBytes; at += 64) __builtin_prefetch(line + at, 0, 2);
  for (int64_t at = kOwnBytes; at < bytes && at < 512; at += 64) __builtin_prefetch(line + at, 0, 2);
}

// Columns [column, column + kVectors * kPoolWidth).
template <int64_t kVectors, bool kIsWide, bool kIsWeighted>
inline void pool_columns(const PoolRun& run, DType dtype, int64_t row_bytes, int64_t column, float* out) {
  constexpr int64_t kWidth = kVectors * kPoolWidth;
  const void* const* const rows = run.rows;
  const float* const weights = run.weights;
  const int64_t n = run.n;
  Floats acc[kVectors] = {};
  if (run.from == PoolFrom::kOut) {
    for (int64_t v = 0; v < kVectors; ++v) acc[v] = load_floats(out + column + v * kPoolWidth);
  }
  const auto add = [&](int64_t i, bool is_first) {
    if (column == 0) prefetch_row<kWidth*(kIsWide ? 4 : 2)>(rows[i + kPoolAhead], row_bytes);
    alignas(64) float widened[kIsWide ? 1 : kWidth];
    const float* row;
    if constexpr (kIsWide) {
      row = static_cast<const float*>(rows[i]) + column;
    } else {
      widen(dtype, kWidth, static_cast<const uint16_t*>(rows[i]) + column, widened);
      row = widened;
    }
    for (int64_t v = 0; v < kVectors; ++v) {
      Floats term = load_floats(row + v * kPoolWidth);
      if constexpr (kIsWeighted) term = weights[i] * term;
      acc[v] = is_first ? term : acc[v] + term;
    }
  };
  int64_t i = 0;
  if (run.from == PoolFrom::kFirst) add(i++, true);
  for (; i < n; ++i) add(i, false);
  if (run.divides) {
    for (int64_t v = 0; v < kVectors; ++v) acc[v] = acc[v] / run.divisor;
  }
  for (int64_t v = 0; v < kVectors; ++v) __builtin_memcpy(out + column + v * kPoolWidth, &acc[v], sizeof acc[v]);
}

template <bool kIsWide, bool kIsWeighted>
inline void pool_as(const PoolRun& run, DType dtype, int64_t dim, float* out) {
  const int64_t row_bytes = dim * (kIsWide ? 4 : 2);
  int64_t column = 0;
  for (; column + kPoolVectors * kPoolWidth <= dim; column += kPoolVectors * kPoolWidth) {
    pool_columns<kPoolVectors, kIsWide, kIsWeighted>(run, dtype, row_bytes, column, out);
  }
  if (column + 4 * kPoolWidth <= dim) {
    pool_columns<4, kIsWide, kIsWeighted>(run, dtype, row_bytes, column, out);
    column += 4 * kPoolWidth;
  }
  if (column + 2 * kPoolWidth <= dim) {
    pool_columns<2, kIsWide, kIsWeighted>(run, dtype, row_bytes, column, out);
    column += 2 * kPoolWidth;
  }
  if (column + kPoolWidth <= dim) {
    pool_columns<1, kIsWide, kIsWeighted>(run, dtype, row_bytes, column, out);
    column += kPoolWidth;
  }
  if (column == dim) return;
  // The columns past the last whole vector.
  const int64_t rest = dim - column;
  float acc[kPoolWidth] = {};
  if (run.from == PoolFrom::kOut) __builtin_memcpy(acc, out + column, static_cast<size_t>(rest) * sizeof(float));
  for (int64_t i = 0; i < run.n; ++i) {
    if (column == 0) prefetch_row<64>(run.rows[i + kPoolAhead], row_bytes);
    float row[kPoolWidth];
    if constexpr (kIsWide) {
      __builtin_memcpy(row, static_cast<const float*>(run.rows[i]) + column, static_cast<size_t>(rest) * sizeof(float));
    } else {
      widen(dtype, rest, static_cast<const uint16_t*>(run.rows[i]) + column, row);
    }
    const bool is_first = i == 0 && run.from == PoolFrom::kFirst;
    for (int64_t d = 0; d < rest; ++d) {
      const float term = kIsWeighted ? run.weights[i] * row[d] : row[d];
      acc[d] = is_first ? term : acc[d] + term;
    }
  }
  if (run.divides) {
    for (int64_t d = 0; d < rest; ++d) acc[d] = acc[d] / run.divisor;
  }
  __builtin_memcpy(out + column, acc, static_cast<size_t>(rest) * sizeof(float));
}

void pool_rows(DType dtype, int64_t dim, const PoolRun& run, float* out) {
  const bool is_weighted = run.weights != nullptr;
  if (dtype == DType::kFloat32) {
    is_weighted ? pool_as<true, true>(run, dtype, dim, out) : pool_as<true, false>(run, dtype, dim, out);
  } else {
    is_weighted ? pool_as<false, true>(run, dtype, dim, out) : pool_as<false, false>(run, dtype, dim, out);
  }
}
