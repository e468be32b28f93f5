// Changes rows: updates, slots and whole records. The public methods take the lock. Table declares them for users.
//
// A call validates everything before its first write. A failure before that write changes nothing. A failure after it
// breaks the table until it is reopened, because its rows are then those of no step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"
#include "batch/batch.h"
#include "format/admission.h"
#include "format/record_update.h"
#include "jobs/disk_room.h"
#include "jobs/prefetcher.h"
#include "state/device_link.h"
#include "state/table_state.h"

namespace bunkbed {

// How many rows a call deleted, and the number of changes of the table after it.
struct Erased {
  uint64_t rows = 0;
  uint64_t changes = 0;
};

// The error of a sweep whose table another thread changed between the search and the removal.
Error changed_during_search(const std::string& name);

class RowWriter {
 public:
  RowWriter(TableState& table, DeviceLink& device, Prefetcher& prefetcher, DiskRoom& disk)
      : table_(table), device_(device), prefetcher_(prefetcher), disk_(disk) {}
  RowWriter(const RowWriter&) = delete;
  RowWriter& operator=(const RowWriter&) = delete;

  void update(const int64_t* ids, size_t n, const float* grads, std::optional<double> lr, std::optional<int64_t> step);
  void update(const Batch& batch, const float* sums, std::optional<double> lr, std::optional<int64_t> step);
  void check_change(const Batch& batch, bool is_step, std::optional<double> lr, std::optional<int64_t> step);
  void set(const int64_t* ids, size_t n, size_t field, const float* values);
  void scatter_records(const int64_t* ids, size_t n, const std::byte* records);
  void append_records(const int64_t* ids, size_t n, const std::byte* records);
  Erased erase(const int64_t* ids, size_t n, std::optional<uint64_t> changes);

 private:
  // One accepted update: its number, and the constants for all its rows.
  struct Step {
    int64_t number;
    StepConstants constants;
    std::optional<Admission> admission;
    const Admission* draws() const {
      return admission.has_value() ? &*admission : nullptr;
    }  // null: every row is stored
  };
  // lock_to_write() and begin_update() take the lock. All others require it.
  TableLock::Guard lock_to_write(const int64_t* ids, size_t n, const Batch* batch) RETURNS_LOCKED(table_.lock);
  TableLock::Guard begin_update(const int64_t* ids, size_t n, const Batch* batch) RETURNS_LOCKED(table_.lock);
  Step next_step(std::optional<double> lr, std::optional<int64_t> step) const REQUIRES(table_.lock);
  template <typename Write>
  void write_rows(const char* what, const Write& write) REQUIRES(table_.lock);
  void finish_step(const Step& step) REQUIRES(table_.lock);
  bool sum_row(const Batch& batch, size_t u, const float* grads, float* sum) const;
  [[noreturn]] void not_finite(const Batch& batch, const int64_t* ids, size_t n, const float* grads) const;
  void reserve_for(const Batch& batch, const Step& step) REQUIRES(table_.lock);
  // `sums`: the gradient sums, or null to compute them from `grads`.
  void apply_update(const Batch& batch, const float* grads, const float* sums, const Step& step, bool* wrote)
      REQUIRES(table_.lock);
  void note_step(std::byte* record, int64_t now) const;
  void require_distinct(const int64_t* ids, size_t n) REQUIRES(table_.lock);

  TableState& table_;
  DeviceLink& device_;
  Prefetcher& prefetcher_;
  DiskRoom& disk_;
};

}  // namespace bunkbed
