#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "directory/packed_entry.h"

namespace bunkbed {

inline constexpr size_t kHugePagesFrom = 8u << 20;
inline constexpr size_t kHugePagesTo = 256u << 20;

// Zeroed memory that takes no RAM until it is touched. The budget counts all of it.
class LazyZeros {
 public:
  explicit LazyZeros(size_t bytes) : bytes_(bytes) { map(); }
  ~LazyZeros() { ::munmap(memory_, bytes_); }
  LazyZeros(const LazyZeros&) = delete;
  LazyZeros& operator=(const LazyZeros&) = delete;
  void clear() {
    ::munmap(memory_, bytes_);
    map();
  }
  std::byte* get() const { return static_cast<std::byte*>(memory_); }

 private:
  void map() {
    memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) {
      throw Error(ErrorKind::kMemory, "cannot map a directory of " + std::to_string(bytes_) + " bytes");
    }
#ifdef MADV_HUGEPAGE
    // A batch touches one entry in each of many pages, and with small pages each costs a walk through the page tables.
    // Not for larger memory, where a few rows would make most of it resident.
    if (bytes_ >= kHugePagesFrom && bytes_ < kHugePagesTo) ::madvise(memory_, bytes_, MADV_HUGEPAGE);
#endif
  }
  size_t bytes_;
  void* memory_ = nullptr;
};

// Five bytes a row, and for each group of rows the number of rows at home, in the frame with their own number. Rows
// that were first stored in the order of their ids (an import, a table filled once) are all at home. locate() does not
// read the entries of a group whose rows are all at home. For a batch of random rows the counts fit the processor's
// inner caches; the entries, six hundred times as large, do not.
class FlatDirectory final : public Directory {
 public:
  explicit FlatDirectory(uint64_t num_rows)
      : num_rows_(num_rows),
        entry_bytes_(num_rows * kEntryBytes + sizeof(uint64_t)),
        entry_zeros_(entry_bytes_),
        home_zeros_(flat_directory_bytes(num_rows) - entry_bytes_) {}

  void locate(const int64_t* rows, size_t n, Entry* entries) const override {
    if (home_groups_ > stored_rows_ / kGroupRows / 2) {
      locate_at_home(rows, n, entries);
      return;
    }
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) prefetch(within(rows + i + kAhead));
      entries[i] = load_entry(at(within(rows + i)));
    }
  }
  Entry find(int64_t row) const override { return load_entry(at(row)); }
  void set(int64_t row, Entry entry) override {
    changed();
    std::byte* place = at(row);
    const Entry old = load_entry(place);
    stored_rows_ += (entry != kAbsent) - (old != kAbsent);
    store_entry(place, entry);
    const bool was_home = old == home_of(row), is_home = entry == home_of(row);
    if (was_home == is_home) return;
    uint8_t& count = home()[static_cast<uint64_t>(row) / kGroupRows];
    home_groups_ -= count == kGroupRows;
    count = static_cast<uint8_t>(is_home ? count + 1 : count - 1);
    home_groups_ += count == kGroupRows;
  }
  bool grows() const override { return false; }
  size_t bytes_after(const int64_t*, size_t) const override { return bytes(); }
  void reserve(const int64_t*, size_t) override {}
  size_t bytes() const override { return flat_directory_bytes(num_rows_); }
  size_t bytes_for(uint64_t) const override { return bytes(); }
  void clear() override {
    changed();
    entry_zeros_.clear();
    home_zeros_.clear();
    stored_rows_ = home_groups_ = 0;
  }

  size_t num_parts() const override { return (num_rows_ + kPartRows - 1) / kPartRows; }
  void part(size_t part, std::vector<int64_t>* rows, std::vector<Entry>* entries) const override {
    const uint64_t end = std::min(num_rows_, (part + 1) * kPartRows);
    for (uint64_t row = part * kPartRows; row < end; ++row) {
      const Entry entry = load_entry(at(static_cast<int64_t>(row)));
      if (entry == kAbsent) continue;
      rows->push_back(static_cast<int64_t>(row));
      entries->push_back(entry);
    }
  }
  void begin_bulk(uint64_t) override { changed(); }
  // Positions are no frames: no row is at home. Touches only the entry's own bytes: other threads write its neighbours.
  bool bulk_set(const int64_t* rows, const Entry* entries, size_t n) override {
    bool all_new = true;
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(at(rows[i + kAhead]), 1, 2);
      Entry before = 0;
      std::memcpy(&before, at(rows[i]), kEntryBytes);
      all_new &= before == kAbsent;
      store_entry(at(rows[i]), entries[i]);
    }
    return all_new;
  }
  bool bulk_copy(int64_t first, const std::byte* packed, size_t n) override {
    std::memcpy(at(first), packed, n * kEntryBytes);
    return true;
  }
  void end_bulk(size_t rows) override { stored_rows_ = rows; }

 private:
  static constexpr size_t kAhead = 48;  // how far locate() prefetches
  static constexpr uint64_t kPartRows = 8192;
  static constexpr uint64_t kGroupRows = kFlatGroupRows;

  // For a row beyond the numbers of frames, a value that is no entry.
  static Entry home_of(int64_t row) {
    return static_cast<uint64_t>(row) < ~uint32_t{0} ? entry_of_frame(static_cast<uint32_t>(row)) : ~Entry{0};
  }
  // Reads a row to be located, once. Another thread may have changed the caller's array after the check; the result is
  // then an arbitrary row of the table.
  int64_t within(const int64_t* row) const {
    return static_cast<int64_t>(std::min(static_cast<uint64_t>(__atomic_load_n(row, __ATOMIC_RELAXED)), num_rows_ - 1));
  }
  std::byte* at(int64_t row) const { return entry_zeros_.get() + static_cast<uint64_t>(row) * kEntryBytes; }
  uint8_t* home() const { return reinterpret_cast<uint8_t*>(home_zeros_.get()); }
  bool is_group_home(int64_t row) const { return home()[static_cast<uint64_t>(row) / kGroupRows] == kGroupRows; }
  // Into the second-level cache, because the first can have too few lines under way. One load in nine straddles two
  // lines; without a prefetch of the second line it would stall for a full miss.
  void prefetch(int64_t row) const {
    __builtin_prefetch(at(row), 0, 2);
    __builtin_prefetch(at(row) + sizeof(uint64_t) - 1, 0, 2);
  }
  void locate_at_home(const int64_t* rows, size_t n, Entry* entries) const {
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) {
        const int64_t ahead = within(rows + i + kAhead);
        if (!is_group_home(ahead)) prefetch(ahead);
      }
      const int64_t row = within(rows + i);
      entries[i] = is_group_home(row) ? home_of(row) : load_entry(at(row));
    }
  }

  uint64_t num_rows_;
  size_t entry_bytes_;
  LazyZeros entry_zeros_;
  LazyZeros home_zeros_;  // uint8 for each group
  size_t home_groups_ = 0;  // groups with all rows at home
};

}  // namespace bunkbed
