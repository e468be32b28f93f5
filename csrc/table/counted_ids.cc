#include "table/counted_ids.h"

#include <string>

#include "base/error.h"
#include "directory/count_rows.h"
#include "table/parts.h"

namespace bunkbed {

CountedIds::Found CountedIds::find(uint64_t part, uint64_t parts) {
  TableState& t = table_->parts_->state;
  const auto guard = t.lock.exclusive(TableLock::Commits::kMayRun);
  t.require_usable();
  Found found;
  found.since = t.store->counts().since();
  const auto add = [&](int64_t id, Entry count) {
    found.ids.push_back(id);
    found.counts.push_back(count_of(count));
    found.times.push_back(time_of_count(count));
  };
  if (!t.options.writable) {
    const CountRule rule{.since = found.since};
    const auto counts = counts_in(t.store->log(), t.spec.num_rows, t.committed.next_version, rule, part, parts);
    for (const auto& [id, count] : counts) add(id, count);
    return found;
  }
  t.store->counts().each([&](int64_t id, Entry count) {
    if ((mix_id(id) >> 8) % parts == part) add(id, count);
  });
  return found;
}

void CountedIds::set(const int64_t* ids, const int64_t* counts, const int64_t* times, size_t n) {
  TableState& t = table_->parts_->state;
  const auto guard = table_->parts_->disk.lock_for_tombstones(ids, n);
  t.store->disk().forget_admitted();
  std::vector<Entry> entries(n);
  for (size_t i = 0; i < n; ++i) {
    if (counts[i] < 1 || counts[i] >= kMostAdmitFrom || times[i] < 0) {
      throw Error(ErrorKind::kInvalid, "table '" + t.name + "': the count " + std::to_string(counts[i]) + " of id " +
                                           std::to_string(ids[i]) + " at time " + std::to_string(times[i]) +
                                           " is out of range; nothing was changed");
    }
    entries[i] = entry_of_count(static_cast<uint32_t>(counts[i]), times[i]);
  }
  t.store->reserve(t.store->new_rows(ids, n));
  t.store->counts().set(ids, entries.data(), n);
  if (n > 0) t.mark_changed();
}

uint64_t CountedIds::forget(int64_t before) {
  TableState& t = table_->parts_->state;
  const auto guard = t.lock.exclusive(TableLock::Commits::kMayRun);
  t.require_writable();
  if (before <= t.store->counts().since()) return 0;
  const uint64_t forgotten = t.store->counts().forget(before);
  t.mark_changed();
  return forgotten;
}

}  // namespace bunkbed
