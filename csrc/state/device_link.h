// The device cache of a table: which rows it holds, and what the table does about them before it reads, changes or
// commits rows. Without a cache no row is held. Requires the table's lock for every call but lock_written_back().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "device/device_cache.h"
#include "state/table_lock.h"
#include "state/table_state.h"

namespace bunkbed {

class DeviceLink {
 public:
  explicit DeviceLink(TableState& table);
  DeviceLink(const DeviceLink&) = delete;
  DeviceLink& operator=(const DeviceLink&) = delete;

  bool is_attached() const REQUIRES(table_.lock) { return is_attached_; }
  // `write_back` is called without the lock. When it returns, the table has every row that the cache held.
  void attach(std::shared_ptr<DeviceCache> cache, std::function<void()> write_back) REQUIRES(table_.lock);
  // Swaps out what attach() took. The caller destroys it without the lock, because it may refer to this table.
  void detach(std::shared_ptr<DeviceCache>* cache, std::function<void()>* write_back) REQUIRES(table_.lock);

  size_t num_held() const REQUIRES(table_.lock) { return cache_->num_held(); }
  // The most rows that the cache can hold.
  size_t max_rows() const REQUIRES(table_.lock);
  // Whether the cache holds all these rows, so that records of these rows are a write-back.
  bool is_write_back(const int64_t* ids, size_t n) const REQUIRES(table_.lock) {
    return is_attached_ && cache_->first_not_held(ids, n) == n;
  }
  // The same, and disk is reserved for these rows: attach() reserves it for as many rows as the cache has frames.
  bool are_reserved(const int64_t* ids, size_t n) const REQUIRES(table_.lock) {
    return cache_->num_held() <= cache_->max_held() && is_write_back(ids, n);
  }
  bool is_held(int64_t id) const REQUIRES(table_.lock) { return cache_->first_held(&id, 1) == 0; }
  // Reports to the cache that the table has the records of these rows.
  void arrived(const int64_t* ids, size_t n) REQUIRES(table_.lock) { cache_->arrived(ids, n); }

  // Makes the cache write back and takes the lock with `take`, until the cache holds no row under the lock.
  TableLock::Guard lock_written_back(const std::function<TableLock::Guard()>& take) RETURNS_LOCKED(table_.lock);
  // Throws when the cache holds the newest value of one of these rows: the table must not read or write it.
  void check_not_held(const int64_t* ids, size_t n) const REQUIRES(table_.lock);
  // Makes the cache drop its copies of rows that will change in the table. Throws when it holds or uses one.
  void release_for_change(const int64_t* ids, size_t n) REQUIRES(table_.lock);
  void require_not_in_use() const REQUIRES(table_.lock);
  // Makes the cache drop all copies, before every row changes. A plan made afterwards finds no copy and waits for the
  // lock.
  void give_up_all() REQUIRES(table_.lock);
  // Before the cache takes rows: throw when the files or the directory have no room for rows that are not stored, as a
  // write-back must not fail. All rows of the cache may be such rows.
  void require_disk(const int64_t* ids, size_t n) const REQUIRES(table_.lock);
  void require_directory(const int64_t* ids, size_t n) const REQUIRES(table_.lock);

 private:
  Error refused(int64_t id, size_t position, const char* why) const;
  Error rows_in_use(size_t rows) const;

  TableState& table_;
  bool is_attached_ GUARDED_BY(table_.lock) = false;
  std::shared_ptr<DeviceCache> cache_ GUARDED_BY(table_.lock);  // never null
  std::function<void()> write_back_ GUARDED_BY(table_.lock);
};

}  // namespace bunkbed
