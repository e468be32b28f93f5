// One optimizer step on one row, in place. Included once by each translation unit of the kernels; see kernels_impl.h.
//
// The order of operations follows the frameworks' own sparse rules: torch.optim.SGD, Adagrad (sparse gradients) and
// SparseAdam; FBGEMM's exact row-wise Adagrad. Adam's slots then equal torch's bit for bit. Weights differ in the last
// place where a build of torch fuses a multiplication with an addition or takes a root that is not correctly rounded.
// Those rules have no decay. Coupled: the gradient becomes grad + weight_decay * weight. Decoupled: the weight first
// becomes weight * (1 - lr * weight_decay). The caller's gradient is never written.

// The kind of decay is a template argument, so the loops do not test it.
template <bool kCoupled>
inline float decayed_grad(const StepConstants& step, float grad, float weight) {
  if constexpr (kCoupled) return grad + step.weight_decay * weight;
  return grad;
}

template <bool kDecoupled>
inline float kept_weight(const StepConstants& step, float weight) {
  if constexpr (kDecoupled) return weight * step.keep;
  return weight;
}

template <bool kCoupled, bool kDecoupled>
inline void update_sgd(const StepConstants& step, int64_t dim, const float* __restrict grad, float* __restrict weight) {
  for (int64_t i = 0; i < dim; ++i) {
    const float w = kept_weight<kDecoupled>(step, weight[i]);
    const float g = decayed_grad<kCoupled>(step, grad[i], w);
    weight[i] = w - step.step_size * g;
  }
}

template <bool kCoupled, bool kDecoupled>
inline void update_adagrad(const StepConstants& step, int64_t dim, const float* __restrict grad,
                           float* __restrict weight, float* __restrict sum) {
  for (int64_t i = 0; i < dim; ++i) {
    const float w = kept_weight<kDecoupled>(step, weight[i]);
    const float g = decayed_grad<kCoupled>(step, grad[i], w);
    const float s = sum[i] + g * g;
    sum[i] = s;
    weight[i] = w - step.step_size * (g / (__builtin_sqrtf(s) + step.eps));
  }
}

// Adds the squares of the gradient to 16 lanes. `weight` is read for coupled decay only.
template <bool kCoupled>
inline void add_squares(const StepConstants& step, int64_t dim, const float* __restrict grad,
                        const float* __restrict weight, LaneSums* lanes) {
  add_to_lanes(
      dim,
      [&](auto load, int64_t i) {
        auto g = load(grad + i);
        if constexpr (kCoupled) g = g + load(weight + i) * step.weight_decay;
        return g * g;
      },
      lanes);
}

// Adds the mean of the squares to the row's accumulator. Returns the factor of the gradient.
inline float add_mean_square(const StepConstants& step, int64_t dim, float squares, float* sum) {
  const float s = sum[0] + squares / static_cast<float>(dim);
  sum[0] = s;
  return step.step_size / (__builtin_sqrtf(s) + step.eps);
}

template <bool kCoupled, bool kDecoupled>
inline void scale_and_step(const StepConstants& step, int64_t dim, float multiplier, const float* __restrict grad,
                           float* __restrict weight) {
  for (int64_t i = 0; i < dim; ++i) {
    const float w = kept_weight<kDecoupled>(step, weight[i]);
    const float g = decayed_grad<kCoupled>(step, grad[i], w);
    weight[i] = w - multiplier * g;
  }
}

template <bool kCoupled, bool kDecoupled>
void update_rowwise_adagrad(const StepConstants& step, int64_t dim, const float* __restrict grad,
                            float* __restrict weight, float* __restrict sum) {
  LaneSums lanes{};
  add_squares<kCoupled>(step, dim, grad, weight, &lanes);
  const float multiplier = add_mean_square(step, dim, fold_lanes(lanes.at), sum);
  scale_and_step<kCoupled, kDecoupled>(step, dim, multiplier, grad, weight);
}

template <bool kCoupled, bool kDecoupled>
inline void update_adam(const StepConstants& step, int64_t dim, const float* __restrict grad, float* __restrict weight,
                        float* __restrict exp_avg, float* __restrict exp_avg_sq) {
  for (int64_t i = 0; i < dim; ++i) {
    const float w = kept_weight<kDecoupled>(step, weight[i]);
    const float g = decayed_grad<kCoupled>(step, grad[i], w);
    const float m = exp_avg[i] + (g - exp_avg[i]) * step.one_minus_beta1;
    const float v = exp_avg_sq[i] + (g * g - exp_avg_sq[i]) * step.one_minus_beta2;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    weight[i] = w - step.step_size * (m / (__builtin_sqrtf(v) + step.eps));
  }
}

template <bool kCoupled, bool kDecoupled>
void update_with_decay(const StepConstants& step, int64_t dim, const float* grad, float* weight, float* slots) {
  switch (step.kind) {
    case OptimizerKind::kSgd:
      return update_sgd<kCoupled, kDecoupled>(step, dim, grad, weight);
    case OptimizerKind::kAdagrad:
      return update_adagrad<kCoupled, kDecoupled>(step, dim, grad, weight, slots);
    case OptimizerKind::kRowwiseAdagrad:
      return update_rowwise_adagrad<kCoupled, kDecoupled>(step, dim, grad, weight, slots);
    case OptimizerKind::kAdam:
      return update_adam<kCoupled, kDecoupled>(step, dim, grad, weight, slots, slots + dim);
  }
}

