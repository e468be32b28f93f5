#include "scan/removable.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/fault.h"
#include "format/record.h"
#include "scan/scan.h"

namespace bunkbed {

namespace {

constexpr size_t kRowsAtOnce = 4096;
constexpr uint64_t kNotExpired = uint64_t{1} << 63;

// The first `most` of all that are added.
class FirstRemovals {
 public:
  explicit FirstRemovals(size_t most) : most_(most) {}
  void add(const Removal& removal) {
    if (is_full_ && !(removal < last_)) return;
    found_.push_back(removal);
    if (found_.size() < 2 * most_) return;
    shorten();
    is_full_ = true;
    last_ = found_.back();
  }
  std::vector<Removal> take() {
    if (found_.size() > most_) shorten();
    std::sort(found_.begin(), found_.end());
    return std::move(found_);
  }

 private:
  // Leaves the first ones, of which the last is at the end.
  void shorten() {
    const auto end = found_.begin() + static_cast<ptrdiff_t>(most_);
    std::nth_element(found_.begin(), end - 1, found_.end());
    found_.erase(end, found_.end());
  }

  const size_t most_;
  bool is_full_ = false;
  Removal last_;  // no later one is among the first
  std::vector<Removal> found_;
};

}  // namespace

Removable find_removable(Table& table, const Retention& retention, int64_t now, size_t most, bool only_expired,
                         const Removal& after) {
  if (!table.spec().retention.is_set()) {
    throw Error(ErrorKind::kInvalid,
                "table '" + table.name() + "' has no rule by which rows go; make it with expire= or max_rows=");
  }
  const size_t usage_offset = table.payload_bytes() - kUsageBytes;
  const Field& weight = table.fields()[0];
  std::vector<float> weights(weight.length);
  // The bits of a float64 that is not negative are in the order of its value.
  const auto squared_norm = [&](const std::byte* record) {
    read_field(weight, record, weights.data());
    double sum = 0.0;
    for (const float value : weights) sum += static_cast<double>(value) * static_cast<double>(value);
    return std::bit_cast<uint64_t>(sum);
  };
  const int64_t early = fault_is("expires_early") ? 1 : 0;
  Removable found;
  FirstRemovals first(std::max<size_t>(1, most));
  Scan scan(&table, {table.fields().size()});  // the usage, which ends the record
  const Scan::Visit visit = [&](int64_t id, const std::byte* record) {
    const Usage usage = read_usage(record + usage_offset);
    ++found.rows;
    if (usage.last_step == kNeverGoes) return;
    const int64_t age = std::max<int64_t>(0, now - usage.last_step);
    ++found.ages[static_cast<size_t>(std::bit_width(static_cast<uint64_t>(age)))];
    ++found.counts[static_cast<size_t>(std::bit_width(usage.count))];
    const bool is_expired = retention.expire > 0 && age + early >= retention.expire;
    found.expired += is_expired;
    if (!is_expired && only_expired) return;
    uint64_t key = static_cast<uint64_t>(usage.last_step);
    if (!is_expired) {
      if (retention.evict == EvictFirst::kRarest) key = usage.count;
      if (retention.evict == EvictFirst::kSmallest) key = squared_norm(record);
      key |= kNotExpired;
    }
    const Removal removal{key, id};
    if (after < removal) first.add(removal);
  };
  try {
    while (scan.visit(kRowsAtOnce, visit) > 0) {
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kBroken || table.changes() == scan.changes()) throw;
    throw changed_during_search(table.name());
  }
  found.first = first.take();
  found.changes = scan.changes();
  return found;
}

}  // namespace bunkbed
