// Rows copied from frames: the same bits at every level, and nothing but the rows asked for is written.
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/sample.h"

namespace bunkbed {

TEST(kernels_gathered_rows_are_copies_at_every_level) {
  test::Sampler sampler(6);
  constexpr size_t kFrames = 7;
  constexpr size_t kRows = 150;  // more than are asked for ahead
  constexpr size_t kOffset = 24;
  for (Simd level : test::supported_levels()) {
    const Kernels& kernels = kernels_for(level);
    for (int64_t dim : test::dims()) {
      for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        const auto size = static_cast<size_t>(dim);
        const size_t stride = kOffset + size * 4 + 8;
        std::vector<std::byte> records(kFrames * stride + kOffset);
        std::vector<std::vector<float>> rows;
        for (size_t frame = 0; frame < kFrames; ++frame) {
          std::byte* const record = records.data() + kOffset + frame * stride;
          kernels.narrow_nearest(dtype, dim, sampler.mixed(dim).data(), record);
          rows.emplace_back(size);
          kernels.widen(dtype, dim, record, rows.back().data());
        }
        std::vector<uint32_t> frames(kRows), index(kRows);
        for (size_t i = 0; i < kRows; ++i) {
          frames[i] = sampler.bits() % 5 == 0 ? RowPlaces::kNowhere : static_cast<uint32_t>(sampler.bits() % kFrames);
          index[i] = static_cast<uint32_t>(sampler.bits() % kRows);
        }
        for (const bool indexed : {false, true}) {
          const std::vector<float> before = sampler.mixed(static_cast<int64_t>((kRows + 1) * size));
          std::vector<float> expected = before, got = before;
          for (size_t i = 0; i < kRows; ++i) {
            const uint32_t frame = frames[indexed ? index[i] : i];
            if (frame == RowPlaces::kNowhere) continue;
            std::copy(rows[frame].begin(), rows[frame].end(), expected.begin() + static_cast<ptrdiff_t>(i * size));
          }
          kernels.gather_rows(dtype, dim,
                              {records.data() + kOffset, stride, frames.data(), indexed ? index.data() : nullptr,
                               static_cast<int64_t>(kRows), static_cast<int64_t>(kRows)},
                              got.data());
          test::check_same_bits(got, expected, "gather_rows");
        }
      }
    }
  }
}

}  // namespace bunkbed
