// Index snapshots on disk (FORMAT.md, "Index snapshot"): a header block, then pieces of equal size, each
// with its own checksum, so that they can be read in any order, concurrently and in little memory. As in format.h these
// functions touch no file, and decoding checks every number before it is used.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "directory/directory.h"
#include "format/format.h"

namespace bunkbed {

enum class DirectoryForm : uint32_t {
  kVoid = 0,   // no entries: the directory is built from the segments alone (a repair writes it for a damaged file)
  kDense = 1,  // an entry for each row of the table, in order
  kPairs = 2,  // ids and entries of the rows that have one, in any order, no id twice
  kCountedPairs = 3,  // the same of a table with counts: entries may be counts, and segments may have some
};

struct DirectoryHeader {
  DirectoryForm form = DirectoryForm::kVoid;
  Uuid uuid{};
  uint64_t number = 0;        // of the file
  uint64_t replay_epoch = 0;  // segments of this epoch and later ones are to be replayed over it
  uint64_t piece_bytes = 0;
  uint64_t num_segments = 0;  // of earlier epochs; their counts come first
  uint64_t num_entries = 0;   // rows of the table (dense), or pairs
  uint64_t num_rows = 0;      // rows that have an entry

  bool is_dense() const { return form == DirectoryForm::kDense; }
  size_t segment_count_bytes() const { return form == DirectoryForm::kCountedPairs ? 24 : 16; }

  uint64_t segment_pieces() const;
  uint64_t entry_pieces() const;
  uint64_t file_bytes() const;  // of a file with such a header
  uint64_t entries_per_piece() const;
};

inline constexpr size_t kDirectoryHeaderBytes = 4096;
inline constexpr size_t kPieceHeadBytes = 16;
inline constexpr size_t kPackedEntryBytes = 5;
inline constexpr uint64_t kMaxPieceBytes = 1u << 20;

// The counts of a segment, so that its chunks need not be read.
struct SegmentCounts {
  uint64_t segment = 0;
  uint32_t records = 0;
  uint32_t tombstones = 0;
  uint32_t counts = 0;
};

std::string directory_name(uint64_t number);  // directory-0000000000000001

void encode_directory_header(const DirectoryHeader& header, std::byte* out);  // writes kDirectoryHeaderBytes
// Returns false for a format that this release does not know. `file_bytes`, the file's length, must match the header.
bool decode_directory_header(std::span<const std::byte> bytes, uint64_t file_bytes, const std::string& path,
                             DirectoryHeader* header);

// Writes checksum and count into the head of a piece. Its items follow the head; `index` counts pieces from 0.
void seal_piece(const DirectoryHeader& header, uint64_t index, uint32_t count, std::byte* piece);
// Verifies a piece; it then has count_of_piece() items.
void check_piece(const DirectoryHeader& header, uint64_t index, const std::byte* piece, const std::string& path);
uint64_t count_of_piece(const DirectoryHeader& header, uint64_t index);

inline Entry load_packed(const std::byte* at) {
  Entry entry = 0;
  __builtin_memcpy(&entry, at, kPackedEntryBytes);
  return entry;
}
inline void store_packed(std::byte* at, Entry entry) { __builtin_memcpy(at, &entry, kPackedEntryBytes); }

}  // namespace bunkbed
