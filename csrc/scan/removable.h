// The rows that a sweep removes, in the order in which they go.
//
// A row that was not named for `expire` units of the clock has expired. Expired rows go first, the one that was named
// longest ago before the others; then, where more rows are stored than may stay, those that `evict` puts first. Of
// equal rows the lower id goes first. So the order depends on the rows alone: not on the budget, on threads or on the
// shards, whose orders can be merged. The caller knows how many rows go (table/deletes.py).
//
// A row with kNeverGoes is not in the order.
//
// The search reads every record once, in the order of the log. It keeps the first `most` rows, and twice as many while
// it searches. A caller to whom these are too few asks again for those after the last one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"
#include "table/table.h"

namespace bunkbed {

// A place in the order: rows compare by key, then by id. Expired rows have the highest bit of the key clear.
struct Removal {
  uint64_t key = 0;
  int64_t id = -1;
  auto operator<=>(const Removal&) const = default;
};

struct Removable {
  uint64_t rows = 0;           // that are stored
  uint64_t expired = 0;        // of these
  uint64_t changes = 0;        // Table::changes() then
  std::vector<Removal> first;  // ascending
  // Number of rows by bit_width() of their age, and of their count: 0, 1, 2 to 3, 4 to 7, ...
  std::array<uint64_t, 65> ages{};
  std::array<uint64_t, 33> counts{};
};

// `now`: the time of the clock. `only_expired`: leave out the rows that have not expired. Takes the lock for a part of
// the rows at a time, and throws when the table changes meanwhile.
Removable find_removable(Table& table, const Retention& retention, int64_t now, size_t most, bool only_expired,
                         const Removal& after);

}  // namespace bunkbed
