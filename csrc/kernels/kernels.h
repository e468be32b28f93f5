// Row kernels: plain functions over pointers, one row or a short run of rows per call.
//
// Every kernel exists three times (scalar, AVX2, AVX-512), compiled from one source, `kernels_impl.h`, with
// `-ffp-contract=off`. Elementwise arithmetic is IEEE add, subtract, multiply, divide and square root, so the
// three agree bit for bit; reductions run over 16 fixed virtual lanes and are folded in one fixed order
// (8, 4, 2, 1), so they agree too. The tests compare them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace bunkbed {

enum class Simd : uint8_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

// Constants of one optimizer step. make_step() makes them from the table's step number (1 for the first update).
struct StepConstants {
  OptimizerKind kind;
  bool has_decay;      // coupled decay: grad += weight_decay * weight
  bool has_decoupled;  // decoupled decay: weight *= keep before the update
  float weight_decay;
  float keep;       // 1 - lr * weight_decay
  float step_size;  // SGD, Adagrad: lr. Adam: lr * sqrt(1 - beta2^t) / (1 - beta1^t), in double, then rounded
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
};

StepConstants make_step(const OptimizerSpec& spec, double lr, int64_t step);

// base^exponent by repeated squaring in double: the same bits everywhere, unlike libm's pow.
double integer_power(double base, int64_t exponent);

// Of one row of scores; see losses.h.
struct LossSums {
  float loss;
  float slope;
  float weight;
};

// The start value of a sum of rows: 0, the content of `out`, or the first row itself (0 plus a row turns -0 into 0).
enum class PoolFrom : uint8_t { kZero, kOut, kFirst };

// Rows to add up, each at its own address.
struct PoolRun {
  const void* const* rows;  // n pointers, and kPoolAhead more, which are prefetched and not read
  const float* weights;     // (n) factors, or null
  int64_t n;                // at least 1 with kFirst
  PoolFrom from;
  bool divides;  // the sum is divided by `divisor`
  float divisor;
};
inline constexpr int64_t kPoolAhead = 48;

// Rows in frames: row i is that of frames[index[i]], or of frames[i] without an index.
struct RowPlaces {
  // In `frames`: the row is in no frame; its place in the output stays as it is.
  static constexpr uint32_t kNowhere = ~0u;
  const std::byte* records;  // of frame 0
  size_t stride;             // bytes from one frame's record to the next
  const uint32_t* frames;
  const uint32_t* index;  // (known) or null
  int64_t n;
  int64_t known;  // rows that may be prefetched, counted from the first; at least n
};

// Float32 records in frames, to be updated one after another. A row in RowPlaces::kNowhere is skipped.
struct RowSteps {
  std::byte* records;   // of frame 0; the weights come first
  size_t stride;        // bytes from one frame's record to the next
  size_t slots_offset;  // bytes from a record's weights to its slots
  size_t record_bytes;
  const uint32_t* frames;  // (n), and more up to `known`
  const float* grads;      // (n, dim), and more up to `known`
  int64_t n;
  int64_t known;  // rows that may be prefetched, counted from the first
};

// The generator's keys of each round for a seed, computed once for many rows.
struct RoundKeys {
  explicit RoundKeys(uint64_t seed);
  uint64_t low[10];  // 32-bit numbers in 64-bit lanes
  uint64_t high[10];
};

// The random numbers of a stochastic rounding are a pure function of these. `field` is 0 for the weights; the slots
// follow in record order. So no two fields of a row get the same numbers.
struct RoundingKey {
  const RoundKeys& seed;
  int64_t id;
  int64_t step;
  uint32_t field = 0;
};

// A record of which a field is stored in 16 bits. Fields: the weights, then the optimizer's slots.
struct NarrowRecord {
  DType dtype;          // of the weights
  DType state_dtype;    // of every slot
  uint32_t offsets[3];  // of each field in the record, in bytes
};

struct Kernels {
  Simd level;

  // out[i] for one row of `dim` weights of row `id`; float32, before any narrowing to the row's dtype.
  void (*init_row)(const InitSpec& spec, int64_t id, int64_t dim, float* out);

