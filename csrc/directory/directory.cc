#include "directory/directory.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>

#include "base/mutex.h"
#include "directory/lazy_zeros.h"
#include "directory/partition.h"

namespace bunkbed {

namespace {

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
  // Into the second-level cache, because the first can have too few lines under way. One load in nine straddles two
  // lines; without a prefetch of the second line it would stall for a full miss.
  void prefetch(int64_t row) const override {
    __builtin_prefetch(at(row), 0, 2);
    __builtin_prefetch(at(row) + sizeof(uint64_t) - 1, 0, 2);
  }
  Entry find(int64_t row) const override { return load_entry(at(row)); }
  void set(int64_t row, Entry entry) override {
    changed();
    std::byte* place = at(row);
    const Entry old = load_entry(place);
    note(old, entry);
    store_entry(place, entry);
    const bool was_home = old == home_of(row), is_home = entry == home_of(row);
    if (was_home == is_home) return;
    uint8_t& count = home()[static_cast<uint64_t>(row) / kGroupRows];
    home_groups_ -= count == kGroupRows;
    count = static_cast<uint8_t>(is_home ? count + 1 : count - 1);
    home_groups_ += count == kGroupRows;
  }
  bool grows() const override { return false; }
  NewRows new_rows(const int64_t*, size_t) const override { return {}; }
  size_t bytes_after(const NewRows&) const override { return bytes(); }
  void reserve(const NewRows&) override {}
  size_t bytes() const override { return flat_directory_bytes(num_rows_); }
  size_t bytes_for(uint64_t) const override { return bytes(); }
  void clear() override {
    changed();
    entry_zeros_.clear();
    home_zeros_.clear();
    stored_rows_ = counted_rows_ = home_groups_ = 0;
  }

  size_t num_parts() const override { return (num_rows_ + kPartRows - 1) / kPartRows; }
  size_t part_of(int64_t row) const override { return static_cast<uint64_t>(row) / kPartRows; }
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
  void bulk_exchange(const int64_t* rows, Entry* entries, size_t n) override {
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(at(rows[i + kAhead]), 1, 2);
      Entry before = 0;
      std::memcpy(&before, at(rows[i]), kEntryBytes);
      store_entry(at(rows[i]), entries[i]);
      entries[i] = before;
    }
  }
  bool bulk_copy(int64_t first, const std::byte* packed, size_t n) override {
    std::memcpy(at(first), packed, n * kEntryBytes);
    return true;
  }
  void end_bulk(size_t rows, size_t counted) override {
    stored_rows_ = rows;
    counted_rows_ = counted;
  }

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
  LazyZeros home_zeros_;    // uint8 for each group
  size_t home_groups_ = 0;  // groups with all rows at home
};

// Hash tables in kPartitions independent partitions, by the hash of the id.
constexpr size_t kPartitions = 256;

class HashedDirectory final : public Directory {
 public:
  HashedDirectory() : partitions_(kPartitions) {}

