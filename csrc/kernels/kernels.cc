// Chooses the level of the row kernels, once per process.
#include "kernels/kernels.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "kernels/crc32c.h"

namespace bunkbed {

extern const Kernels kKernelsScalar;
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif

namespace {

Kernels with_checksum(Kernels kernels) {
  kernels.crc32c = crc32c_has_hardware() ? crc32c_hardware : crc32c_software;
  return kernels;
}

const Kernels& table_of([[maybe_unused]] Simd level) {
  static const Kernels scalar = with_checksum(kKernelsScalar);
#if defined(__x86_64__)
  static const Kernels avx2 = with_checksum(kKernelsAvx2);
  static const Kernels avx512 = with_checksum(kKernelsAvx512);
  if (level == Simd::kAvx2) return avx2;
  if (level == Simd::kAvx512) return avx512;
#endif
  return scalar;
}

Simd best_level() {
  if (simd_supported(Simd::kAvx512)) return Simd::kAvx512;
  if (simd_supported(Simd::kAvx2)) return Simd::kAvx2;
  return Simd::kScalar;
}

Simd level_from_environment() {
  const char* text = std::getenv("BUNKBED_SIMD");
  const std::string name = text == nullptr ? "auto" : text;
  if (name.empty() || name == "auto") return best_level();
  if (name == "scalar") return Simd::kScalar;
  if (name == "avx2") return Simd::kAvx2;
  if (name == "avx512") return Simd::kAvx512;
  throw Error(ErrorKind::kInvalid, "BUNKBED_SIMD must be 'auto', 'scalar', 'avx2' or 'avx512', got '" + name + "'");
}

// Null until first use. Two threads may both read the environment; they choose the same table.
std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

bool simd_supported(Simd level) {
#if defined(__x86_64__)
  switch (level) {
    case Simd::kScalar:
      return true;
    case Simd::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt");
    case Simd::kAvx512:
      return simd_supported(Simd::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return false;
#else
  return level == Simd::kScalar;
#endif
}

const Kernels& kernels_for(Simd level) {
  if (!simd_supported(level)) {
    const std::string name = level == Simd::kAvx512 ? "avx512" : "avx2";
    throw Error(ErrorKind::kInvalid,
                "this processor has no " + name + "; choose 'auto' or 'scalar' (BUNKBED_SIMD, set_simd)");
  }
  return table_of(level);
}

const Kernels& kernels() {
  const Kernels* current = chosen.load(std::memory_order_relaxed);
  if (current != nullptr) return *current;
  const Kernels& table = kernels_for(level_from_environment());
  chosen.store(&table, std::memory_order_relaxed);
  return table;
}

void set_simd(Simd level) { chosen.store(&kernels_for(level), std::memory_order_relaxed); }

Simd current_simd() { return kernels().level; }

double integer_power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

RoundKeys::RoundKeys(uint64_t seed) {
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
  for (size_t round = 0; round < 10; ++round) {
    low[round] = key0;
    high[round] = key1;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

StepConstants make_step(const OptimizerSpec& spec, double lr, int64_t step) {
  StepConstants constants{};
  constants.kind = spec.kind;
  constants.has_decay = spec.weight_decay != 0.0 && !spec.decoupled;
  constants.has_decoupled = spec.weight_decay != 0.0 && spec.decoupled;
  constants.weight_decay = static_cast<float>(spec.weight_decay);
  constants.keep = static_cast<float>(1.0 - lr * spec.weight_decay);
  constants.step_size = static_cast<float>(lr);
  constants.one_minus_beta1 = static_cast<float>(1.0 - spec.beta1);
  constants.beta2 = static_cast<float>(spec.beta2);
  constants.one_minus_beta2 = static_cast<float>(1.0 - spec.beta2);
  constants.eps = static_cast<float>(spec.eps);
  if (spec.kind == OptimizerKind::kAdam) {
    const double correction1 = 1.0 - integer_power(spec.beta1, step);
    const double correction2 = 1.0 - integer_power(spec.beta2, step);
    constants.step_size = static_cast<float>(lr * std::sqrt(correction2) / correction1);
  }
  return constants;
}

}  // namespace bunkbed
