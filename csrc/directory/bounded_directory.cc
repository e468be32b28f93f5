// The directory of a table with a bound on its rows, of which few or all may be stored: ranges of rows, each in the
// form that takes fewer bytes. A range is hashed while few of its rows are stored. Before it would take more bytes than
// the flat form, it becomes flat. So any number of rows takes at most the bytes of a flat directory, and one range more
// on the way.
#include <algorithm>
#include <bit>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "directory/lazy_zeros.h"
#include "directory/partition.h"

namespace bunkbed {

namespace {

constexpr uint64_t kMostBoundedRows = uint64_t{1} << 34;
constexpr size_t kRangeBytes = 80;  // with what the allocator adds to two arrays

// A power of two. About 256 ranges, more where they would have more than 65,536 rows, 16,384 at most.
uint64_t range_rows(uint64_t num_rows) {
  const uint64_t rows = std::clamp<uint64_t>(std::bit_ceil((num_rows + 255) / 256), 1024, 65'536);
  return std::max(rows, std::bit_ceil((num_rows + 16'383) / 16'384));
}
uint64_t num_ranges(uint64_t num_rows) { return (num_rows + range_rows(num_rows) - 1) / range_rows(num_rows); }

class BoundedDirectory final : public Directory {
 public:
  explicit BoundedDirectory(uint64_t num_rows)
      : num_rows_(num_rows), shift_(std::countr_zero(range_rows(num_rows))), ranges_(num_ranges(num_rows)) {}

  void locate(const int64_t* rows, size_t n, Entry* entries) const override {
    const size_t first = std::min(n, kAhead);
    for (size_t i = 0; i < first; ++i) prefetch(within(rows + i));
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) prefetch(within(rows + i + kAhead));
      entries[i] = find(within(rows + i));
    }
  }
  void prefetch(int64_t row) const override {
    const Range& range = of(row);
    if (range.flat == nullptr) return range.hashed.prefetch(mix_id(row));
    __builtin_prefetch(at(range, row), 0, 2);
    __builtin_prefetch(at(range, row) + sizeof(uint64_t) - 1, 0, 2);
  }
  Entry find(int64_t row) const override {
    const Range& range = of(row);
    return range.flat != nullptr ? load_entry(at(range, row)) : range.hashed.find(row, mix_id(row));
  }
  void set(int64_t row, Entry entry) override {
    const Entry old = find(row);
    if (old == kAbsent && entry == kAbsent) return;
    changed();
    note(old, entry);
    bytes_ += store(row, entry, old == kAbsent);
  }
  bool grows() const override { return flat_ranges_ < ranges_.size(); }
  NewRows new_rows(const int64_t* rows, size_t n) const override {
    NewRows found;
    if (n < ranges_.size() / 16) {
      for (size_t i = 0; i < n; ++i) found.emplace_back(index_of(rows[i]), 1);
      std::sort(found.begin(), found.end());
      size_t kept = 0;
      for (size_t i = 1; i < found.size(); ++i) {
        if (found[i].first == found[kept].first) {
          ++found[kept].second;
        } else {
          found[++kept] = found[i];
        }
      }
      if (!found.empty()) found.resize(kept + 1);
      return found;
    }
    std::vector<size_t> counts(ranges_.size(), 0);
    for (size_t i = 0; i < n; ++i) ++counts[index_of(rows[i])];
    for (size_t r = 0; r < counts.size(); ++r) {
      if (counts[r] > 0) found.emplace_back(r, counts[r]);
    }
    return found;
  }
  size_t bytes_after(const NewRows& coming) const override {
    size_t bytes = bytes_;
    size_t largest = 0;  // one range is copied while it grows or becomes flat
    for (const auto& [r, rows] : coming) {
      if (ranges_[r].flat != nullptr) continue;
      const size_t before = ranges_[r].hashed.bytes();
      const size_t after = std::min(hashed_bytes(ranges_[r], rows), flat_bytes(r));
      if (after == before) continue;
      bytes += after - before;
      largest = std::max(largest, before);
    }
    return bytes + largest;
  }
  void reserve(const NewRows& coming) override {
    for (const auto& [r, rows] : coming) bytes_ += make_room(r, rows);
  }
  size_t bytes() const override { return bytes_; }
  size_t bytes_for(uint64_t stored_rows) const override {
    return std::max(bytes_, bounded_directory_bytes(num_rows_, stored_rows));
  }
  void clear() override {
    changed();
    ranges_ = std::vector<Range>(num_ranges(num_rows_));
    stored_rows_ = counted_rows_ = flat_ranges_ = 0;
    bytes_ = ranges_.size() * kRangeBytes;
  }

  size_t num_parts() const override { return ranges_.size(); }
  size_t part_of(int64_t row) const override { return index_of(row); }
  void part(size_t part, std::vector<int64_t>* rows, std::vector<Entry>* entries) const override {
    const Range& range = ranges_[part];
    const auto add = [&](int64_t row, Entry entry) {
      if (entry == kAbsent) return;
      rows->push_back(row);
      entries->push_back(entry);
    };
    if (range.flat == nullptr) return range.hashed.each(add);
    const uint64_t end = std::min(num_rows_, (part + 1) << shift_);
    for (uint64_t row = part << shift_; row < end; ++row) {
      add(static_cast<int64_t>(row), load_entry(at(range, static_cast<int64_t>(row))));
    }
  }

  void begin_bulk(uint64_t) override {
    changed();
    bulk_locks_ = std::make_unique<LocalMutex[]>(ranges_.size());
  }
  void bulk_exchange(const int64_t* rows, Entry* entries, size_t n) override {
    for (size_t i = 0; i < n;) {
      const size_t r = index_of(rows[i]);
      const MutexLock guard(bulk_locks_[r]);
      for (; i < n && index_of(rows[i]) == r; ++i) {
        const Entry before = find(rows[i]);
        if (before != kAbsent || entries[i] != kAbsent) store(rows[i], entries[i], before == kAbsent);
        entries[i] = before;
      }
    }
  }
  bool bulk_copy(int64_t, const std::byte*, size_t) override { return false; }
  void end_bulk(size_t rows, size_t counted) override {
    bulk_locks_.reset();
    stored_rows_ = rows;
    counted_rows_ = counted;
    bytes_ = ranges_.size() * kRangeBytes;
    flat_ranges_ = 0;
    for (size_t r = 0; r < ranges_.size(); ++r) {
      bytes_ += ranges_[r].flat != nullptr ? flat_bytes(r) : ranges_[r].hashed.bytes();
      flat_ranges_ += ranges_[r].flat != nullptr;
    }
  }

 private:
  static constexpr size_t kAhead = 16;
  struct Range {
    Partition hashed;
    std::unique_ptr<LazyZeros> flat;  // null: hashed
  };
  static_assert(sizeof(Range) <= kRangeBytes);
  struct LocalMutex : Mutex {
    LocalMutex() : Mutex(LockLevel::kLocal) {}
  };

  // Reads a row to be located, once. Another thread may have changed the caller's array after the check; the result is
  // then an arbitrary row of the table.
  int64_t within(const int64_t* row) const {
    return static_cast<int64_t>(std::min(static_cast<uint64_t>(__atomic_load_n(row, __ATOMIC_RELAXED)), num_rows_ - 1));
  }
  size_t index_of(int64_t row) const { return static_cast<uint64_t>(row) >> shift_; }
  const Range& of(int64_t row) const { return ranges_[index_of(row)]; }
  std::byte* at(const Range& range, int64_t row) const {
    return range.flat->get() + (static_cast<uint64_t>(row) & ((uint64_t{1} << shift_) - 1)) * kEntryBytes;
  }
  size_t flat_bytes(size_t range) const {
    return std::min(num_rows_ - (range << shift_), uint64_t{1} << shift_) * kEntryBytes + sizeof(uint64_t);
  }
  static size_t hashed_bytes(const Range& range, size_t coming) {
    return range.hashed.capacity_after(coming) * kSlotBytes;
  }

  // Makes room for so many new rows of a range. Returns the bytes that it takes more.
  size_t make_room(size_t index, size_t coming) {
    Range& range = ranges_[index];
    if (range.flat != nullptr) return 0;
    const size_t before = range.hashed.bytes();
    if (hashed_bytes(range, coming) <= flat_bytes(index)) {
      range.hashed.grow(range.hashed.count() + coming);
      return range.hashed.bytes() - before;
    }
    range.flat = std::make_unique<LazyZeros>(flat_bytes(index));
    range.hashed.each([&](int64_t row, Entry entry) { store_entry(at(range, row), entry); });
    range.hashed = Partition();
    if (bulk_locks_ == nullptr) ++flat_ranges_;
    return flat_bytes(index) - before;
  }
  // Sets an entry. Returns the bytes that the directory takes more.
  size_t store(int64_t row, Entry entry, bool is_new) {
    const size_t index = index_of(row);
    Range& range = ranges_[index];
    const size_t more = is_new ? make_room(index, 1) : 0;
    if (range.flat != nullptr) {
      store_entry(at(range, row), entry);
    } else if (entry == kAbsent) {
      const size_t before = range.hashed.bytes();
      range.hashed.erase(row, mix_id(row));
      return range.hashed.bytes() - before;  // modulo 2^64: it may be less
    } else {
      range.hashed.set(row, mix_id(row), entry);
    }
    return more;
  }

  uint64_t num_rows_;
  int shift_;
  std::vector<Range> ranges_;
  size_t flat_ranges_ = 0;
  size_t bytes_ = ranges_.size() * kRangeBytes;
  std::unique_ptr<LocalMutex[]> bulk_locks_;  // of ranges, while they are filled
};

}  // namespace

size_t bounded_directory_bytes(uint64_t num_rows, uint64_t stored_rows) {
  if (num_rows > kMostBoundedRows) return hashed_directory_bytes(stored_rows);
  const double ranges = static_cast<double>(num_ranges(num_rows));
  const double flat = static_cast<double>(num_rows) * kEntryBytes + 8 * ranges;
  const double most_rows = static_cast<double>(std::min(stored_rows, num_rows));
  const auto hashed = [](double rows, double parts) {
    return (rows / kMaxLoad * kGrowth + std::min(rows, parts) * (1 + kLeastSlots)) * kSlotBytes;
  };
  const double one_range = static_cast<double>(std::min(range_rows(num_rows), num_rows));
  const double largest = std::min(hashed(std::min(most_rows, one_range), 1), one_range * kEntryBytes);
  return num_ranges(num_rows) * kRangeBytes + static_cast<size_t>(std::min(flat, hashed(most_rows, ranges)) + largest);
}

std::unique_ptr<Directory> make_bounded_directory(uint64_t num_rows) {
  // With more rows few are stored, and a range would be so large that its growth takes long.
  if (num_rows > kMostBoundedRows) return make_hashed_directory();
  return std::make_unique<BoundedDirectory>(num_rows);
}

}  // namespace bunkbed
