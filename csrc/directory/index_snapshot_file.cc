#include "directory/index_snapshot_file.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/workers.h"
#include "directory/segment_finder.h"

namespace bunkbed {

namespace {

std::string temporary_of(const std::string& directory, uint64_t number) {
  return directory + "/" + kTemporaryPrefix + directory_name(number);
}

// Gives the temporary file its final name. The name is durable on return.
void give_name(vfs::Vfs& vfs, const std::string& directory, uint64_t number) {
  const std::string temporary = temporary_of(directory, number);
  vfs.link(temporary, directory + "/" + directory_name(number));
  failpoint("index_snapshot.linked");
  vfs.sync_directory(directory);
  failpoint("index_snapshot.durable");
  try {
    vfs.remove(temporary);
  } catch (const Error&) {  // the next writer removes it
  }
}

}  // namespace

// ---- Writing

IndexSnapshotFile::IndexSnapshotFile(vfs::Vfs& vfs, const std::string& directory, const DirectoryHeader& header,
                                     const std::vector<SegmentCounts>& segments)
    : vfs_(vfs),
      directory_(directory),
      temporary_(temporary_of(directory, header.number)),
      header_(header),
      piece_(header.piece_bytes),
      capacity_(header.entries_per_piece()) {
  header_.num_segments = segments.size();
  header_.num_rows = 0;
  vfs_.remove(temporary_);
  file_ = vfs_.create(temporary_);
  try {
    write_segments(segments);
  } catch (...) {
    remove_temporary();
    throw;
  }
}

void IndexSnapshotFile::write_segments(const std::vector<SegmentCounts>& segments) {
  for (size_t from = 0; from < segments.size();) {
    const size_t count = count_of_piece(header_, piece_index_);
    std::memset(piece_.data(), 0, piece_.size());
    for (size_t i = 0; i < count; ++i) {
      std::byte* const at = piece_.data() + kPieceHeadBytes + i * header_.segment_count_bytes();
      std::memcpy(at, &segments[from + i].segment, 8);
      std::memcpy(at + 8, &segments[from + i].records, 4);
      std::memcpy(at + 12, &segments[from + i].tombstones, 4);
      if (header_.segment_count_bytes() > 16) std::memcpy(at + 16, &segments[from + i].counts, 4);
    }
    count_ = static_cast<uint32_t>(count);
    write_piece();
    from += count;
  }
}

IndexSnapshotFile::~IndexSnapshotFile() {
  if (file_ != nullptr) remove_temporary();
}

void IndexSnapshotFile::remove_temporary() {
  file_.reset();
  try {
    vfs_.remove(temporary_);
  } catch (const Error&) {  // the next writer removes it
  }
}

void IndexSnapshotFile::write_piece() {
  seal_piece(header_, piece_index_, count_, piece_.data());
  file_->write(piece_.data(), piece_.size(), kDirectoryHeaderBytes + piece_index_ * header_.piece_bytes);
  ++piece_index_;
  count_ = 0;
}

// Adds absent entries to a dense file, from next_row_ up to `before_row`.
void IndexSnapshotFile::add_absent(uint64_t before_row) {
  while (next_row_ < before_row) {
    if (count_ == 0) std::memset(piece_.data(), 0, piece_.size());
    const uint64_t n = std::min(before_row - next_row_, capacity_ - count_);
    count_ += static_cast<uint32_t>(n);
    next_row_ += n;
    if (count_ == capacity_) write_piece();
  }
}

void IndexSnapshotFile::add(const int64_t* rows, const Entry* entries, size_t n) {
  const bool is_dense = header_.is_dense();
  std::byte* const items = piece_.data() + kPieceHeadBytes;
  for (size_t i = 0; i < n; ++i) {
    if (is_dense) add_absent(static_cast<uint64_t>(rows[i]));
    if (count_ == 0) std::memset(piece_.data(), 0, piece_.size());
    if (is_dense) {
      store_packed(items + count_ * kPackedEntryBytes, entries[i]);
      ++next_row_;
    } else {
      // The ids of a full piece come first, its entries behind them. finish() closes the gap in the last piece.
      std::memcpy(items + count_ * sizeof(int64_t), &rows[i], sizeof(int64_t));
      store_packed(items + capacity_ * sizeof(int64_t) + count_ * kPackedEntryBytes, entries[i]);
      ++pairs_;
    }
    ++header_.num_rows;
    if (++count_ == capacity_) write_piece();
  }
}

IndexSnapshotEntry IndexSnapshotFile::finish() {
  if (header_.is_dense()) {
    add_absent(header_.num_entries);
  } else {
    header_.num_entries = pairs_;
  }
  if (count_ > 0) {
    if (!header_.is_dense()) {
      std::byte* const items = piece_.data() + kPieceHeadBytes;
      std::memmove(items + count_ * sizeof(int64_t), items + capacity_ * sizeof(int64_t), count_ * kPackedEntryBytes);
      const size_t used = kPieceHeadBytes + count_ * (sizeof(int64_t) + kPackedEntryBytes);
      std::memset(piece_.data() + used, 0, piece_.size() - used);
    }
    write_piece();
  }
  vfs::Buffer block(kDirectoryHeaderBytes);
  // Seeded bug for the torture tests: changes during the walk are not replayed.
  if (fault_is("index_snapshot_too_new")) ++header_.replay_epoch;
  encode_directory_header(header_, block.data());
  file_->write(block.data(), block.size(), 0);
  failpoint("index_snapshot.written");
  file_->sync();
  failpoint("index_snapshot.synced");
  give_name(vfs_, directory_, header_.number);
  file_.reset();
  return {header_.number, header_.file_bytes()};
}

void write_void_index_snapshot(vfs::Vfs& vfs, const std::string& directory, const Uuid& uuid, uint64_t number) {
  DirectoryHeader header;
  header.uuid = uuid;
  header.number = number;
  header.piece_bytes = 4096;
  vfs::Buffer block(kDirectoryHeaderBytes);
  encode_directory_header(header, block.data());
  vfs.remove(temporary_of(directory, number));
  {
    const auto file = vfs.create(temporary_of(directory, number));
    file->write(block.data(), block.size(), 0);
    file->sync();
  }
  vfs.remove(directory + "/" + directory_name(number));
  give_name(vfs, directory, number);
}

// ---- Reading

namespace {

// An open index snapshot: its verified header and its pieces.
class IndexSnapshotReader {
 public:
  IndexSnapshotReader(vfs::Vfs& vfs, const std::string& directory, const IndexSnapshotEntry& entry, const Uuid& uuid,
                      int64_t num_rows)
      : path_(directory + "/" + directory_name(entry.file)), file_(vfs.open(path_, true)) {
    const uint64_t bytes = file_->size();
    if (bytes < kDirectoryHeaderBytes) corrupt("is " + std::to_string(bytes) + " bytes long");
    vfs::Buffer block(kDirectoryHeaderBytes);
    file_->read(block.data(), block.size(), 0);
    is_known_ = decode_directory_header({block.data(), block.size()}, bytes, path_, &header_);
    if (!is_known_) return;
    if (header_.uuid != uuid || header_.number != entry.file) corrupt("belongs to another table or place");
    if (header_.form == DirectoryForm::kVoid) return;
    if (bytes != entry.bytes) {
      corrupt("is " + std::to_string(bytes) + " bytes long, the commit names " + std::to_string(entry.bytes));
    }
    if (header_.form == DirectoryForm::kDense &&
        (num_rows < 0 || header_.num_entries != static_cast<uint64_t>(num_rows))) {
      corrupt("is of a table with another number of rows");
    }
  }