  // One optimizer step on one row in place. `slots` is laid out as optimizer.h says (slots follow each other).
  void (*update_row)(const StepConstants& step, int64_t dim, const float* grad, float* weight, float* slots);
  // The same for many rows. A call for each row would take as long again as reading the rows from memory.
  void (*update_rows)(const StepConstants& step, int64_t dim, const RowSteps& rows);
  // The same on a record with 16-bit fields: they widen exactly, the update is update_row's bit for bit, and they are
  // rounded stochastically when they are stored. `key.field` is ignored.
  void (*update_narrow)(const StepConstants& step, const NarrowRecord& layout, int64_t dim, const float* grad,
                        const RoundingKey& key, std::byte* record);

  // acc[i] = acc[i] + x[i]
  void (*add_row)(int64_t dim, const float* x, float* acc);
  // acc[i] = acc[i] + scale * x[i]  (product rounded, then sum rounded)
  void (*add_scaled_row)(int64_t dim, float scale, const float* x, float* acc);
  // For each u < n: sums[u * dim + i] = the rows (dim) order[starts[u]], ..., order[starts[u + 1] - 1] of `grads`,
  // added in that order, and, unless `squares` is null, squares[u] = the sum of their squares, as sum_of_squares gives
  // it. `order` has `known` entries, so that later rows can be prefetched. Returns whether all sums are finite.
  bool (*sum_rows)(int64_t dim, const float* grads, const uint32_t* order, const uint32_t* starts, size_t n,
                   uint32_t known, float* sums, double* squares);
  // out = the rows added up in order, as by add_row and add_scaled_row; 16-bit rows are widened first
  void (*pool_rows)(DType dtype, int64_t dim, const PoolRun& run, float* out);
  // out (n, dim): copies of float32[dim] rows, or of widened 16-bit rows
  void (*gather_rows)(DType dtype, int64_t dim, const RowPlaces& from, float* out);
  // x[i] = x[i] * scale
  void (*scale_row)(int64_t dim, float scale, float* x);
  // true when every value is finite
  bool (*all_finite)(int64_t n, const float* x);
  // sum of x[i] * y[i] over 16 virtual lanes, folded 8, 4, 2, 1
  float (*dot)(int64_t dim, const float* x, const float* y);
  // sum of x[i]^2 in double over 16 virtual lanes
  double (*sum_of_squares)(int64_t n, const float* x);

  // Exact widening of 16-bit values to float32 (float16 subnormals included).
  void (*widen)(DType dtype, int64_t n, const void* x, float* out);
  // Rounds to nearest even; used for initial values and for set().
  void (*narrow_nearest)(DType dtype, int64_t n, const float* x, void* out);
  // Stochastic rounding, element by element. Unbiased; a value that the narrow type can represent does not change; a
  // finite value never becomes infinite. precision_impl.h has the details.
  void (*narrow_stochastic)(DType dtype, int64_t n, const float* x, const RoundingKey& key, void* out);

  // Sums of w softplus(score - positive) and of its slopes, which replace the scores; see losses.h.
  LossSums (*bpr_row)(int64_t n, float hardness, float positive, float* scores);
  // grad[i] = slope * query[i] + decay * item[i] and query_grad[i] += slope * item[i], every operation rounded
  void (*pair_grad_row)(int64_t dim, float slope, float decay, const float* query, const float* item, float* grad,
                        float* query_grad);
  // counts[f] += the number of x[i] that are at least floors[f] (none for NaN); n below 2^31
  void (*count_reaching)(int64_t n, const float* x, int64_t num_floors, const float* floors, int64_t* counts);

  // CRC-32C (Castagnoli, reflected, initial and final xor 0xffffffff) continued from `crc` (0 to begin).
  uint32_t (*crc32c)(uint32_t crc, const void* data, size_t n);
};

// The kernels of the level in use: the best of this processor, unless BUNKBED_SIMD or set_simd() names a lower one.
const Kernels& kernels();
const Kernels& kernels_for(Simd level);  // throws Error(kInvalid) when the processor lacks it
bool simd_supported(Simd level);
void set_simd(Simd level);  // process-wide; for tests and measurements
Simd current_simd();

}  // namespace bunkbed
