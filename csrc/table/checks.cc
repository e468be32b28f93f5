// What calls require before they change anything. Errors name the first bad value, its place and what to do.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "format/record.h"
#include "kernels/kernels.h"
#include "table/table.h"

namespace bunkbed {

void Table::require_usable() const {
  if (closed_) throw Error(ErrorKind::kClosed, "table '" + name_ + "' is closed; open it again");
  if (!broken_.empty()) {
    throw Error(ErrorKind::kBroken, "table '" + name_ + "' refuses use until it is reopened at its last commit: " + broken_);
  }
}

void Table::require_writable() const {
  require_usable();
  if (!options_.writable) {
    throw Error(ErrorKind::kReadOnly, "table '" + name_ + "' is open for reading; open it with mode=\"w\" to change it");
  }
  if (!read_only_reason_.empty()) {
    throw Error(ErrorKind::kReadOnly, "table '" + name_ + "' is read-only until reopened: " + read_only_reason_);
  }
}

void Table::require_durable(const char* what) const {
  if (!spec_.is_scratch) return;
  throw Error(ErrorKind::kInvalid, "table '" + name_ + "' is a scratch table, of which nothing is kept: it has no " + what +
                                       "; make it with durability=\"durable\"");
}

void Table::check_ids(const int64_t* ids, size_t n) const {
  const uint64_t end = spec_.num_rows < 0 ? uint64_t{1} << 63 : static_cast<uint64_t>(spec_.num_rows);
  // The highest bit of one of these is set by a negative id, that of the other by one at or past the end: a loop that
  // every compiler makes vectors of.
  uint64_t bad_bits = 0;
  for (size_t i = 0; i < n; ++i) bad_bits |= static_cast<uint64_t>(ids[i]) | (end - 1 - static_cast<uint64_t>(ids[i]));
  if (bad_bits >> 63 == 0) return;
  for (size_t i = 0; i < n; ++i) {
    if (static_cast<uint64_t>(ids[i]) < end) continue;
    throw Error(ErrorKind::kIndex, "table '" + name_ + "': id " + std::to_string(ids[i]) + " at position " +
                                       std::to_string(i) + " is outside [0, " +
                                       (spec_.num_rows < 0 ? "2**63" : std::to_string(spec_.num_rows)) + ")");
  }
}

void Table::assign_checked(Batch* batch, const int64_t* ids, size_t n, const uint32_t* members) const {
  batch->assign(ids, n, members);
  check_ids(batch->unique().data(), batch->num_unique());
}

void Table::check_finite(const int64_t* ids, size_t n, const float* values, size_t length, const char* what) const {
  if (kernels().all_finite(static_cast<int64_t>(n * length), values)) return;
  for (size_t i = 0; i < n * length; ++i) {
    if (std::isfinite(values[i])) continue;
    const char* const shown = std::isnan(values[i]) ? "nan" : values[i] > 0 ? "inf" : "-inf";
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': " + what + " at position " + std::to_string(i / length) +
                                         " (id " + std::to_string(ids[i / length]) + "), element " +
                                         std::to_string(i % length) + ", is " + shown + "; nothing was changed");
  }
}

// A finite value beyond the field's type would be stored as infinity.
void Table::check_fits(const int64_t* ids, size_t n, const float* values, const Field& field) const {
  const double limit = field_limit(field);
  if (field_dtype(field) == DType::kFloat32) return;
  float largest = 0.0f;
  for (size_t i = 0; i < n * field.length; ++i) largest = std::max(largest, std::fabs(values[i]));
  if (largest < limit) return;
  for (size_t i = 0; i < n * field.length; ++i) {
    if (std::fabs(values[i]) < limit) continue;
    char shown[32];
    std::snprintf(shown, sizeof(shown), "%.9g", static_cast<double>(values[i]));
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': value at position " + std::to_string(i / field.length) +
                                         " (id " + std::to_string(ids[i / field.length]) + "), element " +
                                         std::to_string(i % field.length) + ", is " + shown + ", beyond what " +
                                         dtype_name(field_dtype(field)) + " holds; nothing was changed");
  }
}

}  // namespace bunkbed
