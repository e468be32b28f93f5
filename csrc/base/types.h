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
  bool decoupled = false;               // weight decay applied to the weight, not added to the gradient
  DType state_dtype = DType::kFloat32;  // of every slot; the update itself is float32

  bool operator==(const OptimizerSpec&) const = default;
};

// The largest record number. The 2^32 highest numbers of 40 bits are frames in a directory, and 2^38 below them counts.
inline constexpr uint64_t kMaxPosition = (1ull << 40) - (1ull << 38) - (1ull << 32) - 2;

// The most of Retention::admit_from: a count of steps below it has 7 bits.
inline constexpr uint32_t kMostAdmitFrom = 128;

// What the ages of rows are counted in: the table's steps, or a clock that the caller sets. Values are file format.
enum class AgeClock : uint8_t { kStep = 0, kEvent = 1 };
// Which rows go first where there are too many: those named longest ago, by the fewest steps, or with the smallest
// norm. Values are file format.
enum class EvictFirst : uint8_t { kOldest = 0, kRarest = 1, kSmallest = 2 };

// Which rows a sweep leaves (scan/removable.h), and which ones updates store. A table with a rule for sweeps keeps the
// usage of each row in its record.
struct Retention {
  int64_t expire = 0;  // a row that was not named for so many units of the clock goes; 0: no row goes by age
  AgeClock clock = AgeClock::kStep;
  int64_t max_rows = 0;  // the most rows that stay; 0: no bound
  EvictFirst evict = EvictFirst::kOldest;
  int64_t keep = 0;  // a sweep never leaves fewer rows
  double admit =
      0.0;  // the probability with which a step stores a row that is not stored (format/admission.h); 0: always
  uint32_t admit_from =
      0;  // a row is stored by the step with this number among those that name it; 0: by the first one

  // Whether there is a rule for sweeps.
  bool is_set() const { return expire > 0 || max_rows > 0; }
  bool has_admission() const { return admit > 0.0 || admit_from > 0; }
  // The time of the clock of a new table. A clock of events must be set before rows are named.
  int64_t first_time() const { return clock == AgeClock::kEvent ? -1 : 0; }
  bool operator==(const Retention&) const = default;
};

}  // namespace bunkbed
