// Types that all parts of the core share. docs/design/glossary.md defines the words.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bunkbed {

// Storage type of a row's weights, and of its optimizer slots (float32 or bfloat16). Values are file format.
enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr size_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}

// The value of an untouched row: a pure function of (kind, a, b, seed, id). Values are file format.
enum class InitKind : uint8_t { kZeros = 0, kNormal = 1, kUniform = 2 };

struct InitSpec {
  InitKind kind = InitKind::kZeros;
  double a = 0.0;  // Normal: std. Uniform: low
  double b = 0.0;  // Uniform: high
  uint64_t seed = 0;
};

// Values are file format.
enum class OptimizerKind : uint8_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2, kAdam = 3 };

struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::kSgd;
  double lr = 0.01;
  double eps = 1e-8;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double weight_decay = 0.0;
  double initial_accumulator = 0.0;
  bool decoupled = false;  // weight decay applied to the weight, not added to the gradient
  DType state_dtype = DType::kFloat32;  // of every slot; the update itself is float32

  bool operator==(const OptimizerSpec&) const = default;
};

}  // namespace bunkbed
