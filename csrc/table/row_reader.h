// Reads rows: lookups, bags, slots and whole records. The public methods take the lock. Table declares them for users.
#pragma once

#include <cstddef>
#include <cstdint>

#include "batch/batch.h"
#include "format/record.h"
#include "jobs/prefetcher.h"
#include "state/device_link.h"
#include "state/table_state.h"

namespace bunkbed {

enum class Pooling : uint8_t { kSum, kMean, kSqrtN };

class RowReader {
 public:
  RowReader(TableState& table, DeviceLink& device, Prefetcher& prefetcher)
      : table_(table), device_(device), prefetcher_(prefetcher) {}
  RowReader(const RowReader&) = delete;
  RowReader& operator=(const RowReader&) = delete;

  void lookup(const int64_t* ids, size_t n, bool touch, float* out);
  void lookup(const Batch& batch, bool touch, float* out);
  void lookup_bags(const int64_t* ids, size_t n, const int64_t* offsets, size_t num_bags, Pooling pooling,
                   const float* weights, bool touch, float* out);
  void get(const int64_t* ids, size_t n, size_t field, float* out);
  void contains(const int64_t* ids, size_t n, bool* out);
  void gather_records(const int64_t* ids, size_t n, std::byte* records);

 private:
  // begin_lookup() takes the lock. All others require it.
  TableLock::Guard begin_lookup(const int64_t* ids, size_t n, bool touch) RETURNS_LOCKED(table_.lock);
  void yield_lock(TableLock::Guard& guard) NO_THREAD_SAFETY_ANALYSIS;
  void count_lookup(const int64_t* rows, size_t n, bool touch) REQUIRES(table_.lock);
  void lookup_piece(const int64_t* ids, size_t n, bool touch, float* out) REQUIRES(table_.lock);
  size_t copy_resident_ids(const int64_t* ids, size_t n, bool touch, float* out) REQUIRES(table_.lock);
  void lookup_missing_ids(const int64_t* ids, bool touch, float* out) REQUIRES(table_.lock);
  struct CopiedRows {
    size_t n;
    size_t known;
  };
  void copy_resident(const uint32_t* frames, const uint32_t* index, CopiedRows rows, float* out) const
      REQUIRES(table_.lock);
  void lookup_missing(const Batch& batch, const uint32_t* frames, const Entry* entries, bool touch, float* out)
      REQUIRES(table_.lock);
  struct Bags;
  void pool_resident(const Bags& bags, size_t first, size_t count, float* out) REQUIRES(table_.lock);
  void pool_missing(const Bags& bags, size_t first, size_t count, float* out) REQUIRES(table_.lock);
  void widen(const std::byte* record, float* out) const { read_field(table_.fields[0], record, out); }

  TableState& table_;
  DeviceLink& device_;
  Prefetcher& prefetcher_;
};

}  // namespace bunkbed
