#include "fuzz/targets.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "directory/index_snapshot_file.h"
#include "format/format.h"
#include "fuzz/memory_vfs.h"
#include "kernels/kernels.h"
#include "maintenance/check.h"
#include "table/table.h"

namespace bunkbed::fuzz {

namespace {

void must(bool is_so) {
  if (!is_so) std::abort();
}

uint32_t crc(uint32_t seed, const std::byte* data, size_t n) { return kernels().crc32c(seed, data, n); }

void put(std::byte* at, uint64_t value, size_t bytes) { std::memcpy(at, &value, bytes); }

uint64_t get(const std::byte* at, size_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, at, bytes);
  return value;
}

Bytes bytes_of(const uint8_t* data, size_t size) {
  Bytes bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  return bytes;
}

// Bits of `mending`: 1 the checksum, 2 the stated length, 4 magic and version.
void mend_manifest(Bytes* bytes, int mending) {
  if (bytes->size() < 28) return;
  if (mending & 4) {
    std::memcpy(bytes->data(), "BBEDMAN\n", 8);
    put(bytes->data() + 8, kFormatVersion, 8);
  }
  if (mending & 2) put(bytes->data() + 16, bytes->size() - 28, 8);
  if (mending & 1) put(bytes->data() + bytes->size() - 4, crc(0, bytes->data(), bytes->size() - 4), 4);
}

// Bits of `mending`: 8 the header's checksum, 16 those of the trailer and its index.
void mend_segment(Bytes* bytes, int mending, const Uuid& uuid) {
  if ((mending & 8) && bytes->size() >= 60) put(bytes->data() + 56, crc(0, bytes->data(), 56), 4);
  if (!(mending & 16) || bytes->size() < kSegmentHeaderBytes + kChunkTrailerBytes) return;
  std::byte* const trailer = bytes->data() + bytes->size() - kChunkTrailerBytes;
  const uint64_t index = get(trailer + 56, 8);
  const uint64_t index_bytes = get(trailer + 12, 4) * 16;
  if (index <= bytes->size() && index_bytes <= bytes->size() - index) {
    put(trailer + 64, crc(0, bytes->data() + index, index_bytes), 4);
  }
  put(trailer + 76, crc(record_crc_seed(uuid), trailer, 76), 4);
}

}  // namespace

void manifest(const uint8_t* data, size_t size) {
  if (size < 1) return;
  Bytes bytes = bytes_of(data + 1, size - 1);
  mend_manifest(&bytes, data[0]);
  try {
    const Manifest found = decode_manifest(bytes, "m");
    // The next commit writes what was decoded and must read it again.
    const Bytes again = encode_manifest(found);
    must(encode_manifest(decode_manifest(again, "m")) == again);
    must(again.size() == bytes.size());
  } catch (const Error&) {
  }
}

void segment(const uint8_t* data, size_t size) {
  if (size < 1) return;
  const Uuid uuid{1, 2, 3};
  Bytes bytes = bytes_of(data + 1, size - 1);
  mend_segment(&bytes, data[0], uuid);
  uint64_t stride = 24;
  try {
    const SegmentHeader header =
        decode_segment_header({bytes.data(), std::min(bytes.size(), kSegmentHeaderBytes)}, "s");
    stride = std::clamp<uint64_t>(header.stride, 8, 1 << 20);
  } catch (const Error&) {
  }
  if (bytes.size() < kChunkTrailerBytes) return;
  try {
    const uint64_t end = bytes.size();
    const ChunkTrailer trailer = decode_chunk_trailer({bytes.data() + end - kChunkTrailerBytes, kChunkTrailerBytes},
                                                      uuid, 1, end, stride, 1 << 20, "s");
    // All bytes that it names are inside the chunk.
    must(trailer.begin < trailer.end && trailer.end == end);
    must(trailer.index_offset >= trailer.begin);
    must(trailer.index_offset + trailer.index_bytes() <= end - kChunkTrailerBytes);
    if (trailer.kind == ChunkKind::kData) {
      must(trailer.first_slot * stride >= trailer.begin);
      must((trailer.first_slot + trailer.count) * stride <= trailer.index_offset);
    }
  } catch (const Error&) {
  }
}

