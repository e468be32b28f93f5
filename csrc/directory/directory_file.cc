#include "directory/directory_file.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"
#include "kernels/kernels.h"

namespace bunkbed {

namespace {

constexpr char kMagic[8] = {'B', 'B', 'E', 'D', 'D', 'I', 'R', '\n'};
constexpr size_t kHeaderUsed = 80;

uint64_t divide_up(uint64_t n, uint64_t unit) { return n / unit + (n % unit != 0); }

uint64_t segments_per_piece(const DirectoryHeader& header) {
  return (header.piece_bytes - kPieceHeadBytes) / header.segment_count_bytes();
}

uint32_t piece_crc(const DirectoryHeader& header, uint64_t index, const std::byte* piece) {
  const uint64_t place[2] = {header.number, index};
  const Kernels& k = kernels();
  return k.crc32c(k.crc32c(record_crc_seed(header.uuid), place, sizeof(place)), piece + 4, header.piece_bytes - 4);
}

}  // namespace

std::string directory_name(uint64_t number) {
  char text[64];
  std::snprintf(text, sizeof(text), "directory-%016" PRIu64, number);
  return text;
}

uint64_t DirectoryHeader::entries_per_piece() const {
  return (piece_bytes - kPieceHeadBytes) / (is_dense() ? kPackedEntryBytes : sizeof(int64_t) + kPackedEntryBytes);
}
uint64_t DirectoryHeader::segment_pieces() const {
  return form == DirectoryForm::kVoid ? 0 : divide_up(num_segments, segments_per_piece(*this));
}
uint64_t DirectoryHeader::entry_pieces() const {
  return form == DirectoryForm::kVoid ? 0 : divide_up(num_entries, entries_per_piece());
}
uint64_t DirectoryHeader::file_bytes() const {
  return kDirectoryHeaderBytes + (segment_pieces() + entry_pieces()) * piece_bytes;
}

void encode_directory_header(const DirectoryHeader& header, std::byte* out) {
  std::memset(out, 0, kDirectoryHeaderBytes);
  std::memcpy(out, kMagic, 8);
  store(out + 8, kFormatVersion);
  store(out + 12, static_cast<uint32_t>(header.form));
  std::memcpy(out + 16, header.uuid.data(), 16);
  store(out + 32, header.number);
  store(out + 40, header.replay_epoch);
  store(out + 48, header.piece_bytes);
  store(out + 56, header.num_segments);
  store(out + 64, header.num_entries);
  store(out + 72, header.num_rows);
  store(out + kHeaderUsed, kernels().crc32c(0, out, kHeaderUsed));
}

bool decode_directory_header(std::span<const std::byte> bytes, uint64_t file_bytes, const std::string& path,
                             DirectoryHeader* header) {
  const auto corrupt = [&path](const char* why) {
    throw Error(ErrorKind::kCorruption, "index snapshot " + path + " " + why);
  };
  if (bytes.size() < kDirectoryHeaderBytes || std::memcmp(bytes.data(), kMagic, 8) != 0) {
    corrupt("does not begin with its header");
  }
  if (load<uint32_t>(bytes.data() + kHeaderUsed) != kernels().crc32c(0, bytes.data(), kHeaderUsed)) {
    corrupt("has a header that fails its checksum");
  }
  if (load<uint32_t>(bytes.data() + 8) != kFormatVersion) return false;
  const auto form = load<uint32_t>(bytes.data() + 12);
  if (form > 3) return false;
  header->form = static_cast<DirectoryForm>(form);
  std::memcpy(header->uuid.data(), bytes.data() + 16, 16);
  header->number = load<uint64_t>(bytes.data() + 32);
  header->replay_epoch = load<uint64_t>(bytes.data() + 40);
  header->piece_bytes = load<uint64_t>(bytes.data() + 48);
  header->num_segments = load<uint64_t>(bytes.data() + 56);
  header->num_entries = load<uint64_t>(bytes.data() + 64);
  header->num_rows = load<uint64_t>(bytes.data() + 72);
  const bool sound = header->piece_bytes >= 4096 && header->piece_bytes % 4096 == 0 &&
                     header->piece_bytes <= kMaxPieceBytes &&
                     header->num_segments <= file_bytes / header->segment_count_bytes() &&
                     header->num_entries <= file_bytes / kPackedEntryBytes && header->num_rows <= header->num_entries &&
                     header->file_bytes() == file_bytes;
  if (!sound) corrupt("has a header whose numbers contradict each other or its length");
  return true;
}

void seal_piece(const DirectoryHeader& header, uint64_t index, uint32_t count, std::byte* piece) {
  store(piece + 4, count);
  store(piece + 8, index);
  store(piece, piece_crc(header, index, piece));
}

uint64_t count_of_piece(const DirectoryHeader& header, uint64_t index) {
  const uint64_t before = header.segment_pieces();
  if (index < before) {
    const uint64_t each = segments_per_piece(header);
    return std::min(each, header.num_segments - index * each);
  }
  const uint64_t each = header.entries_per_piece();
  return std::min(each, header.num_entries - (index - before) * each);
}

void check_piece(const DirectoryHeader& header, uint64_t index, const std::byte* piece, const std::string& path) {
  const std::string where = "index snapshot " + path + ": the piece at byte " +
                            std::to_string(kDirectoryHeaderBytes + index * header.piece_bytes);
  if (load<uint32_t>(piece) != piece_crc(header, index, piece)) {
    throw Error(ErrorKind::kCorruption, where + " fails its checksum");
  }
  if (load<uint32_t>(piece + 4) != count_of_piece(header, index) || load<uint64_t>(piece + 8) != index) {
    throw Error(ErrorKind::kCorruption, where + " holds another number of entries than its place asks for");
  }
}

}  // namespace bunkbed
