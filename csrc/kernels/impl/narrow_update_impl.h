// One optimizer step on a record with 16-bit fields, in blocks of as many elements as a group of random numbers serves.
// A block is widened, updated like update_row does it, rounded and stored; one block of each field is on the stack.
// Included once by each translation unit of the kernels; see kernels_impl.h.

constexpr int64_t kBlock = kGroupRoundings;

// kBlock as a type. (kernels_impl.h says why it is not one of the standard library.)
struct WholeBlock {
  constexpr operator int64_t() const { return kBlock; }
};

// Calls work(begin, count) for each block. The count of a whole block is a constant, so its loops need no remainder.
template <typename Work>
[[gnu::always_inline]] inline void for_each_block(int64_t dim, Work work) {
  int64_t begin = 0;
  for (; begin + kBlock <= dim; begin += kBlock) work(begin, WholeBlock());
  if (begin < dim) work(begin, dim - begin);
}

// The optimizer and the narrow fields are template arguments, because the random numbers of a block must stay in
// registers.
template <OptimizerKind kKind, bool kCoupled, bool kDecoupled, bool kNarrowWeight, bool kNarrowState>
struct NarrowStep {
  static constexpr uint32_t kFields = kKind == OptimizerKind::kSgd ? 1 : kKind == OptimizerKind::kAdam ? 3 : 2;

  static constexpr bool is_narrow(uint32_t field) { return field == 0 ? kNarrowWeight : kNarrowState; }

  const StepConstants& step;
  const NarrowRecord& layout;
  const int64_t dim;
  const float* const grad;
  const RoundingKey& key;
  std::byte* const record;

  DType dtype_of(uint32_t field) const { return field == 0 ? layout.dtype : DType::kBFloat16; }

  // Returns elements [begin, begin + count) of a field as float32: in the record if they are so stored, else in `wide`.
  template <uint32_t kField>
  [[gnu::always_inline]] float* open(int64_t begin, int64_t count, float* wide) const {
    std::byte* const stored = record + layout.offsets[kField];
    if constexpr (!is_narrow(kField)) return reinterpret_cast<float*>(stored) + begin;
    // The elements after the end of a shorter block are rounded too, and not stored.
    if (count < kBlock) __builtin_memset(wide, 0, kBlock * sizeof(float));
    widen_halves(dtype_of(kField), count, reinterpret_cast<const uint16_t*>(stored) + begin, wide);
    return wide;
  }

  template <uint32_t kField>
  [[gnu::always_inline]] void close(int64_t begin, int64_t count, const float* wide, const RandomGroup& random) const {
    auto* const halves = reinterpret_cast<uint16_t*>(record + layout.offsets[kField]) + begin;
    narrow_group(dtype_of(kField), count, wide, random, halves);
  }

  // Every optimizer that updates each element independently.
  void elements() const {
    for_each_block(dim, [&](int64_t begin, auto count) __attribute__((always_inline)) {
      constexpr uint32_t kFirst = kNarrowWeight ? 0 : 1;
      constexpr uint32_t kDrawn = (kNarrowState ? kFields : 1) - kFirst;
      // Drawn first: the generator's ten rounds depend on each other, and the update fills the gaps between them.
      constexpr uint32_t kDrawnFields[3] = {kFirst, kFirst + 1, kFirst + 2};
      RandomGroup random[kDrawn];
      random_groups<kDrawn>(key, kDrawnFields, begin, random);

      alignas(64) float wide[kFields][kBlock];
      float* const weight = open<0>(begin, count, wide[0]);
      if constexpr (kKind == OptimizerKind::kSgd) {
        update_sgd<kCoupled, kDecoupled>(step, count, grad + begin, weight);
      } else if constexpr (kKind == OptimizerKind::kAdagrad) {
        float* const sum = open<1>(begin, count, wide[1]);
        update_adagrad<kCoupled, kDecoupled>(step, count, grad + begin, weight, sum);
      } else {
        float* const exp_avg = open<1>(begin, count, wide[1]);
        float* const exp_avg_sq = open<2>(begin, count, wide[2]);
        update_adam<kCoupled, kDecoupled>(step, count, grad + begin, weight, exp_avg, exp_avg_sq);
      }
      if constexpr (kNarrowWeight) close<0>(begin, count, wide[0], random[0]);
      if constexpr (kNarrowState && kFields > 1) close<1>(begin, count, wide[1], random[1 - kFirst]);
      if constexpr (kNarrowState && kFields > 2) close<2>(begin, count, wide[2], random[2 - kFirst]);
    });
  }

