// Bytes on disk: segment headers, chunks, manifests. Mirrors FORMAT.md heading by heading; all integers are
// little-endian. No function here touches a file. Encoders turn structures into bytes. Decoders check magic, version,
// checksum and bounds before they return a number.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"

namespace bunkbed {

using Uuid = std::array<uint8_t, 16>;
using Bytes = std::vector<std::byte>;

inline constexpr uint32_t kFormatVersion = 1;

// ---- Records -------------------------------------------------------------------------------------------------
// payload bytes, then CRC-32C over (uuid, id, payload), then zeros up to the stride.

constexpr size_t record_stride(size_t payload_bytes) { return (payload_bytes + 4 + 7) / 8 * 8; }

// The part of a record's checksum that is the same for all records of a table.
uint32_t record_crc_seed(const Uuid& uuid);
uint32_t record_crc(uint32_t seed, int64_t id, const std::byte* payload, size_t payload_bytes);
void put_record_crc(uint32_t crc, std::byte* after_payload);
uint32_t get_record_crc(const std::byte* after_payload);

// ---- Segment header ------------------------------------------------------------------------------------------

struct SegmentHeader {
  Uuid uuid{};
  uint64_t segment = 0;
  uint64_t epoch = 0;
  uint64_t stride = 0;
};
inline constexpr size_t kSegmentHeaderBytes = 4096;
void encode_segment_header(const SegmentHeader& header, std::byte* out);  // writes kSegmentHeaderBytes
SegmentHeader decode_segment_header(std::span<const std::byte> bytes, const std::string& path);

// ---- Chunk ---------------------------------------------------------------------------------------------------
// [records at slots first_slot ..][ids int64[n]][versions uint64[n]][counts uint64[n]][zeros][trailer], ending on a
// block boundary. A chunk of kCount alone has the counts: directory entries of ids that steps have named and not
// stored.

enum class ChunkKind : uint32_t { kData = 1, kTombstone = 2, kCount = 3 };

struct ChunkTrailer {
  ChunkKind kind = ChunkKind::kData;
  uint64_t epoch = 0;
  uint64_t begin = 0;         // byte offset in the segment where the chunk's first block begins
  uint64_t end = 0;           // byte offset after the trailer
  uint64_t first_slot = 0;    // record number within the segment of the chunk's first record
  uint64_t index_offset = 0;  // byte offset of ids[0]
  uint32_t count = 0;         // records; for tombstones and counts: ids, without records
  uint32_t index_crc = 0;     // CRC-32C of the index: ids, versions and counts
  uint64_t index_bytes() const { return uint64_t{count} * (kind == ChunkKind::kCount ? 24 : 16); }
};
inline constexpr size_t kChunkTrailerBytes = 80;
void encode_chunk_trailer(const ChunkTrailer& trailer, const Uuid& uuid, uint64_t segment, std::byte* out);
// Checks everything that can be checked without the segment's other bytes. `end` is where the chunk must end.
ChunkTrailer decode_chunk_trailer(std::span<const std::byte> bytes, const Uuid& uuid, uint64_t segment, uint64_t end,
                                  uint64_t stride, uint64_t slots_per_segment, const std::string& path);
constexpr size_t chunk_index_bytes(size_t count) { return count * 16; }
constexpr size_t count_index_bytes(size_t count) { return count * 24; }

// ---- Manifest ------------------------------------------------------------------------------------------------

struct Field {
  std::string name;     // "weight", then the slots; reserved: scale
  uint8_t dtype = 0;    // DType; slots are all float32 or all bfloat16
  uint32_t length = 0;  // elements
  uint32_t offset = 0;  // bytes from the start of the payload
  bool operator==(const Field&) const = default;
};

// What a manifest gives as the dtype of the fields of a row's usage (record.h), which are no DType.
inline constexpr uint8_t kFieldInt64 = 3;
inline constexpr uint8_t kFieldUint32 = 4;

struct SegmentEntry {
  uint64_t segment = 0;
  uint64_t epoch = 0;
  uint64_t bytes = 0;  // committed length; bytes above it are discardable
};

// An index snapshot (directory_file.h): where rows were, so that opening need not read every chunk. At most one is
// written. Of several, the last one counts.
struct IndexSnapshotEntry {
  uint64_t file = 0;
  uint64_t bytes = 0;
};

// The table went back to commit `to` with commit `at`: the commits between them are no ancestors of later ones.
struct Rewind {
  uint64_t to = 0;
  uint64_t at = 0;
};

struct Manifest {
  uint64_t reader_flags = 0;  // an unknown one: refuse to open
  uint64_t writer_flags = 0;  // an unknown one: open read-only
  Uuid uuid{};
  uint64_t epoch = 0;
  uint64_t parent_epoch = 0;  // the epoch that this one was made from; of a rewind the one it went back to
  int64_t step = 0;
  uint64_t next_version = 1;
  uint64_t next_segment = 1;
  int64_t num_rows = -1;  // -1: any non-negative id
  uint32_t dim = 0;
  InitSpec init;
  OptimizerSpec optimizer;
  uint32_t shard_index = 0;
  uint32_t shard_count = 1;
  uint64_t payload_bytes = 0;
  uint64_t slots_per_segment = 0;
  uint64_t stored_rows = 0;
  std::vector<Field> fields;  // of floats; a table with rules of retention has the fields of usage after these
  std::vector<SegmentEntry> segments;
  std::vector<IndexSnapshotEntry> index_snapshots;
  std::string keep;  // name of the snapshot; empty: not kept
  std::string meta;  // the caller's JSON
  // ---- With kReaderFlagHistory; encode_manifest() sets the flag where there is one.
  uint64_t deletions_from = 0;  // the segments have every tombstone from this version on; 0: no row was ever deleted
  std::vector<Rewind> rewinds;  // ascending; those of very long ago may be joined
  // ---- With kReaderFlagRetention; encode_manifest() sets the flag where there is a rule.
  // `retention.admit` and `retention.admit_from` have flags of their own, kReaderFlagAdmission and kReaderFlagCounts.
  Retention retention;
  int64_t clock = 0;  // of the caller's events, -1 before it is set; 0 where the clock is the step
  // ---- With kReaderFlagCounts; encode_manifest() sets the flag where there is a rule or `has_counts`. The flag stays
  // when the rule goes, because the segments may have counts. The rule is `retention.admit_from`.
  bool has_counts = false;
  uint64_t counted_ids = 0;  // ids that have a count
  int64_t counts_since = 0;  // a count that was last raised before this time is none

