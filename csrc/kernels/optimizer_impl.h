// One optimizer step on one row, in place. Included once by each translation unit of the kernels; see kernels_impl.h.
//
// The order of operations follows the frameworks' own sparse rules: torch.optim.SGD, Adagrad (sparse gradients) and
// SparseAdam; FBGEMM's exact row-wise Adagrad. Adam's slots then equal torch's bit for bit; weights differ in the last
// place where a build of torch fuses a multiplication with an addition or takes a root that is not correctly rounded.
// Decay is not part of those. Coupled: the gradient becomes grad + weight_decay * weight. Decoupled: the
// weight becomes weight * (1 - lr * weight_decay) first. The caller's gradient is never written.

// Neither kind of decay, or one of them: resolved outside the loops.
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

// Adds the squares of the gradient to 16 lanes. `weight` is looked at for coupled decay only.
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

// The row's accumulator with its squares' sum, and the factor of its gradient.
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