  bool says_something() const { return is_known_ && header_.form != DirectoryForm::kVoid; }
  const DirectoryHeader& header() const { return header_; }
  uint64_t num_pieces() const { return header_.segment_pieces() + header_.entry_pieces(); }
  void read(uint64_t index, vfs::Buffer* piece) const {
    file_->read(piece->data(), header_.piece_bytes, kDirectoryHeaderBytes + index * header_.piece_bytes);
    check_piece(header_, index, piece->data(), path_);
  }
  [[noreturn]] void corrupt(const std::string& why) const {
    throw Error(ErrorKind::kCorruption, "index snapshot " + path_ + " " + why);
  }

  std::vector<SegmentCounts> segments() const {
    std::vector<SegmentCounts> found;
    vfs::Buffer piece(header_.piece_bytes);
    for (uint64_t index = 0; index < header_.segment_pieces(); ++index) {
      read(index, &piece);
      for (uint64_t i = 0; i < count_of_piece(header_, index); ++i) {
        const std::byte* const at = piece.data() + kPieceHeadBytes + i * header_.segment_count_bytes();
        SegmentCounts counts;
        std::memcpy(&counts.segment, at, 8);
        std::memcpy(&counts.records, at + 8, 4);
        std::memcpy(&counts.tombstones, at + 12, 4);
        if (header_.segment_count_bytes() > 16) std::memcpy(&counts.counts, at + 16, 4);
        if (!found.empty() && counts.segment <= found.back().segment) corrupt("names its segments out of order");
        found.push_back(counts);
      }
    }
    return found;
  }