  DType dtype() const { return static_cast<DType>(fields.at(0).dtype); }
};

// Reader flag: the slots are bfloat16.
inline constexpr uint64_t kReaderFlagNarrowSlots = 1;
// Reader flag: a scratch table, of which nothing is kept (scratch.h). Files that it leaves hold no row.
inline constexpr uint64_t kReaderFlagScratch = 2;
// Reader flag: the manifest has facts that the change feed needs, after `meta`.
inline constexpr uint64_t kReaderFlagHistory = 4;
// Reader flag: records have the usage of their rows, and the manifest has the rules by which rows go.
inline constexpr uint64_t kReaderFlagRetention = 8;
// Reader flag: the manifest has the probability with which a step stores a row. A release without the flag would store
// all.
inline constexpr uint64_t kReaderFlagAdmission = 16;
// Reader flag: segments have counts of ids that are not stored yet. A release without the flag would lose them.
inline constexpr uint64_t kReaderFlagCounts = 32;
// Writer flag: the table belongs to a run, which commits it with others.
inline constexpr uint64_t kWriterFlagRun = 1;
// Writer flag: a copy made this commit (copy.h). A writer's own commits do not have the flag.
inline constexpr uint64_t kWriterFlagCopy = 2;
inline constexpr uint64_t kKnownReaderFlags = kReaderFlagNarrowSlots | kReaderFlagScratch | kReaderFlagHistory |
                                              kReaderFlagRetention | kReaderFlagAdmission | kReaderFlagCounts;
inline constexpr uint64_t kKnownWriterFlags = kWriterFlagRun | kWriterFlagCopy;

bool has_narrow_slots(const std::vector<Field>& fields);

Bytes encode_manifest(const Manifest& manifest);
Manifest decode_manifest(std::span<const std::byte> bytes, const std::string& path);

// ---- File names ----------------------------------------------------------------------------------------------

std::string manifest_name(uint64_t epoch);   // manifest-0000000000000001
std::string segment_name(uint64_t segment);  // segment-0000000000000001
// Writes the number in such a name to `number`; returns false for a name of another kind.
bool parse_name(const std::string& name, const char* prefix, uint64_t* number);
inline constexpr const char* kLockName = "lock";
inline constexpr const char* kTemporaryPrefix = "new-";

}  // namespace bunkbed
