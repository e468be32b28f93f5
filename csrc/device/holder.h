// What a tier above a table (a device cache) tells the table about the rows it has copies of.
//
//   held     the newest value lies above, or is on its way down: the table's own must not be read or changed.
//   in use   somebody above is about to read or change its copy: the table's must not change now.
// Any other copy is as good as the table's, and let go of when the table's changes: see give_up().
//
// Any thread. The table calls with its lock, so a holder never calls the table with one of its own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bunkbed {

class Holder {
 public:
  virtual ~Holder() = default;
  // Rows held now; and at most, but for those on their way down.
  virtual size_t num_held() const = 0;
  virtual size_t max_held() const = 0;
  virtual size_t num_in_use() const = 0;
  // The first of these rows that is held, and the first that is not; n where there is none.
  virtual size_t first_held(const int64_t* rows, size_t n) const = 0;
  virtual size_t first_not_held(const int64_t* rows, size_t n) const = 0;
  // The rows are about to change in the table: copies go. Returns the first row that is held or in use, and then none
  // has gone; else n.
  virtual size_t give_up(const int64_t* rows, size_t n) = 0;
  // Drops all copies, because every row is about to change. The caller holds the table's lock, so a new request for a row
  // waits for the change. Returns the number of rows that are held or in use; when it is not 0, no copy was dropped.
  virtual size_t give_up_all() = 0;
  // The table has got records of these rows from above: they are no longer on their way.
  virtual void arrived(const int64_t* rows, size_t n) = 0;
};

}  // namespace bunkbed
