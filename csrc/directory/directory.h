// Maps a row to the location of its record: absent (the row has its initial value), a frame of the cache, or a
// position in the log. An absent row of which steps were counted (format/admission.h) has its count. Two forms
// (docs/design/engine.md, rule 8): flat, about five bytes a row of the table, and hashed, about seventeen bytes a
// stored row. It grows one partition at a time, so that no step pays for a big rehash. A bounded directory has the form
// that takes fewer bytes, range by range of the rows.
//
// Writes need exclusive access. Concurrent locate() calls are safe while no thread writes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"

namespace bunkbed {

// Forty bits: 0 absent; below kCountBase: position + 1; below kFrameBase: count of a row that is absent, too; from
// there on: frame.
using Entry = uint64_t;
inline constexpr Entry kAbsent = 0;
inline constexpr Entry kCountBase = kMaxPosition + 2;
inline constexpr Entry kFrameBase = kCountBase + (1ull << 38);
constexpr bool is_frame(Entry entry) { return entry >= kFrameBase; }
constexpr bool is_position(Entry entry) { return entry != kAbsent && entry < kCountBase; }
constexpr bool is_count(Entry entry) { return entry >= kCountBase && entry < kFrameBase; }
constexpr bool is_stored(Entry entry) { return entry != kAbsent && !is_count(entry); }
constexpr uint32_t frame_of(Entry entry) { return static_cast<uint32_t>(entry - kFrameBase); }
constexpr uint64_t position_of(Entry entry) { return entry - 1; }
constexpr Entry entry_of_frame(uint32_t frame) { return kFrameBase + frame; }
constexpr Entry entry_of_position(uint64_t position) { return position + 1; }

// A count, from 1 to 127, has the time when it was last raised: its 26 highest binary digits. So times below 2^26 are
// exact; a later one is cut to less than a part in 2^25. The codes of times are in the order of the times.
constexpr uint64_t code_of_time(int64_t time) {
  const auto t = static_cast<uint64_t>(time);
  const int cut = std::max(0, static_cast<int>(std::bit_width(t)) - 26);
  return (static_cast<uint64_t>(cut) << 25) + (t >> cut);
}
constexpr Entry entry_of_count(uint32_t count, int64_t time) {
  return kCountBase + (uint64_t{count} << 31) + code_of_time(time);
}
constexpr uint32_t count_of(Entry entry) { return static_cast<uint32_t>((entry - kCountBase) >> 31); }
// The latest time that has the count's code.
constexpr int64_t time_of_count(Entry entry) {
  const uint64_t code = (entry - kCountBase) & ((uint64_t{1} << 31) - 1);
  const uint64_t cut = code < (uint64_t{1} << 26) ? 0 : (code >> 25) - 1;
  const uint64_t first = code - (cut << 25);
  return static_cast<int64_t>(((first + 1) << cut) - 1);
}
// The count of a row after one more step at this time. Its time does not go back, though the clock may.
constexpr Entry raised_count(Entry before, int64_t time) {
  constexpr uint64_t kCodes = uint64_t{1} << 31;
  if (!is_count(before)) return entry_of_count(1, time);
  const uint64_t code = std::max(code_of_time(time), (before - kCountBase) % kCodes);
  return kCountBase + (uint64_t{count_of(before)} + 1) * kCodes + code;
}
// Whether a file may have this entry as a count.
constexpr bool is_sound_count(Entry entry) {
  return is_count(entry) && count_of(entry) > 0 &&
         ((entry - kCountBase) & ((uint64_t{1} << 31) - 1)) < (uint64_t{39} << 25);
}
// Which counts a directory takes from files.
struct CountRule {
  bool are_kept = true;  // a reader takes none
  int64_t since = 0;     // a count that was last raised before this time is none
  bool keeps(Entry entry) const { return are_kept && time_of_count(entry) >= since; }
};

class Directory {
 public:
  virtual ~Directory() = default;
  // entries[i] = entry of rows[i]. Only this call accepts rows out of range; their entries are arbitrary.
  virtual void locate(const int64_t* rows, size_t n, Entry* entries) const = 0;
  virtual Entry find(int64_t row) const = 0;
  // For a call with this row that follows soon.
  virtual void prefetch(int64_t row) const = 0;
  // Sets the entry of a row; kAbsent erases it. A row that is new to a hashed directory requires reserve().
  virtual void set(int64_t row, Entry entry) = 0;
  // False when new rows take no memory.
  virtual bool grows() const = 0;
  // The number of new rows for each part, {part, rows}, ascending, without parts that get none.
  using NewRows = std::vector<std::pair<size_t, size_t>>;
  // Counts distinct rows that have no entry.
  virtual NewRows new_rows(const int64_t* rows, size_t n) const = 0;
  // Bytes that the directory takes during and after reserve() of these rows. The budget must allow them.
  virtual size_t bytes_after(const NewRows& coming) const = 0;
  // Makes room so that set() of these rows cannot fail.
  virtual void reserve(const NewRows& coming) = 0;
  virtual size_t bytes() const = 0;
  // The most bytes while it grows to so many stored rows; an upper estimate.
  virtual size_t bytes_for(uint64_t stored_rows) const = 0;
  virtual void clear() = 0;