 private:
  const std::string path_;
  const std::shared_ptr<vfs::File> file_;
  bool is_known_ = false;
  DirectoryHeader header_;
};

// The rows of a piece that have an entry, without counts that the rule does not keep.
struct Unpacked {
  BlockVector<int64_t> rows;
  BlockVector<Entry> entries;
  uint64_t left_out = 0;
  uint64_t counted = 0;

  void take(const IndexSnapshotReader& reader, uint64_t index, const std::byte* piece, int64_t num_rows,
            const CountRule& counts) {
    left_out = counted = 0;
    const DirectoryHeader& header = reader.header();
    const size_t n = count_of_piece(header, index);
    const std::byte* const items = piece + kPieceHeadBytes;
    rows.resize(n);
    entries.resize(n);
    size_t found = 0;
    if (header.form == DirectoryForm::kDense) {
      const uint64_t first = (index - header.segment_pieces()) * header.entries_per_piece();
      for (size_t i = 0; i < n; ++i) {
        rows[found] = static_cast<int64_t>(first + i);
        entries[found] = load_packed(items + i * kPackedEntryBytes);
        found += entries[found] != kAbsent;
      }
    } else {
      const uint64_t end = num_rows < 0 ? uint64_t{1} << 63 : static_cast<uint64_t>(num_rows);
      std::memcpy(rows.data(), items, n * sizeof(int64_t));
      for (size_t i = 0; i < n; ++i) {
        const Entry entry = load_packed(items + n * sizeof(int64_t) + i * kPackedEntryBytes);
        const bool is_sound =
            is_count(entry) ? header.form == DirectoryForm::kCountedPairs && is_sound_count(entry) : entry != kAbsent;
        if (static_cast<uint64_t>(rows[i]) >= end || !is_sound) {
          reader.corrupt("names id " + std::to_string(rows[i]) + ", which the table cannot have");
        }
        if (is_count(entry) && !counts.keeps(entry)) {
          ++left_out;
          continue;
        }
        counted += is_count(entry);
        rows[found] = rows[i];
        entries[found++] = entry;
      }
    }
    rows.resize(found);
    entries.resize(found);
  }
};

// Counts the entries into each segment of the log, and those into segments that are gone.
class LiveCounts {
 public:
  LiveCounts(const IndexSnapshotReader& reader, const Log& log) : reader_(reader), finder_(log) {
    for (const auto& [id, segment] : log.segments()) {
      ends_.push_back(segment->epoch < reader.header().replay_epoch ? segment->bytes / log.stride() : 0);
    }
    counts.assign(ends_.size(), 0);
  }

  void add(const Entry* entries, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      if (is_count(entries[i])) continue;
      if (!is_position(entries[i])) reader_.corrupt("holds an entry that is no record's number");
      const uint64_t position = position_of(entries[i]);
      uint64_t slot;
      const size_t found = finder_.find(position, &slot);
      if (found == SegmentFinder::kNone) {
        ++lost;
        continue;
      }
      if (slot >= ends_[found]) {
        reader_.corrupt("points at record " + std::to_string(position) + ", which the commit does not have");
      }
      ++counts[found];
    }
  }

  std::vector<uint64_t> counts;  // of the log's segments in order
  uint64_t lost = 0;

