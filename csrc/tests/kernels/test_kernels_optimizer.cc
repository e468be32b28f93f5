// Optimizer rules against the same rules in double, and bit for bit between levels.
#include <cmath>

#include "format/optimizer.h"
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/sample.h"

namespace bunkbed {
namespace {

using test::Sampler;

std::vector<OptimizerSpec> specs() {
  std::vector<OptimizerSpec> all;
  for (OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowwiseAdagrad, OptimizerKind::kAdam}) {
    for (double weight_decay : {0.0, 0.05}) {
      for (bool decoupled : {false, true}) {
        OptimizerSpec spec;
        spec.kind = kind;
        spec.lr = 0.03;
        spec.weight_decay = weight_decay;
        spec.decoupled = decoupled;
        spec.initial_accumulator = 0.1;
        all.push_back(spec);
      }
    }
  }
  return all;
}

// The textbook rule on one row; the arrays are as the kernel has them.
void update_in_double(const OptimizerSpec& spec, int64_t step, const std::vector<float>& grad,
                      std::vector<double>& weight, std::vector<double>& slots) {
  const size_t dim = weight.size();
  std::vector<double> g(dim);
  double mean_square = 0.0;
  for (size_t i = 0; i < dim; ++i) {
    if (spec.decoupled) weight[i] *= 1.0 - spec.lr * spec.weight_decay;
    g[i] = grad[i] + (spec.decoupled ? 0.0 : spec.weight_decay * weight[i]);
    mean_square += g[i] * g[i] / static_cast<double>(dim);
  }
  if (spec.kind == OptimizerKind::kRowwiseAdagrad) slots[0] += mean_square;
  const auto t = static_cast<double>(step);
  for (size_t i = 0; i < dim; ++i) {
    switch (spec.kind) {
      case OptimizerKind::kSgd:
        weight[i] -= spec.lr * g[i];
        break;
      case OptimizerKind::kAdagrad:
        slots[i] += g[i] * g[i];
        weight[i] -= spec.lr * g[i] / (std::sqrt(slots[i]) + spec.eps);
        break;
      case OptimizerKind::kRowwiseAdagrad:
        weight[i] -= spec.lr * g[i] / (std::sqrt(slots[0]) + spec.eps);
        break;
      case OptimizerKind::kAdam: {
        double& m = slots[i];
        double& v = slots[dim + i];
        m = spec.beta1 * m + (1.0 - spec.beta1) * g[i];
        v = spec.beta2 * v + (1.0 - spec.beta2) * g[i] * g[i];
        // SparseAdam adds eps before the bias correction of the second moment.
        const double correction = std::sqrt(1.0 - std::pow(spec.beta2, t)) / (1.0 - std::pow(spec.beta1, t));
        weight[i] -= spec.lr * correction * m / (std::sqrt(v) + spec.eps);
        break;
      }
    }
  }
}

std::vector<float> initial_slots(const OptimizerSpec& spec, int64_t dim) {
  std::vector<float> slots(static_cast<size_t>(slot_floats(spec.kind, dim)));
  init_slots(spec, dim, slots.data());
  return slots;
}

}  // namespace

TEST(optimizer_rules_match_double_arithmetic) {
  Sampler sampler(3);
  for (const OptimizerSpec& spec : specs()) {
    for (int64_t dim : {1, 5, 16, 37, 64}) {
      std::vector<float> weight(static_cast<size_t>(dim));
      for (float& w : weight) w = sampler.uniform(-1.0f, 1.0f);
      std::vector<float> slots = initial_slots(spec, dim);
      std::vector<double> exact(weight.begin(), weight.end());
      std::vector<double> exact_slots(slots.begin(), slots.end());
      for (int64_t step = 1; step <= 20; ++step) {
        std::vector<float> grad(static_cast<size_t>(dim));
        for (float& g : grad) g = sampler.uniform(-1.0f, 1.0f);
        kernels().update_row(make_step(spec, spec.lr, step), dim, grad.data(), weight.data(), slots.data());
        update_in_double(spec, step, grad, exact, exact_slots);
        for (size_t i = 0; i < weight.size(); ++i) CHECK(std::abs(weight[i] - exact[i]) < 3e-5);
      }
      for (size_t i = 0; i < slots.size(); ++i) {
        CHECK(std::abs(slots[i] - exact_slots[i]) < 1e-5 * (1.0 + std::abs(exact_slots[i])));
      }
    }
  }
}

TEST(optimizer_levels_agree_bit_for_bit_and_leave_the_gradient_alone) {
  Sampler sampler(4);
  for (const OptimizerSpec& spec : specs()) {
    for (int64_t dim : test::dims()) {
      const std::vector<float> grad = sampler.mixed(dim);
      const std::vector<float> weight = sampler.mixed(dim);
      std::vector<float> slots = sampler.mixed(slot_floats(spec.kind, dim));
      for (float& slot : slots) slot = std::abs(slot);  // second moments are never negative
      const StepConstants step = make_step(spec, 0.01, 7);
      std::vector<float> first_weight;
      std::vector<float> first_slots;
      for (Simd level : test::supported_levels()) {
        std::vector<float> w = weight;
        std::vector<float> s = slots;
        std::vector<float> g = grad;
        kernels_for(level).update_row(step, dim, g.data(), w.data(), s.data());
        test::check_same_bits(g, grad, "gradient");
        if (level == Simd::kScalar) {
          first_weight = w;
          first_slots = s;
        }
        test::check_same_bits(w, first_weight, "weights");
        test::check_same_bits(s, first_slots, "slots");
      }
    }
  }
}