  void locate(const int64_t* rows, size_t n, Entry* entries) const override {
    uint64_t hashes[kHashesAhead];
    const size_t first = std::min(n, kHashesAhead);
    for (size_t i = 0; i < first; ++i) {
      hashes[i] = mix_id(rows[i]);
      of(hashes[i]).prefetch(hashes[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      const uint64_t hash = hashes[i % kHashesAhead];
      if (i + kHashesAhead < n) {
        const uint64_t ahead = mix_id(rows[i + kHashesAhead]);
        of(ahead).prefetch(ahead);
        hashes[i % kHashesAhead] = ahead;
      }
      entries[i] = of(hash).find(rows[i], hash);
    }
  }
  void prefetch(int64_t row) const override {
    const uint64_t hash = mix_id(row);
    of(hash).prefetch(hash);
  }
  Entry find(int64_t row) const override {
    const uint64_t hash = mix_id(row);
    return of(hash).find(row, hash);
  }
  void set(int64_t row, Entry entry) override {
    const uint64_t hash = mix_id(row);
    Partition& partition = partitions_[hash % kPartitions];
    const size_t before = partition.bytes();
    const Entry old = partition.exchange(row, hash, entry);
    if (old == kAbsent && entry == kAbsent) return;
    changed();
    note(old, entry);
    table_bytes_ += partition.bytes() - before;
  }
  bool grows() const override { return true; }
  NewRows new_rows(const int64_t* rows, size_t n) const override {
    const std::vector<uint32_t> counts = per_partition(rows, n);
    NewRows found;
    for (size_t p = 0; p < kPartitions; ++p) {
      if (counts[p] > 0) found.emplace_back(p, counts[p]);
    }
    return found;
  }
  size_t bytes_after(const NewRows& coming) const override {
    size_t bytes = this->bytes();
    size_t largest = 0;  // one partition is copied while it grows
    for (const auto& [p, rows] : coming) {
      const size_t capacity = partitions_[p].capacity_after(rows);
      if (capacity == partitions_[p].capacity()) continue;
      bytes += (capacity - partitions_[p].capacity()) * kSlotBytes;
      largest = std::max(largest, partitions_[p].bytes());
    }
    return bytes + largest;
  }
  void reserve(const NewRows& coming) override {
    for (const auto& [p, rows] : coming) {
      const size_t before = partitions_[p].bytes();
      partitions_[p].grow(partitions_[p].count() + rows);
      table_bytes_ += partitions_[p].bytes() - before;
    }
  }
  size_t bytes() const override { return kPartitions * sizeof(Partition) + table_bytes_; }
  size_t bytes_for(uint64_t stored_rows) const override {
    return std::max(bytes(), hashed_directory_bytes(stored_rows));
  }
  void clear() override {
    changed();
    partitions_ = std::vector<Partition>(kPartitions);
    stored_rows_ = counted_rows_ = 0;
    table_bytes_ = 0;
  }

  size_t num_parts() const override { return kPartitions; }
  size_t part_of(int64_t row) const override { return mix_id(row) % kPartitions; }
  bool has_ranges() const override { return false; }
  void part(size_t part, std::vector<int64_t>* rows, std::vector<Entry>* entries) const override {
    partitions_[part].each([&](int64_t row, Entry entry) {
      if (entry == kAbsent) return;
      rows->push_back(row);
      entries->push_back(entry);
    });
  }
  void begin_bulk(uint64_t rows) override {
    changed();
    // Less than any partition will have, so that each ends with the slots that it had when its rows came one by one.
    const double even = static_cast<double>(rows) / kPartitions;
    const auto least = static_cast<size_t>(std::max(0.0, even - 6 * std::sqrt(even)));
    if (least > 0) {
      for (Partition& partition : partitions_) partition.grow(least);
    }
    bulk_locks_ = std::make_unique<LocalMutex[]>(kPartitions);
  }
  void bulk_exchange(const int64_t* rows, Entry* entries, size_t n) override {
    // By partition, so that each is locked once and its writes are close together. An index snapshot of a hashed
    // directory is in this order already.
    std::vector<uint32_t> ends = per_partition(rows, n);
    for (size_t p = 1; p < kPartitions; ++p) ends[p] += ends[p - 1];
    std::vector<uint32_t> order(n);
    for (size_t i = n; i-- > 0;) order[--ends[mix_id(rows[i]) % kPartitions]] = static_cast<uint32_t>(i);
    for (size_t at = 0; at < n;) {
      const size_t p = mix_id(rows[order[at]]) % kPartitions;
      const MutexLock guard(bulk_locks_[p]);
      for (; at < n; ++at) {
        const uint32_t i = order[at];
        const uint64_t hash = mix_id(rows[i]);
        if (hash % kPartitions != p) break;
        if (at + kHashesAhead < n) partitions_[p].prefetch(mix_id(rows[order[at + kHashesAhead]]));
        entries[i] = partitions_[p].exchange(rows[i], hash, entries[i]);
      }
    }
  }
  bool bulk_copy(int64_t, const std::byte*, size_t) override { return false; }
  void end_bulk(size_t rows, size_t counted) override {
    bulk_locks_.reset();
    stored_rows_ = rows;
    counted_rows_ = counted;
    table_bytes_ = 0;
    for (const Partition& partition : partitions_) table_bytes_ += partition.bytes();
  }

 private:
  static constexpr size_t kHashesAhead = 16;
  const Partition& of(uint64_t hash) const { return partitions_[hash % kPartitions]; }
  static std::vector<uint32_t> per_partition(const int64_t* rows, size_t n) {
    std::vector<uint32_t> counts(kPartitions, 0);
    for (size_t i = 0; i < n; ++i) ++counts[mix_id(rows[i]) % kPartitions];
    return counts;
  }

  std::vector<Partition> partitions_;
  size_t table_bytes_ = 0;
  struct LocalMutex : Mutex {
    LocalMutex() : Mutex(LockLevel::kLocal) {}
  };
  std::unique_ptr<LocalMutex[]> bulk_locks_;  // of partitions, while they are filled
};

}  // namespace

Directory::Directory() {
  static std::atomic<uint64_t> directories{0};
  version_ = ++directories << 40;
}

void add_new_rows(const Directory::NewRows& more, Directory::NewRows* to) {
  Directory::NewRows both;
  both.reserve(to->size() + more.size());
  std::merge(to->begin(), to->end(), more.begin(), more.end(), std::back_inserter(both));
  to->clear();
  for (const auto& [part, rows] : both) {
    if (to->empty() || to->back().first != part) {
      to->emplace_back(part, rows);
    } else {
      to->back().second += rows;
    }
  }
}

// A partition takes up to kGrowth times what its rows need and one slot, but kLeastSlots at least, and is copied while
// it grows. The chance of a partition that needs fewer slots than the least falls with its expected rows.
size_t hashed_directory_bytes(uint64_t stored_rows) {
  const double rows = static_cast<double>(stored_rows);
  const double even = rows / kPartitions;  // rows of a partition: binomially distributed
  const double used = std::min(rows, static_cast<double>(kPartitions));
  const double slots = rows / kMaxLoad * kGrowth + used * (1 + kLeastSlots * std::exp(-even / 5));
  const double largest =
      std::max<double>(kLeastSlots, std::min(rows, even + 6 * std::sqrt(even) + 6) / kMaxLoad * kGrowth + 1);
  const double bytes = (slots + largest) * kSlotBytes;
  return kPartitions * sizeof(Partition) + static_cast<size_t>(std::min(bytes, 0x1p60));
}

std::unique_ptr<Directory> make_flat_directory(uint64_t num_rows) { return std::make_unique<FlatDirectory>(num_rows); }
std::unique_ptr<Directory> make_hashed_directory() { return std::make_unique<HashedDirectory>(); }

std::vector<int64_t> absent_rows(const Directory& directory, const int64_t* rows, size_t n) {
  constexpr size_t kBlock = 256;
  std::vector<int64_t> absent;
  Entry entries[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    directory.locate(rows + begin, count, entries);
    for (size_t i = 0; i < count; ++i) {
      if (entries[i] == kAbsent) absent.push_back(rows[begin + i]);
    }
  }
  return absent;
}

}  // namespace bunkbed
