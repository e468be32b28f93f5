// What a device cache tells its table about the rows that it has copies of.
//
//   held     the cache has the newest value, or it is on its way to the table, whose value must not be read or changed.
//   in use   the cache is about to read or change its copy: the table's value must not change now.
// Any other copy equals the table's value and is dropped when that changes: see give_up().
//
// Thread-safe. The table calls with its lock held, so a device cache never calls the table with a lock of its own held.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bunkbed {

class DeviceCache {
 public:
  virtual ~DeviceCache() = default;
  // Number of rows held now, and its maximum without the rows on their way to the table.
  virtual size_t num_held() const = 0;
  virtual size_t max_held() const = 0;
  virtual size_t num_in_use() const = 0;
  // The index of the first row that is held, and of the first that is not; n where there is none.
  virtual size_t first_held(const int64_t* rows, size_t n) const = 0;
  virtual size_t first_not_held(const int64_t* rows, size_t n) const = 0;
  // Drops copies of rows that are about to change in the table. Returns the index of the first row that is held or in
  // use, and then dropped no copy; else n.
  virtual size_t give_up(const int64_t* rows, size_t n) = 0;
  // Drops all copies, because every row is about to change. The caller holds the table's lock, so a new request for a
  // row waits for the change. Returns the number of rows that are held or in use; when it is not 0, drops no copy.
  virtual size_t give_up_all() = 0;
  // The table has received records of these rows from the cache: they are no longer on their way.
  virtual void arrived(const int64_t* rows, size_t n) = 0;
};

}  // namespace bunkbed
