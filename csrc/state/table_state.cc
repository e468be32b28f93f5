#include "state/table_state.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "batch/pieces.h"
#include "format/record.h"
#include "kernels/kernels.h"

namespace bunkbed {

TableState::TableState(vfs::Vfs& vfs, std::string path, std::string name, const TableSpec& spec, OpenOptions options)
    : vfs(vfs),
      path(std::move(path)),
      name(std::move(name)),
      spec(spec),
      has_usage(spec.retention.is_set()),
      options(std::move(options)),
      manifests(vfs, this->path),
      lock(this->name) {}

size_t TableState::piece_ids() const {
  const size_t scratch = store->plan().scratch_bytes;
  const size_t counts = spec.retention.admit_from > 0 ? scratch / 4 : 0;  // the most of Counts::room()
  return std::max<size_t>(64, (scratch - counts) / kScratchPerId);
}

void TableState::require_usable() const {
  if (is_closed) throw Error(ErrorKind::kClosed, "table '" + name + "' is closed; open it again");
  if (!broken.empty()) {
    throw Error(ErrorKind::kBroken,
                "table '" + name + "' refuses use until it is reopened at its last commit: " + broken);
  }
}

void TableState::require_writable() const {
  require_usable();
  if (!options.writable) {
    throw Error(ErrorKind::kReadOnly, "table '" + name + "' is open for reading; open it with mode=\"w\" to change it");
  }
  if (!read_only_reason.empty()) {
    throw Error(ErrorKind::kReadOnly, "table '" + name + "' is read-only until reopened: " + read_only_reason);
  }
}

void TableState::require_durable(const char* what) const {
  if (!spec.is_scratch) return;
  throw Error(ErrorKind::kInvalid, "table '" + name + "' is a scratch table, of which nothing is kept: it has no " +
                                       what + "; make it with durability=\"durable\"");
}

namespace {

// Whether all ids are in [0, end). A negative id sets the highest bit of the first operand; an id at or past the end
// sets that of the second. Every compiler vectorizes this loop.
bool are_within(const int64_t* ids, size_t n, uint64_t end) {
  uint64_t bad_bits = 0;
  for (size_t i = 0; i < n; ++i) bad_bits |= static_cast<uint64_t>(ids[i]) | (end - 1 - static_cast<uint64_t>(ids[i]));
  return bad_bits >> 63 == 0;
}

}  // namespace

void TableState::refuse_id(int64_t id, size_t position) const {
  throw Error(ErrorKind::kIndex, "table '" + name + "': id " + std::to_string(id) + " at position " +
                                     std::to_string(position) + " is outside [0, " +
                                     (spec.num_rows < 0 ? "2**63" : std::to_string(spec.num_rows)) + ")");
}

void TableState::check_ids(const int64_t* ids, size_t n) const {
  const uint64_t end = ids_end();
  if (are_within(ids, n, end)) return;
  for (size_t i = 0; i < n; ++i) {
    if (static_cast<uint64_t>(ids[i]) >= end) refuse_id(ids[i], i);
  }
}

void TableState::assign_checked(Batch* batch, const int64_t* ids, size_t n, const uint32_t* members) const {
  batch->assign(ids, n, members);
  check_batch(*batch);
  batch->set_checked(ids_end());
}

// Rows are in order of first occurrence: the first bad row is at the position of the first bad id.
void TableState::check_batch(const Batch& batch) const {
  const uint64_t end = ids_end();
  if (batch.checked_end() == end || are_within(batch.unique().data(), batch.num_unique(), end)) return;
  for (size_t u = 0; u < batch.num_unique(); ++u) {
    if (static_cast<uint64_t>(batch.unique()[u]) >= end)
      refuse_id(batch.unique()[u], batch.order()[batch.offsets()[u]]);
  }
}

void TableState::check_finite(const int64_t* ids, size_t n, const float* values, size_t length,
                              const char* what) const {
  if (kernels().all_finite(static_cast<int64_t>(n * length), values)) return;
  for (size_t i = 0; i < n * length; ++i) {
    if (std::isfinite(values[i])) continue;
    const char* const shown = std::isnan(values[i]) ? "nan" : values[i] > 0 ? "inf" : "-inf";
    throw Error(ErrorKind::kInvalid, "table '" + name + "': " + what + " at position " + std::to_string(i / length) +
                                         " (id " + std::to_string(ids[i / length]) + "), element " +
                                         std::to_string(i % length) + ", is " + shown + "; nothing was changed");
  }
}

void TableState::check_fits(const int64_t* ids, size_t n, const float* values, const Field& field) const {
  const double limit = field_limit(field);
  if (field_dtype(field) == DType::kFloat32) return;
  float largest = 0.0f;
  for (size_t i = 0; i < n * field.length; ++i) largest = std::max(largest, std::fabs(values[i]));
  if (largest < limit) return;
  for (size_t i = 0; i < n * field.length; ++i) {
    if (std::fabs(values[i]) < limit) continue;
    char shown[32];
    std::snprintf(shown, sizeof(shown), "%.9g", static_cast<double>(values[i]));
    throw Error(ErrorKind::kInvalid, "table '" + name + "': value at position " + std::to_string(i / field.length) +
                                         " (id " + std::to_string(ids[i / field.length]) + "), element " +
                                         std::to_string(i % field.length) + ", is " + shown + ", beyond what " +
                                         dtype_name(field_dtype(field)) + " holds; nothing was changed");
  }
}

void TableState::require_places(size_t n) const {
  if (n <= ~uint32_t{0}) return;
  throw Error(ErrorKind::kInvalid,
              "table '" + name + "': one call takes at most 2**32 - 1 ids, got " + std::to_string(n) + "; split it");
}

void TableState::assign_part(Batch* batch, const int64_t* ids, size_t n, size_t part, size_t parts) {
  if (parts == 1) return assign_checked(batch, ids, n);
  scratch.members.clear();
  for (size_t i = 0; i < n; ++i) {
    if (cell_of(ids[i], parts) == part) scratch.members.push_back(static_cast<uint32_t>(i));
  }
  assign_checked(batch, ids, scratch.members.size(), scratch.members.data());
}

Error TableState::out_of_disk(const std::string& what, uint64_t needed) const {
  return Error(ErrorKind::kSystem, "table '" + name + "': " + what + "; disk=" + std::to_string(needed) + " would do",
               ENOSPC, path);
}

void TableState::initial_record(int64_t row, size_t record_bytes, std::byte* record) const {
  if (spec.dtype == DType::kFloat32) {
    kernels().init_row(spec.init, row, spec.dim, reinterpret_cast<float*>(record));
  } else {
    thread_local std::vector<float> wide;  // a row's weights, kept between calls
    wide.resize(spec.dim);
    kernels().init_row(spec.init, row, spec.dim, wide.data());
    write_field(fields[0], wide.data(), record);
    const size_t used = spec.dim * dtype_bytes(spec.dtype);
    std::memset(record + used, 0, weight_bytes - used);
  }
  if (record_bytes < payload_bytes) return;  // weights only
  write_initial_slots(fields, spec.optimizer, record);
  if (has_usage) write_usage({}, record + usage_offset());
}

}  // namespace bunkbed
