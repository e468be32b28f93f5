// Copies rows from any addresses to consecutive places.
// Included once by each translation unit of the kernels, after pool_impl.h (prefetch_row); see kernels_impl.h.

// Bytes prefetched ahead of the current row. With fewer in flight the memory's latency shows; many more leave the
// second-level cache before they are used.
constexpr int64_t kGatherAheadBytes = 12288;

constexpr int64_t kGatherTile = 256;  // bytes copied, and prefetched, by code without a loop

inline void copy_row(int64_t bytes, const std::byte* row, std::byte* out) {
  int64_t at = 0;
  for (; at + kGatherTile <= bytes; at += kGatherTile) {
    for (int64_t v = 0; v < kGatherTile; v += kVectorBytes) {
      Floats values;
      __builtin_memcpy(&values, row + at + v, sizeof values);
      __builtin_memcpy(out + at + v, &values, sizeof values);
    }
  }
  for (; at + static_cast<int64_t>(kVectorBytes) <= bytes; at += kVectorBytes) {
    Floats values;
    __builtin_memcpy(&values, row + at, sizeof values);
    __builtin_memcpy(out + at, &values, sizeof values);
  }
  if (at < bytes) __builtin_memcpy(out + at, row + at, static_cast<size_t>(bytes - at));
}

// Prefetches a row of `kTiles` tiles; 0: of any number of bytes.
template <int64_t kTiles>
inline void ask_for_row(int64_t bytes, const std::byte* row) {
  if constexpr (kTiles == 0) {
    prefetch_row<0>(row, bytes);
  } else {
    for (int64_t at = 0; at < kTiles * kGatherTile; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
}

template <bool kIsIndexed, bool kIsWide, int64_t kTiles>
inline void gather_as(DType dtype, int64_t dim, const RowPlaces& places, float* __restrict out) {
  const RowPlaces from = places;  // a local copy: no store to `out` can change it
  const int64_t row_bytes = kTiles == 0 ? dim * (kIsWide ? 4 : 2) : kTiles * kGatherTile;
  const int64_t rows_ahead = kGatherAheadBytes / row_bytes;
  const int64_t ahead = rows_ahead < 4 ? 4 : rows_ahead > 64 ? 64 : rows_ahead;
  const auto frame_at = [&](int64_t i) { return from.frames[kIsIndexed ? from.index[i] : i]; };
  const auto place_of = [&](uint32_t frame) { return from.records + static_cast<size_t>(frame) * from.stride; };
  for (int64_t i = 0; i < from.n; ++i, out += dim) {
    if (i + ahead < from.known) {
      const uint32_t coming = frame_at(i + ahead);
      if (coming != RowPlaces::kNowhere) ask_for_row<kTiles>(row_bytes, place_of(coming));
    }
    const uint32_t frame = frame_at(i);
    if (frame == RowPlaces::kNowhere) continue;
    if constexpr (kIsWide) {
      copy_row(row_bytes, place_of(frame), reinterpret_cast<std::byte*>(out));
    } else {
      widen(dtype, dim, place_of(frame), out);
    }
  }
}

template <bool kIsIndexed>
void gather_any(DType dtype, int64_t dim, const RowPlaces& from, float* out) {
  if (dtype != DType::kFloat32) return gather_as<kIsIndexed, false, 0>(dtype, dim, from, out);
  if (dim * 4 == kGatherTile) return gather_as<kIsIndexed, true, 1>(dtype, dim, from, out);
  gather_as<kIsIndexed, true, 0>(dtype, dim, from, out);
}

void gather_rows(DType dtype, int64_t dim, const RowPlaces& from, float* out) {
  if (from.index == nullptr) return gather_any<false>(dtype, dim, from, out);
  gather_any<true>(dtype, dim, from, out);
}