void directory(const uint8_t* data, size_t size) {
  if (size < 1) return;
  const int mending = data[0];
  Bytes file = bytes_of(data + 1, size - 1);
  // Bits: 1 the file's number, 2 the header's checksum, 4 the checksums of the pieces, 8 with 4 also their counts.
  DirectoryHeader header;
  if (file.size() >= kDirectoryHeaderBytes) {
    if (mending & 1) put(file.data() + 32, 1, 8);
    if (mending & 2) put(file.data() + 80, crc(0, file.data(), 80), 4);
    std::memcpy(header.uuid.data(), file.data() + 16, 16);
    try {
      if ((mending & 4) && decode_directory_header(file, file.size(), "d", &header) &&
          header.form != DirectoryForm::kVoid) {
        must(header.file_bytes() == file.size());
        for (uint64_t index = 0; index < header.segment_pieces() + header.entry_pieces(); ++index) {
          std::byte* const piece = file.data() + kDirectoryHeaderBytes + index * header.piece_bytes;
          const auto count = static_cast<uint32_t>((mending & 8) ? count_of_piece(header, index) : get(piece + 4, 4));
          seal_piece(header, index, count, piece);
        }
      }
    } catch (const Error&) {
    }
  }
  constexpr int64_t kRows = 40;
  const IndexSnapshotEntry entry{1, file.size()};
  MemoryVfs files;
  files.files["t/" + directory_name(1)] = std::move(file);
  LogMemory memory;
  memory.num_read_slices = 1;
  memory.num_chunks = 1;
  for (auto* const make :
       {make_flat_directory, make_bounded_directory, +[](uint64_t) { return make_hashed_directory(); }}) {
    const auto rows = make(kRows);
    const int64_t num_rows = rows->has_ranges() ? kRows : -1;
    try {
      Log log(files, "t", header.uuid, 16, 4096, memory);
      const LoadedIndexSnapshot loaded =
          load_index_snapshot(files, "t", entry, &log, rows.get(), num_rows, 1 << 16, 1 << 20);
      must(loaded.is_loaded || rows->stored_rows() == 0);
      must(loaded.lost == rows->stored_rows());  // there is no segment that an entry could name
    } catch (const Error&) {
    }
    try {
      verify_index_snapshot(files, "t", entry, header.uuid, num_rows, [](uint64_t) {});
    } catch (const Error&) {
    }
  }
}

void table(const uint8_t* data, size_t size) {
  if (size < 3) return;
  const int mending = data[0];
  const size_t manifest_bytes = std::min<size_t>(get(reinterpret_cast<const std::byte*>(data + 1), 2), size - 3);
  Bytes manifest_file = bytes_of(data + 3, manifest_bytes);
  Bytes segment_file = bytes_of(data + 3 + manifest_bytes, size - 3 - manifest_bytes);
  mend_manifest(&manifest_file, mending);
  Uuid uuid{};
  if (manifest_file.size() >= 56) std::memcpy(uuid.data(), manifest_file.data() + 40, 16);
  mend_segment(&segment_file, mending, uuid);
  // Tables with many or wide rows are slow and test no more of the parsers.
  try {
    const Manifest found = decode_manifest(manifest_file, "m");
    if (found.dim > 64 || found.num_rows > 1 << 16 || found.stored_rows > 1 << 16) return;
  } catch (const Error&) {
    return;
  }
  MemoryVfs files;
  files.files["t/" + manifest_name(1)] = std::move(manifest_file);
  files.files["t/" + segment_name(1)] = std::move(segment_file);
  try {
    OpenOptions options;
    options.writable = false;
    options.ram_bytes = 1 << 20;
    const auto opened = Table::open(files, "t", "t", options);
    std::vector<int64_t> ids;
    const int64_t rows = opened->spec().num_rows < 0 ? 40 : std::min<int64_t>(40, opened->spec().num_rows);
    for (int64_t id = 0; id < rows; ++id) ids.push_back(id);
    for (size_t field = 0; field < opened->fields().size(); ++field) {
      std::vector<float> values(ids.size() * opened->fields()[field].length);
      opened->get(ids.data(), ids.size(), field, values.data());
    }
  } catch (const Error&) {
  }
}

}  // namespace bunkbed::fuzz