  // ---- For a walk while the table changes. Each row belongs to one part, always the same. part() appends the rows of
  // a part that have an entry.
  virtual size_t num_parts() const = 0;
  virtual size_t part_of(int64_t row) const = 0;
  virtual void part(size_t part, std::vector<int64_t>* rows, std::vector<Entry>* entries) const = 0;
  // Whether each part is a range of rows, above that of the part before. In it the rows may have any order.
  virtual bool has_ranges() const { return true; }

  // ---- Filling a directory without frames, from several threads at once. No other call between begin_bulk() and
  // end_bulk(). Makes room for about `rows` rows.
  virtual void begin_bulk(uint64_t rows) = 0;
  // Sets positions, counts or kAbsent, and puts what the rows had in their place. Each row is in one call at a time.
  virtual void bulk_exchange(const int64_t* rows, Entry* entries, size_t n) = 0;
  // Copies the five-byte entries of the n rows from `first` on out of a dense index snapshot. Returns false and does
  // nothing where the directory has another layout.
  virtual bool bulk_copy(int64_t first, const std::byte* packed, size_t n) = 0;
  // `rows`, `counted`: how many rows have a position now, and a count.
  virtual void end_bulk(size_t rows, size_t counted) = 0;
  size_t stored_rows() const { return stored_rows_; }
  size_t counted_rows() const { return counted_rows_; }  // those with a count
  size_t num_entries() const { return stored_rows_ + counted_rows_; }
  // No entry changes while the version stays the same. No two directories of the process share a version.
  uint64_t version() const { return version_; }

 protected:
  Directory();
  void changed() { ++version_; }
  void note(Entry before, Entry after) {
    stored_rows_ += static_cast<size_t>(is_stored(after)) - static_cast<size_t>(is_stored(before));
    counted_rows_ += static_cast<size_t>(is_count(after)) - static_cast<size_t>(is_count(before));
  }
  size_t stored_rows_ = 0;
  size_t counted_rows_ = 0;

 private:
  uint64_t version_;
};

inline constexpr uint64_t kFlatGroupRows = 128;  // a flat directory has one more byte for each group of so many rows
constexpr size_t flat_directory_bytes(uint64_t num_rows) {
  return num_rows > (uint64_t{1} << 60) / 6 ? uint64_t{1} << 60 : num_rows * 5 + 8 + num_rows / kFlatGroupRows + 1;
}
// Adds the new rows of `more`, which are other ones.
void add_new_rows(const Directory::NewRows& more, Directory::NewRows* to);
size_t hashed_directory_bytes(uint64_t stored_rows);                      // an upper estimate
size_t bounded_directory_bytes(uint64_t num_rows, uint64_t stored_rows);  // the same, whichever rows are stored

std::unique_ptr<Directory> make_flat_directory(uint64_t num_rows);
std::unique_ptr<Directory> make_hashed_directory();
std::unique_ptr<Directory> make_bounded_directory(uint64_t num_rows);

// Those of `rows` that have no entry, in their order.
std::vector<int64_t> absent_rows(const Directory& directory, const int64_t* rows, size_t n);

// A well-mixed 64-bit hash of an id; also used to split work by id.
constexpr uint64_t mix_id(int64_t id) {
  auto x = static_cast<uint64_t>(id);
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  return x ^ (x >> 32);
}

// The cell of an id: a range of the hash. Victims of the cache are appended in the order of that hash, so the log keeps
// the rows of a cell together, whatever the number of cells (docs/design/engine.md, rule 25).
constexpr uint64_t cell_of(int64_t id, uint64_t num_cells) { return ((mix_id(id) >> 32) * num_cells) >> 32; }

}  // namespace bunkbed
