// The device cache above a table, as the table sees it: which rows it holds, and what must be asked of it before rows here are
// read, changed or committed. Without a cache it holds none. Requires the table's lock for every call but lock_written_back().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "device/holder.h"
#include "state/table_lock.h"
#include "state/table_state.h"

namespace bunkbed {

class DeviceLink {
 public:
  explicit DeviceLink(TableState& table);
  DeviceLink(const DeviceLink&) = delete;
  DeviceLink& operator=(const DeviceLink&) = delete;

  bool is_attached() const { return is_attached_; }
  // `write_back` is called without the lock. When it returns, the table has every row that the cache held.
  void attach(std::shared_ptr<Holder> cache, std::function<void()> write_back);
  // Swaps out what attach() took. The caller destroys it without the lock, because it may refer to this table.
  void detach(std::shared_ptr<Holder>* cache, std::function<void()>* write_back);

  size_t num_held() const { return cache_->num_held(); }
  // The most rows that the cache can hold.
  size_t max_rows() const;
  // Whether the cache holds all these rows and they are on their way to the table.
  bool is_write_back(const int64_t* ids, size_t n) const { return is_attached_ && cache_->first_not_held(ids, n) == n; }
  // The same, when all its rows fit its frames: then there is room for the rows, which were reserved for.
  bool are_reserved(const int64_t* ids, size_t n) const {
    return cache_->num_held() <= cache_->max_held() && is_write_back(ids, n);
  }
  bool is_held(int64_t id) const { return cache_->first_held(&id, 1) == 0; }
  // The table has got the records of these rows.
  void arrived(const int64_t* ids, size_t n) { cache_->arrived(ids, n); }

  // Takes the lock with `take` at a moment when the cache holds no row.
  TableLock::Guard lock_written_back(const std::function<TableLock::Guard()>& take);
  // A row whose newest value the cache holds must not be read or written here.
  void check_not_held(const int64_t* ids, size_t n) const;
  // Drops the cache's copies of rows that are about to change here.
  void release_for_change(const int64_t* ids, size_t n);
  void require_not_in_use() const;
  // Drops all copies before every row changes. A plan made afterwards finds no copy and waits for the lock.
  void give_up_all();
  // Before rows that are stored nowhere yet are trained in the cache. When they are written back it is too late to find that
  // the files or the directory have no room. All rows of the cache may be such.
  void require_disk(const int64_t* ids, size_t n) const;
  void require_directory(const int64_t* ids, size_t n) const;

 private:
  Error rows_in_use(size_t rows) const;

  TableState& table_;
  bool is_attached_ = false;
  std::shared_ptr<Holder> cache_;  // never null
  std::function<void()> write_back_;
};

}  // namespace bunkbed
