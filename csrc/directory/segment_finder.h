// Finds the segment of a record, for loops over millions of records. The log must not change meanwhile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "log/log.h"

namespace bunkbed {

class SegmentFinder {
 public:
  static constexpr size_t kNone = ~size_t{0};

  explicit SegmentFinder(const Log& log)
      : slots_(log.slots_per_segment()), inverse_(1.0 / static_cast<double>(log.slots_per_segment())) {
    for (const auto& [id, segment] : log.segments()) ids_.push_back(id);
    const uint64_t range = ids_.empty() ? 0 : ids_.back() - ids_.front() + 1;
    if (range > 1u << 20) return;
    places_.assign(range, kNone);
    for (size_t i = 0; i < ids_.size(); ++i) places_[ids_[i] - ids_.front()] = i;
  }

  // How many segments of the log have a lower number than that of this record; kNone: the log has no such segment.
  // `slot`: the record's place in the segment.
  size_t find(uint64_t position, uint64_t* slot) const {
    // A double holds 40 bits exactly; the quotient is off by at most one.
    auto segment = static_cast<uint64_t>(static_cast<double>(position) * inverse_);
    if (segment * slots_ > position) --segment;
    if (position - segment * slots_ >= slots_) ++segment;
    *slot = position - segment * slots_;
    if (ids_.empty() || segment < ids_.front() || segment > ids_.back()) return kNone;
    if (!places_.empty()) return places_[segment - ids_.front()];
    const auto found = std::lower_bound(ids_.begin(), ids_.end(), segment);
    return *found == segment ? static_cast<size_t>(found - ids_.begin()) : kNone;
  }
  size_t num_segments() const { return ids_.size(); }

 private:
  const uint64_t slots_;
  const double inverse_;
  std::vector<uint64_t> ids_;
  std::vector<size_t> places_;  // by number, less the least; empty: the numbers are far apart
};

}  // namespace bunkbed