 private:
  const IndexSnapshotReader& reader_;
  const SegmentFinder finder_;
  std::vector<uint64_t> ends_;  // of each segment: the slots that an entry may name
};

// One thread's buffers and counts while it loads pieces.
struct Hand {
  Hand(const IndexSnapshotReader& reader, const Log& log) : piece(reader.header().piece_bytes), live(reader, log) {}
  vfs::Buffer piece;
  Unpacked unpacked;
  LiveCounts live;
  uint64_t rows = 0;
  uint64_t counted = 0;
  uint64_t left_out = 0;
};

struct Loaded {
  uint64_t rows = 0;  // with a position
  uint64_t counted = 0;
  uint64_t left_out = 0;  // counts that the rule does not keep
};

Loaded load_pieces(const IndexSnapshotReader& reader, Log* log, Directory* directory, int64_t num_rows,
                   size_t scratch_bytes, const CountRule& counts, LiveCounts* total) {
  PerThread<Hand> hands([&] { return std::make_unique<Hand>(reader, *log); });
  const auto load = [&](size_t i, Hand* hand) {
    const DirectoryHeader& header = reader.header();
    const uint64_t index = header.segment_pieces() + i;
    reader.read(index, &hand->piece);
    hand->unpacked.take(reader, index, hand->piece.data(), num_rows, counts);
    const BlockVector<int64_t>& ids = hand->unpacked.rows;
    BlockVector<Entry>& entries = hand->unpacked.entries;
    hand->live.add(entries.data(), entries.size());
    hand->rows += entries.size() - hand->unpacked.counted;
    hand->counted += hand->unpacked.counted;
    hand->left_out += hand->unpacked.left_out;
    const bool is_copied =
        header.is_dense() && directory->bulk_copy(static_cast<int64_t>(i * header.entries_per_piece()),
                                                  hand->piece.data() + kPieceHeadBytes, count_of_piece(header, index));
    if (is_copied) return;
    directory->bulk_exchange(ids.data(), entries.data(), ids.size());
    const bool is_new = std::all_of(entries.begin(), entries.end(), [](Entry before) { return before == kAbsent; });
    if (!is_new) reader.corrupt("names an id twice");
  };
  // More threads than processors, because some wait for their reads.
  const size_t hand_bytes = reader.header().piece_bytes * 8;
  const size_t threads = std::clamp<size_t>(scratch_bytes / hand_bytes, 1, 2 * num_threads());
  io_pool().run(reader.header().entry_pieces(), 1, threads - 1, [&](size_t from, size_t to) {
    hands.with_one([&](Hand& hand) {
      for (size_t i = from; i < to; ++i) load(i, &hand);
    });
  });
  Loaded loaded;
  for (const auto& hand : hands.all()) {
    for (size_t i = 0; i < hand->live.counts.size(); ++i) total->counts[i] += hand->live.counts[i];
    total->lost += hand->live.lost;
    loaded.rows += hand->rows;
    loaded.counted += hand->counted;
    loaded.left_out += hand->left_out;
  }
  return loaded;
}

}  // namespace

LoadedIndexSnapshot load_index_snapshot(vfs::Vfs& vfs, const std::string& directory, const IndexSnapshotEntry& entry,
                                        Log* log, Directory* rows, int64_t num_rows, uint64_t most_rows,
                                        size_t scratch_bytes, const CountRule& counts) {
  try {
    const IndexSnapshotReader reader(vfs, directory, entry, log->layout().uuid, num_rows);
    if (!reader.says_something()) return {};
    const DirectoryHeader& header = reader.header();
    if (header.form != DirectoryForm::kCountedPairs && header.num_rows > most_rows)
      reader.corrupt("holds more rows than the commit");
    const std::vector<SegmentCounts> segments = reader.segments();
    LiveCounts live(reader, *log);
    Loaded found;
    rows->begin_bulk(counts.are_kept ? header.num_rows : std::min(header.num_rows, most_rows));
    try {
      found = load_pieces(reader, log, rows, num_rows, scratch_bytes, counts, &live);
    } catch (...) {
      rows->end_bulk(0, 0);
      rows->clear();
      throw;
    }
    rows->end_bulk(found.rows, found.counted);
    if (found.rows + found.counted + found.left_out != header.num_rows)
      reader.corrupt("holds another number of rows than it says");
    size_t index = 0;
    auto known = segments.begin();
    for (const auto& [id, segment] : log->segments()) {
      const uint64_t count = live.counts[index++];
      if (segment->epoch >= header.replay_epoch) continue;
      while (known != segments.end() && known->segment < id) ++known;
      if (known == segments.end() || known->segment != id || known->records < count) {
        reader.corrupt("does not know segment " + std::to_string(id) + ", or less of it than it points at");
      }
      segment->records = known->records;
      segment->tombstones = known->tombstones;
      segment->counts = known->counts;
      segment->live = count;
    }
    return {true, header.replay_epoch, live.lost};
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kCorruption) throw;
    throw Error(ErrorKind::kCorruption, std::string(error.what()) +
                                            "; no row is lost by it: bunkbed check --repair builds the directory from "
                                            "the segments");
  }
}

void verify_index_snapshot(vfs::Vfs& vfs, const std::string& directory, const IndexSnapshotEntry& entry,
                           const Uuid& uuid, int64_t num_rows, const std::function<void(uint64_t)>& at) {
  const IndexSnapshotReader reader(vfs, directory, entry, uuid, num_rows);
  at(kDirectoryHeaderBytes);
  if (!reader.says_something()) return;
  (void)reader.segments();
  at(reader.header().segment_pieces() * reader.header().piece_bytes);
  vfs::Buffer piece(reader.header().piece_bytes);
  Unpacked unpacked;
  uint64_t rows = 0;
  for (uint64_t index = reader.header().segment_pieces(); index < reader.num_pieces(); ++index) {
    reader.read(index, &piece);
    unpacked.take(reader, index, piece.data(), num_rows, {});
    rows += unpacked.rows.size();
    at(reader.header().piece_bytes);
  }
  if (rows != reader.header().num_rows) reader.corrupt("holds another number of rows than it says");
}

}  // namespace bunkbed