TEST(optimizer_slots_are_named_as_the_framework_names_them) {
  OptimizerSpec spec;
  spec.initial_accumulator = 0.5;
  CHECK(optimizer_slots(spec, 8).empty());

  spec.kind = OptimizerKind::kAdagrad;
  const std::vector<Slot> adagrad = optimizer_slots(spec, 8);
  CHECK_EQ(adagrad.size(), size_t{1});
  CHECK(adagrad[0].name == "sum" && adagrad[0].length == 8 && adagrad[0].initial == 0.5f);

  spec.kind = OptimizerKind::kRowwiseAdagrad;
  const std::vector<Slot> rowwise = optimizer_slots(spec, 8);
  CHECK(rowwise[0].name == "sum" && rowwise[0].length == 1 && rowwise[0].initial == 0.0f);

  spec.kind = OptimizerKind::kAdam;
  const std::vector<Slot> adam = optimizer_slots(spec, 8);
  CHECK(adam[0].name == "exp_avg" && adam[1].name == "exp_avg_sq");

  for (OptimizerSpec each : specs()) {
    int64_t total = 0;
    std::vector<float> expected;
    for (const Slot& slot : optimizer_slots(each, 8)) {
      total += slot.length;
      expected.insert(expected.end(), static_cast<size_t>(slot.length), slot.initial);
    }
    CHECK_EQ(slot_floats(each.kind, 8), total);
    test::check_same_bits(initial_slots(each, 8), expected, "initial slots");
  }
}

TEST(optimizer_constants_are_rounded_once_from_double) {
  CHECK_EQ(integer_power(0.9, 0), 1.0);
  CHECK_EQ(integer_power(2.0, 62), 0x1p62);
  CHECK(std::abs(integer_power(0.999, 1000) - std::pow(0.999, 1000)) < 1e-14);
  CHECK_EQ(integer_power(0.9, int64_t{1} << 40), 0.0);

  OptimizerSpec spec;
  spec.kind = OptimizerKind::kAdam;
  const StepConstants first = make_step(spec, 0.001, 1);
  CHECK_EQ(first.step_size, static_cast<float>(0.001 * std::sqrt(1.0 - 0.999) / (1.0 - 0.9)));
  CHECK_EQ(first.one_minus_beta1, static_cast<float>(1.0 - 0.9));
  CHECK_EQ(first.one_minus_beta2, static_cast<float>(1.0 - 0.999));
  CHECK_EQ(make_step(spec, 0.001, 1'000'000).step_size, 0.001f);
}

TEST(optimizer_many_rows_are_stepped_as_one_by_one) {
  Sampler sampler(5);
  const std::vector<uint32_t> frames = {4, RowPlaces::kNowhere, 1, 7, 0, 6, RowPlaces::kNowhere, 2};
  constexpr size_t kFrames = 9;
  constexpr size_t kStepped = 5;  // the others are known, and left alone
  for (const OptimizerSpec& spec : specs()) {
    for (int64_t dim : {1, 5, 16, 37, 64, 70, 128, 200}) {
      const auto width = static_cast<size_t>(dim);
      const size_t floats = width + static_cast<size_t>(slot_floats(spec.kind, dim));
      const size_t stride = floats + 3;
      std::vector<float> before = sampler.mixed(static_cast<int64_t>(kFrames * stride));
      for (float& value : before) value = std::abs(value);  // second moments are never negative
      const std::vector<float> grads = sampler.mixed(static_cast<int64_t>(frames.size() * width));
      const StepConstants step = make_step(spec, 0.01, 7);
      for (Simd level : test::supported_levels()) {
        const Kernels& k = kernels_for(level);
        std::vector<float> expected = before;
        for (size_t i = 0; i < kStepped; ++i) {
          if (frames[i] == RowPlaces::kNowhere) continue;
          float* const record = expected.data() + frames[i] * stride;
          k.update_row(step, dim, grads.data() + i * width, record, record + width);
        }
        std::vector<float> records = before;
        k.update_rows(step, dim,
                      {.records = reinterpret_cast<std::byte*>(records.data()),
                       .stride = stride * sizeof(float),
                       .slots_offset = width * sizeof(float),
                       .record_bytes = floats * sizeof(float),
                       .frames = frames.data(),
                       .grads = grads.data(),
                       .n = kStepped,
                       .known = static_cast<int64_t>(frames.size())});
        test::check_same_bits(records, expected, "records");
      }
    }
  }
}

}  // namespace bunkbed
