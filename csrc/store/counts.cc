// See Counts in store.h.
#include <algorithm>

#include "base/fault.h"
#include "store/store.h"

namespace bunkbed {

void Counts::make_room(size_t n) {
  if (log_ == nullptr) return;
  if (listed_.size() + n > room()) write();
  if (listed_.empty() && listed_.capacity() > room()) listed_ = {};
  listed_.reserve(room());
}

void Counts::list(int64_t row) {
  if (log_ == nullptr) return;
  listed_.push_back(row);
  unwritten_->counts = listed_.size();
}

void Counts::raise(int64_t row, Entry before, int64_t now) {
  directory_->set(row, raised_count(before, std::max(now, since_)));
  list(row);
}

// Rows that were stored or deleted since they were listed have no count.
void Counts::write() {
  std::sort(listed_.begin(), listed_.end());
  listed_.erase(std::unique(listed_.begin(), listed_.end()), listed_.end());
  std::vector<int64_t> rows;
  std::vector<Entry> counts;
  const size_t most = std::min<size_t>(4096, room());
  std::vector<Entry> entries(std::min(most, listed_.size()));
  size_t written = 0;
  try {
    for (; written < listed_.size(); written += std::min(most, listed_.size() - written)) {
      const size_t count = std::min(most, listed_.size() - written);
      const int64_t* const listed = listed_.data() + written;
      directory_->locate(listed, count, entries.data());
      rows.clear();
      counts.clear();
      for (size_t i = 0; i < count; ++i) {
        if (!is_count(entries[i]) || (listed[i] % 4 == 0 && fault_is("lost_count"))) continue;
        rows.push_back(listed[i]);
        counts.push_back(entries[i]);
      }
      log_->append_others(rows.data(), nullptr, counts.data(), rows.size());
    }
  } catch (...) {
    listed_.erase(listed_.begin(), listed_.begin() + static_cast<ptrdiff_t>(written));
    unwritten_->counts = listed_.size();
    throw;
  }
  listed_.clear();
  unwritten_->counts = 0;
}

void Counts::each(const std::function<void(int64_t row, Entry count)>& visit) const {
  std::vector<int64_t> rows;
  std::vector<Entry> entries;
  for (size_t part = 0; part < directory_->num_parts() && directory_->counted_rows() > 0; ++part) {
    rows.clear();
    entries.clear();
    directory_->part(part, &rows, &entries);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (is_count(entries[i])) visit(rows[i], entries[i]);
    }
  }
}

uint64_t Counts::forget(int64_t before) {
  since_ = std::max(since_, before);
  if (fault_is("old_counts_stay")) return 0;
  std::vector<int64_t> old;
  const auto is_old = [this](Entry count) { return time_of_count(count) < since_; };
  each([&](int64_t row, Entry count) {
    if (is_old(count)) old.push_back(row);
  });
  for (const int64_t row : old) directory_->set(row, kAbsent);
  return old.size();
}

void Counts::set(const int64_t* rows, const Entry* counts, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (is_stored(directory_->find(rows[i]))) continue;
    make_room(1);
    directory_->set(rows[i], counts[i]);
    list(rows[i]);
  }
}

}  // namespace bunkbed
