// Rows copied from where they lie to consecutive places.
// Included once by each translation unit of the kernels, after pool_impl.h (prefetch_row); see kernels_impl.h.

// Bytes asked for ahead of the row at hand: with fewer under way the memory's latency shows, many more fall out of the
// second level before they are used.
constexpr int64_t kGatherAheadBytes = 12288;

inline void copy_row(int64_t bytes, const std::byte* row, std::byte* out) {
  int64_t at = 0;
  for (; at + static_cast<int64_t>(kVectorBytes) <= bytes; at += kVectorBytes) {
    Floats values;
    __builtin_memcpy(&values, row + at, sizeof values);
    __builtin_memcpy(out + at, &values, sizeof values);
  }
  if (at < bytes) __builtin_memcpy(out + at, row + at, static_cast<size_t>(bytes - at));
}

void gather_rows(DType dtype, int64_t dim, const RowPlaces& from, float* out) {
  const bool is_wide = dtype == DType::kFloat32;
  const int64_t row_bytes = dim * (is_wide ? 4 : 2);
  const int64_t rows_ahead = kGatherAheadBytes / row_bytes;
  const int64_t ahead = rows_ahead < 4 ? 4 : rows_ahead > 64 ? 64 : rows_ahead;
  const auto frame_at = [&](int64_t i) { return from.frames[from.index == nullptr ? i : from.index[i]]; };
  const auto place_of = [&](uint32_t frame) { return from.records + static_cast<size_t>(frame) * from.stride; };
  for (int64_t i = 0; i < from.n; ++i, out += dim) {
    if (i + ahead < from.n) {
      const uint32_t coming = frame_at(i + ahead);
      if (coming != RowPlaces::kNowhere) prefetch_row<0>(place_of(coming), row_bytes);
    }
    const uint32_t frame = frame_at(i);
    if (frame == RowPlaces::kNowhere) continue;
    if (is_wide) {
      copy_row(row_bytes, place_of(frame), reinterpret_cast<std::byte*>(out));
    } else {
      widen(dtype, dim, place_of(frame), out);
    }
  }
}
