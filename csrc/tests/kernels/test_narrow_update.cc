// Steps on records with 16-bit fields: widen, the float32 rule, round; the same at every level.
#include <cmath>
#include <cstring>

#include "format/optimizer.h"
#include "format/record.h"
#include "format/record_update.h"
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/sample.h"

namespace bunkbed {
namespace {

using test::Sampler;

constexpr uint64_t kSeed = 99;
constexpr OptimizerKind kKinds[] = {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowwiseAdagrad,
                                    OptimizerKind::kAdam};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

OptimizerSpec spec_of(OptimizerKind kind, DType state_dtype, double weight_decay = 0.0, bool decoupled = false) {
  OptimizerSpec spec;
  spec.kind = kind;
  spec.lr = 0.03;
  spec.weight_decay = weight_decay;
  spec.decoupled = decoupled;
  spec.initial_accumulator = 0.1;
  spec.state_dtype = state_dtype;
  return spec;
}

using Record = std::vector<std::byte>;

std::vector<float> field_of(const Field& field, const Record& record) {
  std::vector<float> values(field.length);
  read_field(field, record.data(), values.data());
  return values;
}

// The step in its parts, with the kernels of the scalar level.
void step_in_parts(const std::vector<Field>& fields, const StepConstants& constants, int64_t row, int64_t step,
                   const std::vector<float>& grad, Record* record) {
  const Kernels& k = kernels_for(Simd::kScalar);
  std::vector<std::vector<float>> wide;
  std::vector<float> slots;
  for (const Field& field : fields) wide.push_back(field_of(field, *record));
  for (size_t f = 1; f < fields.size(); ++f) slots.insert(slots.end(), wide[f].begin(), wide[f].end());
  k.update_row(constants, fields[0].length, grad.data(), wide[0].data(), slots.data());
  size_t at = 0;
  for (size_t f = 1; f < fields.size(); ++f) {
    wide[f].assign(slots.begin() + static_cast<ptrdiff_t>(at),
                   slots.begin() + static_cast<ptrdiff_t>(at + fields[f].length));
    at += fields[f].length;
  }
  for (size_t f = 0; f < fields.size(); ++f) {
    k.narrow_stochastic(field_dtype(fields[f]), fields[f].length, wide[f].data(),
                        {RoundKeys(kSeed), row, step, static_cast<uint32_t>(f)}, record->data() + fields[f].offset);
  }
}

Record random_record(const std::vector<Field>& fields, Sampler& sampler) {
  Record record(record_payload(fields), std::byte{0x5a});  // padding that must not change
  for (size_t f = 0; f < fields.size(); ++f) {
    std::vector<float> values = sampler.mixed(fields[f].length);
    if (f > 0) {
      for (float& value : values) value = std::abs(value);
    }
    if (field_dtype(fields[f]) == DType::kFloat16) {
      for (float& value : values) value = std::fmod(value, 1000.0f);
    }
    write_field(fields[f], values.data(), record.data());
  }
  return record;
}

struct Level {  // uses a level's kernels during its lifetime
  explicit Level(Simd level) : before(current_simd()) { set_simd(level); }
  ~Level() { set_simd(before); }
  Simd before;
};

}  // namespace

TEST(narrow_steps_are_the_wide_step_rounded_at_every_level) {
  Sampler sampler(31);
  for (OptimizerKind kind : kKinds) {
    for (DType dtype : kDTypes) {
      for (DType state_dtype : {DType::kFloat32, DType::kBFloat16}) {
        for (int64_t dim : test::dims()) {
          const int decay = static_cast<int>(dim % 3);
          const OptimizerSpec spec = spec_of(kind, state_dtype, decay == 0 ? 0.0 : 0.05, decay == 2);
          const std::vector<Field> fields = record_fields(static_cast<uint32_t>(dim), dtype, spec);
          const int64_t row = 0x123456789a + dim;
          const int64_t step = 0x100000007;
          const StepConstants constants = make_step(spec, 0.03, step);
          const std::vector<float> grad = sampler.mixed(dim);
          const Record before = random_record(fields, sampler);
          Record expected = before;
          step_in_parts(fields, constants, row, step, grad, &expected);
          CHECK(expected != before);
          for (Simd level : test::supported_levels()) {
            const Level use(level);
            Record got = before;
            RecordUpdate(fields, constants, kSeed, step)(row, grad.data(), got.data());
            CHECK(got == expected);
          }
        }
      }
    }
  }
}

TEST(narrow_fields_of_a_row_round_apart) {
  // Equal fractions of a unit in every field: they must not be rounded up and down together.
  const OptimizerSpec spec = spec_of(OptimizerKind::kAdam, DType::kBFloat16);
  const auto fields = record_fields(64, DType::kBFloat16, spec);
  const std::vector<float> x(64, 1.003f);
  std::vector<std::vector<uint16_t>> rounded;
  for (uint32_t field = 0; field < fields.size(); ++field) {
    rounded.emplace_back(64);
    kernels().narrow_stochastic(DType::kBFloat16, 64, x.data(), {RoundKeys(kSeed), 5, 6, field}, rounded.back().data());
  }
  for (size_t a = 0; a < 3; ++a) {
    for (size_t b = a + 1; b < 3; ++b) {
      int equal = 0;
      for (size_t i = 0; i < 64; ++i) equal += rounded[a][i] == rounded[b][i];
      CHECK(equal > 16 && equal < 54);  // about 34 of 64 by chance
    }
  }
}

TEST(narrow_state_does_not_stall) {
  // With beta2 = 0.999 a step changes exp_avg_sq by less than half of bfloat16's unit. Rounded to nearest it would stop
  // at about a third of its true value.
  const OptimizerSpec spec = spec_of(OptimizerKind::kAdam, DType::kBFloat16);
  constexpr uint32_t kDim = 64;
  constexpr int64_t kRows = 40;
  constexpr int64_t kSteps = 4000;
  const auto fields = record_fields(kDim, DType::kBFloat16, spec);
  const std::vector<float> grad(kDim, 0.7f);
  double sum = 0.0;
  for (int64_t row = 0; row < kRows; ++row) {
    Record record(record_payload(fields));
    write_initial_slots(fields, spec, record.data());
    for (int64_t step = 1; step <= kSteps; ++step) {
      RecordUpdate(fields, make_step(spec, 0.0, step), kSeed, step)(row, grad.data(), record.data());
    }
    for (float value : field_of(fields[2], record)) sum += value;
  }
  const double exact = 0.7 * 0.7 * (1.0 - std::pow(0.999, kSteps));
  const double mean = sum / (kRows * kDim);
  // The rounding of a step has variance u d, where u = 2^-9 or 2^-10 is the unit and d at most a thousandth of the
  // value. The contribution of a step decays at a rate of 0.001, so 500 steps add up: the deviation of a value is below
  // 0.03.
  CHECK(std::abs(mean - exact) < 5.0 * 0.03 / std::sqrt(kRows * kDim));
}

TEST(record_fields_begin_at_multiples_of_four) {
  for (OptimizerKind kind : kKinds) {
    for (DType dtype : kDTypes) {
      for (DType state_dtype : {DType::kFloat32, DType::kBFloat16}) {
        for (uint32_t dim : {1u, 2u, 3u, 64u, 65u}) {
          const auto fields = record_fields(dim, dtype, spec_of(kind, state_dtype));
          size_t end = 0;
          for (const Field& field : fields) {
            CHECK_EQ(field.offset, (end + 3) / 4 * 4);
            end = field.offset + field.length * dtype_bytes(field_dtype(field));
          }
          CHECK_EQ(record_payload(fields), (end + 3) / 4 * 4);
        }
      }
    }
  }
}

TEST(record_initial_slots_are_rounded_to_nearest_and_padded_with_zeros) {
  const OptimizerSpec spec = spec_of(OptimizerKind::kAdagrad, DType::kBFloat16);
  const auto fields = record_fields(3, DType::kBFloat16, spec);
  Record record(record_payload(fields), std::byte{0x5a});
  write_initial_slots(fields, spec, record.data());
  for (float value : field_of(fields[1], record)) CHECK_EQ(value, 0.10009765625f);  // 0x3dcd, the neighbour of 0.1
  CHECK(record[14] == std::byte{0} && record[15] == std::byte{0});
}

TEST(record_writes_round_to_nearest) {
  const Field field{"sum", static_cast<uint8_t>(DType::kBFloat16), 3, 4};
  Record record(12);
  const float values[] = {1.00390625f, 1.01171875f, 1.005f};  // two ties, and above the middle
  write_field(field, values, record.data());
  float back[3];
  read_field(field, record.data(), back);
  CHECK_EQ(back[0], 1.0f);
  CHECK_EQ(back[1], 1.015625f);
  CHECK_EQ(back[2], 1.0078125f);
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const Field one{"weight", static_cast<uint8_t>(dtype), 1, 0};
    const auto limit = static_cast<float>(field_limit(one));
    for (float value : {limit, std::nextafter(limit, 0.0f)}) {
      write_field(one, &value, record.data());
      read_field(one, record.data(), back);
      CHECK_EQ(std::isinf(back[0]), value == limit);
    }
  }
}

}  // namespace bunkbed