void update_row(const StepConstants& step, int64_t dim, const float* grad, float* weight, float* slots) {
  if (step.has_decay) return update_with_decay<true, false>(step, dim, grad, weight, slots);
  if (step.has_decoupled) return update_with_decay<false, true>(step, dim, grad, weight, slots);
  update_with_decay<false, false>(step, dim, grad, weight, slots);
}

// Updates one row in tiles of a fixed width: the compiler unrolls a tile and keeps the constants in registers. The bits
// are those of update_row().
template <OptimizerKind kKind, bool kCoupled, bool kDecoupled>
inline void update_in_tiles(const StepConstants& step, int64_t dim, const float* grad, float* weight, float* slots) {
  constexpr int64_t kTile = 64;
  float multiplier = 0.0f;
  if constexpr (kKind == OptimizerKind::kRowwiseAdagrad) {
    LaneSums lanes{};
    add_squares<kCoupled>(step, dim, grad, weight, &lanes);
    multiplier = add_mean_square(step, dim, fold_lanes(lanes.at), slots);
  }
  const auto run = [&](int64_t from, auto count) {
    if constexpr (kKind == OptimizerKind::kSgd) {
      update_sgd<kCoupled, kDecoupled>(step, count, grad + from, weight + from);
    } else if constexpr (kKind == OptimizerKind::kAdagrad) {
      update_adagrad<kCoupled, kDecoupled>(step, count, grad + from, weight + from, slots + from);
    } else if constexpr (kKind == OptimizerKind::kRowwiseAdagrad) {
      scale_and_step<kCoupled, kDecoupled>(step, count, multiplier, grad + from, weight + from);
    } else {
      update_adam<kCoupled, kDecoupled>(step, count, grad + from, weight + from, slots + from, slots + dim + from);
    }
  };
  struct Tile {
    constexpr operator int64_t() const { return kTile; }
  };
  int64_t at = 0;
  for (; at + kTile <= dim; at += kTile) run(at, Tile{});
  if (at < dim) run(at, dim - at);
}

// Records are at any addresses; gradients are consecutive, but the processor's own prefetching ends at a page. Both are
// prefetched into the second-level cache, well ahead: the first level has too few places for lines in flight.
constexpr int64_t kStepAheadBytes = 24576;

template <OptimizerKind kKind, bool kCoupled, bool kDecoupled>
void update_rows_as(const StepConstants& constants, int64_t dim, const RowSteps& rows) {
  const StepConstants step = constants;  // a local copy: no store to a row can change it
  const auto record_bytes = static_cast<int64_t>(rows.record_bytes);
  const int64_t asked_bytes = record_bytes < 1024 ? record_bytes : 1024;
  const int64_t grad_bytes = dim * 4 < 1024 ? dim * 4 : 1024;
  const int64_t rows_ahead = kStepAheadBytes / record_bytes;
  const int64_t ahead = rows_ahead < 4 ? 4 : rows_ahead > 64 ? 64 : rows_ahead;
  for (int64_t i = 0; i < rows.n; ++i) {
    if (i + ahead < rows.known && rows.frames[i + ahead] != RowPlaces::kNowhere) {
      const std::byte* const coming = rows.records + static_cast<size_t>(rows.frames[i + ahead]) * rows.stride;
      for (int64_t at = 0; at < asked_bytes; at += 64) __builtin_prefetch(coming + at, 1, 2);
      const auto* const grad = reinterpret_cast<const std::byte*>(rows.grads + (i + ahead) * dim);
      for (int64_t at = 0; at < grad_bytes; at += 64) __builtin_prefetch(grad + at, 0, 2);
    }
    if (rows.frames[i] == RowPlaces::kNowhere) continue;
    std::byte* const record = rows.records + static_cast<size_t>(rows.frames[i]) * rows.stride;
    update_in_tiles<kKind, kCoupled, kDecoupled>(step, dim, rows.grads + i * dim, reinterpret_cast<float*>(record),
                                                 reinterpret_cast<float*>(record + rows.slots_offset));
  }
}

template <bool kCoupled, bool kDecoupled>
void update_rows_with_decay(const StepConstants& step, int64_t dim, const RowSteps& rows) {
  switch (step.kind) {
    case OptimizerKind::kSgd:
      return update_rows_as<OptimizerKind::kSgd, kCoupled, kDecoupled>(step, dim, rows);
    case OptimizerKind::kAdagrad:
      return update_rows_as<OptimizerKind::kAdagrad, kCoupled, kDecoupled>(step, dim, rows);
    case OptimizerKind::kRowwiseAdagrad:
      return update_rows_as<OptimizerKind::kRowwiseAdagrad, kCoupled, kDecoupled>(step, dim, rows);
    case OptimizerKind::kAdam:
      return update_rows_as<OptimizerKind::kAdam, kCoupled, kDecoupled>(step, dim, rows);
  }
}

void update_rows(const StepConstants& step, int64_t dim, const RowSteps& rows) {
  if (step.has_decay) return update_rows_with_decay<true, false>(step, dim, rows);
  if (step.has_decoupled) return update_rows_with_decay<false, true>(step, dim, rows);
  update_rows_with_decay<false, false>(step, dim, rows);
}