  // Row-wise Adagrad: sums all squares first. A block is a multiple of 16, so the lanes are the same as in one pass.
  void rowwise() const {
    static_assert(kBlock % kLanes == 0);
    alignas(64) float wide[kBlock];
    LaneSums lanes{};
    if constexpr (kCoupled) {
      for_each_block(dim, [&](int64_t begin, auto count) __attribute__((always_inline)) {
        add_squares<true>(step, count, grad + begin, open<0>(begin, count, wide), &lanes);
      });
    } else {
      add_squares<false>(step, dim, grad, nullptr, &lanes);
    }
    std::byte* const stored_sum = record + layout.offsets[1];
    float sum[kVectorFloats] = {};
    if constexpr (kNarrowState) {
      widen_halves(DType::kBFloat16, 1, reinterpret_cast<const uint16_t*>(stored_sum), sum);
    } else {
      __builtin_memcpy(sum, stored_sum, sizeof(float));
    }
    const float multiplier = add_mean_square(step, dim, fold_lanes(lanes.at), sum);
    for_each_block(dim, [&](int64_t begin, auto count) __attribute__((always_inline)) {
      constexpr uint32_t kField = 0;
      RandomGroup random;
      if constexpr (kNarrowWeight) random_groups<1>(key, &kField, begin, &random);
      float* const weight = open<0>(begin, count, wide);
      scale_and_step<kCoupled, kDecoupled>(step, count, multiplier, grad + begin, weight);
      if constexpr (kNarrowWeight) close<0>(begin, count, wide, random);
    });
    if constexpr (kNarrowState) {
      constexpr uint32_t kField = 1;
      RandomGroup random;
      random_groups<1>(key, &kField, 0, &random);
      narrow_vectors<DType::kBFloat16>(1, sum, random, reinterpret_cast<uint16_t*>(stored_sum));
    } else {
      __builtin_memcpy(stored_sum, sum, sizeof(float));
    }
  }
};

template <OptimizerKind kKind, bool kCoupled, bool kDecoupled>
void update_narrow_fields(const StepConstants& step, const NarrowRecord& layout, int64_t dim, const float* grad,
                          const RoundingKey& key, std::byte* record) {
  const auto run = [](const auto& narrow) {
    if constexpr (kKind == OptimizerKind::kRowwiseAdagrad) {
      narrow.rowwise();
    } else {
      narrow.elements();
    }
  };
  if constexpr (kKind != OptimizerKind::kSgd) {
    if (layout.state_dtype != DType::kFloat32) {
      if (layout.dtype == DType::kFloat32) {
        return run(NarrowStep<kKind, kCoupled, kDecoupled, false, true>{step, layout, dim, grad, key, record});
      }
      return run(NarrowStep<kKind, kCoupled, kDecoupled, true, true>{step, layout, dim, grad, key, record});
    }
  }
  run(NarrowStep<kKind, kCoupled, kDecoupled, true, false>{step, layout, dim, grad, key, record});
}

template <bool kCoupled, bool kDecoupled>
void update_narrow_with_decay(const StepConstants& step, const NarrowRecord& layout, int64_t dim, const float* grad,
                              const RoundingKey& key, std::byte* record) {
  switch (step.kind) {
    case OptimizerKind::kSgd:
      return update_narrow_fields<OptimizerKind::kSgd, kCoupled, kDecoupled>(step, layout, dim, grad, key, record);
    case OptimizerKind::kAdagrad:
      return update_narrow_fields<OptimizerKind::kAdagrad, kCoupled, kDecoupled>(step, layout, dim, grad, key, record);
    case OptimizerKind::kRowwiseAdagrad:
      return update_narrow_fields<OptimizerKind::kRowwiseAdagrad, kCoupled, kDecoupled>(step, layout, dim, grad, key,
                                                                                        record);
    case OptimizerKind::kAdam:
      return update_narrow_fields<OptimizerKind::kAdam, kCoupled, kDecoupled>(step, layout, dim, grad, key, record);
  }
}

void update_narrow(const StepConstants& step, const NarrowRecord& layout, int64_t dim, const float* grad,
                   const RoundingKey& key, std::byte* record) {
  if (step.has_decay) return update_narrow_with_decay<true, false>(step, layout, dim, grad, key, record);
  if (step.has_decoupled) return update_narrow_with_decay<false, true>(step, layout, dim, grad, key, record);
  update_narrow_with_decay<false, false>(step, layout, dim, grad, key, record);
}
