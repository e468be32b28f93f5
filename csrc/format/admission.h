// Which rows an update stores. With a probability of admission, a row that is not stored becomes stored by a step with
// that probability: a function of (seed, id, step) and of nothing else. With a number n, it is stored by the n-th step
// that names it; the steps before are counted. FORMAT.md, "Admission".
#pragma once

#include <cstdint>
#include <vector>

#include "base/fault.h"

namespace bunkbed {

class Admission {
 public:
  // Of one step. `probability`: in (0, 1); `seed`: the table's.
  Admission(double probability, uint64_t seed, int64_t step)
      : limit_(probability * 0x1p53),
        seed_(seed),
        step_(fault_is("admission_without_step") ? 0 : static_cast<uint32_t>(step)) {}

  // Of one step at this time of the table's clock. `from`: a row is stored by the step with this number, at least 2.
  static Admission counted(uint32_t from, int64_t now) {
    Admission admission(1.0, 0, 0);
    admission.from_ = from;
    admission.now_ = now;
    return admission;
  }
  bool counts() const { return from_ > 0; }
  int64_t now() const { return now_; }
  // Whether the step stores a row that `before` steps have named since it was last stored, or ever. Requires counts().
  bool admits_after(uint32_t before) const { return before + 1 >= from_; }

  // Whether the step stores this row. It is asked for rows that are not stored. Requires !counts().
  bool admits(int64_t id) const {
    // One block of Philox4x32-10, with one row at a time: few rows of a step are not stored. The streams of initial
    // values and of rounding have other blocks (kernels/impl/philox_impl.h).
    constexpr uint32_t kAdmissionStream = 0x40000000u;
    uint32_t c0 = static_cast<uint32_t>(id);
    uint32_t c1 = static_cast<uint32_t>(static_cast<uint64_t>(id) >> 32);
    uint32_t c2 = kAdmissionStream;
    uint32_t c3 = step_;
    auto key0 = static_cast<uint32_t>(seed_);
    auto key1 = static_cast<uint32_t>(seed_ >> 32);
    for (int round = 0; round < 10; ++round, key0 += 0x9e3779b9u, key1 += 0xbb67ae85u) {
      const uint64_t product0 = uint64_t{0xd2511f53u} * c0;
      const uint64_t product1 = uint64_t{0xcd9e8d57u} * c2;
      c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
      c1 = static_cast<uint32_t>(product1);
      c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
      c3 = static_cast<uint32_t>(product0);
    }
    // 53 bits, which a double has exactly, as it has `limit_`.
    return static_cast<double>((uint64_t{c1} << 32 | c0) >> 11) < limit_;
  }

  void remove_refused(std::vector<int64_t>* rows) const {
    std::erase_if(*rows, [this](int64_t row) { return !admits(row); });
  }

 private:
  double limit_;
  uint64_t seed_;
  uint32_t step_;
  uint32_t from_ = 0;
  int64_t now_ = 0;
};

}  // namespace bunkbed
