// Rows of a bag: one addition after another, however many columns a pass takes.
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/sample.h"

namespace bunkbed {

TEST(kernels_pooled_rows_follow_their_definition_at_every_level) {
  test::Sampler sampler(5);
  for (Simd level : test::supported_levels()) {
    const Kernels& kernels = kernels_for(level);
    for (int64_t dim : test::dims()) {
      for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        const int64_t n = 1 + dim % 5;
        const auto size = static_cast<size_t>(dim);
        const size_t bytes = size * (dtype == DType::kFloat32 ? 4 : 2);
        std::vector<std::vector<std::byte>> records;
        std::vector<std::vector<float>> rows;
        std::vector<const void*> pointers;
        for (int64_t i = 0; i < n; ++i) {
          const std::vector<float> wide = sampler.mixed(dim);
          records.emplace_back(bytes);
          kernels.narrow_nearest(dtype, dim, wide.data(), records.back().data());
          rows.emplace_back(size);
          kernels.widen(dtype, dim, records.back().data(), rows.back().data());
        }
        for (const auto& record : records) pointers.push_back(record.data());
        for (int64_t i = 0; i < kPoolAhead; ++i) pointers.push_back(nullptr);  // asked for, never read
        const std::vector<float> weights = sampler.mixed(n);
        const std::vector<float> before = sampler.mixed(dim);
        for (int variant = 0; variant < 12; ++variant) {
          const bool weighted = (variant & 1) != 0;
          const bool divides = (variant & 2) != 0;
          const auto from = static_cast<PoolFrom>(variant / 4);
          std::vector<float> expected = from == PoolFrom::kOut ? before : std::vector<float>(size);
          for (size_t i = 0; i < rows.size(); ++i) {
            for (size_t d = 0; d < size; ++d) {
              const float term = weighted ? weights[i] * rows[i][d] : rows[i][d];
              expected[d] = i == 0 && from == PoolFrom::kFirst ? term : expected[d] + term;
            }
          }
          if (divides) {
            for (float& value : expected) value = value / 3.0f;
          }
          std::vector<float> got = before;
          kernels.pool_rows(dtype, dim, {pointers.data(), weighted ? weights.data() : nullptr, n, from, divides, 3.0f},
                            got.data());
          test::check_same_bits(got, expected, "pool_rows");
        }
      }
    }
    std::vector<float> out(3, 7.0f);
    const std::vector<const void*> none(kPoolAhead);
    kernels.pool_rows(DType::kFloat32, 3, {none.data(), nullptr, 0, PoolFrom::kZero, false, 1.0f}, out.data());
    test::check_same_bits(out, std::vector<float>(3), "an empty bag");
  }
}

}  // namespace bunkbed
