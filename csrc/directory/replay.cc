#include "directory/replay.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/workers.h"
#include "directory/segment_finder.h"

namespace bunkbed {

namespace {

// What a chunk says of one id.
struct Found {
  int64_t id;
  uint64_t version;
  Entry entry;  // kAbsent: a tombstone, or a count that is not kept
};

constexpr size_t kBucketItems = 16'384;  // so many of them fit the processor's second-level cache
constexpr size_t kMostBuckets = 1024;
constexpr size_t kWorthThreads = 1u << 16;
constexpr size_t kAhead = 16;

// The newest of each id: open addressing.
class Newest {
 public:
  void clear(size_t expected) {
    slots_.assign(std::bit_ceil(std::max<size_t>(16, expected * 3 / 2)), kFree);
    used_ = 0;
  }
  void prefetch(int64_t id) const { __builtin_prefetch(&slots_[home(id)], 1); }
  void add(const Found& found) {
    if (used_ * 8 > slots_.size() * 7) grow();
    Found& slot = slots_[place(found.id)];
    used_ += slot.id < 0;
    if (slot.id < 0 || is_newer(found, slot)) slot = found;
  }
  template <typename Visit>
  void each(const Visit& visit) const {
    for (const Found& found : slots_) {
      if (found.id >= 0) visit(found);
    }
  }

 private:
  static constexpr Found kFree{-1, 0, kAbsent};
  bool is_newer(const Found& a, const Found& b) const {
    if (takes_last_) return a.entry > b.entry;
    return a.version != b.version ? a.version > b.version : a.entry < b.entry;
  }
  size_t home(int64_t id) const { return (mix_id(id) >> 20) & (slots_.size() - 1); }
  size_t place(int64_t id) const {
    size_t at = home(id);
    while (slots_[at].id >= 0 && slots_[at].id != id) at = (at + 1) & (slots_.size() - 1);
    return at;
  }
  void grow() {
    BlockVector<Found> old(slots_.size() * 2, kFree);
    std::swap(old, slots_);
    for (const Found& found : old) {
      if (found.id >= 0) slots_[place(found.id)] = found;
    }
  }

  BlockVector<Found> slots_;
  size_t used_ = 0;
  const bool takes_last_ = fault_is("replay_last_record");
};

// What one thread found, by bucket. Little more memory than its items take: blocks are divided into pieces, of which
// each bucket has a list.
class Buckets {
 public:
  static constexpr size_t kPieceItems = 128;
  // `items`: about how many all threads will add.
  Buckets(size_t num_buckets, size_t items)
      : block_pieces_(std::clamp<size_t>(items / kPieceItems / 4, 1, 128)), buckets_(num_buckets) {}
  size_t size() const { return buckets_.size(); }
  void add(size_t index, const Found& found) {
    Bucket& bucket = buckets_[index];
    if (bucket.used == kPieceItems) {
      bucket.pieces.push_back(new_piece());
      bucket.used = 0;
    }
    bucket.pieces.back()[bucket.used++] = found;
  }
  size_t count(size_t index) const {
    const Bucket& bucket = buckets_[index];
    return bucket.pieces.empty() ? 0 : (bucket.pieces.size() - 1) * kPieceItems + bucket.used;
  }
  // visit(items, n): some of the bucket's
  template <typename Visit>
  void each(size_t index, const Visit& visit) const {
    const Bucket& bucket = buckets_[index];
    for (size_t i = 0; i < bucket.pieces.size(); ++i) {
      visit(bucket.pieces[i], i + 1 < bucket.pieces.size() ? kPieceItems : bucket.used);
    }
  }

 private:
  struct Bucket {
    std::vector<Found*> pieces;
    size_t used = kPieceItems;  // items of the last piece
  };
  Found* new_piece() {
    if (pieces_left_ == 0) {
      blocks_.emplace_back(block_pieces_ * kPieceItems);
      pieces_left_ = block_pieces_;
    }
    return blocks_.back().data() + --pieces_left_ * kPieceItems;
  }

  const size_t block_pieces_;
  std::vector<Bucket> buckets_;
  std::vector<BlockVector<Found>> blocks_;
  size_t pieces_left_ = 0;  // of the last block
};

}  // namespace

struct Replay::Chunk {
  Segment* segment;
  const ChunkTrailer* trailer;
  uint64_t oldest_tombstone = ~uint64_t{0};
};

// One thread's buffers while indexes are read.
struct Replay::Reader {
  Reader(size_t num_buckets, size_t items) : buckets(num_buckets, items) {}
  Span span;
  std::vector<int64_t> ids;
  std::vector<uint64_t> versions, counts;
  Buckets buckets;
  uint64_t read_bytes = 0;
};

// One thread's memory while buckets are entered.
struct Replay::Writer {
  explicit Writer(const SegmentFinder& finder) : live(finder.num_segments(), 0) {}
  Newest newest;
  std::vector<int64_t> ids;
  std::vector<Entry> entries, before;
  std::vector<int64_t> live;  // what is added to each segment's live records
  uint64_t lost = 0;
  int64_t stored = 0, counted = 0;  // rows that get a position, or a count, less those that lose theirs
};

void check_index(const Segment& segment, const ChunkTrailer& chunk, const std::vector<int64_t>& ids,
                 const std::vector<uint64_t>& versions, const std::vector<uint64_t>& counts, int64_t num_rows,
                 uint64_t versions_end) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorKind::kCorruption, "segment " + segment.file->path() + ": the chunk at byte " +
                                            std::to_string(chunk.begin) + " holds " + what);
  };
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = ids[i];
    if (id < 0 || (num_rows >= 0 && id >= num_rows) || versions[i] == 0 || versions[i] >= versions_end) {
      refuse("id " + std::to_string(id) + " with version " + std::to_string(versions[i]) +
             ", which this commit cannot have");
    }
    if (!counts.empty() && !is_sound_count(counts[i])) refuse("a count of id " + std::to_string(id) + " that is none");
  }
}

std::vector<Replay::Chunk> Replay::find_chunks(const std::vector<Segment*>& segments, size_t threads) const {
  std::vector<std::vector<ChunkTrailer>> found(segments.size());
  std::vector<uint64_t> bytes(segments.size(), 0);
  const auto find = [&](size_t from, size_t to) {
    for (size_t i = from; i < to; ++i) {
      if (segments[i]->chunks.empty()) bytes[i] = log->reader().find_chunks(*segments[i], &found[i]);
    }
  };
  threads > 1 ? io_pool().run(segments.size(), 1, threads - 1, find) : find(0, segments.size());
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < segments.size(); ++i) {
    Segment* const segment = segments[i];
    log->reader().count_read_bytes(bytes[i]);
    if (segment->chunks.empty()) segment->chunks = std::move(found[i]);
    segment->records = segment->live = segment->tombstones = segment->counts = 0;
    segment->oldest_tombstone = ~uint64_t{0};
    for (const ChunkTrailer& chunk : segment->chunks) {
      (chunk.kind == ChunkKind::kData        ? segment->records
       : chunk.kind == ChunkKind::kTombstone ? segment->tombstones
                                             : segment->counts) += chunk.count;
      chunks.push_back({segment, &chunk});
    }
  }
  return chunks;
}

void Replay::read(Chunk* chunk, size_t pass, size_t passes, Reader* reader) const {
  Segment& segment = *chunk->segment;
  const ChunkTrailer& trailer = *chunk->trailer;
  if (trailer.kind == ChunkKind::kCount && !counts.are_kept) return;
  std::vector<int64_t>& ids = reader->ids;
  std::vector<uint64_t>& versions = reader->versions;
  reader->read_bytes += log->reader().fetch_span(segment, trailer.index_offset, trailer.index_bytes(), &reader->span);
  log->reader().read_index(segment, trailer, &reader->span, &ids, &versions, &reader->counts);
  check_index(segment, trailer, ids, versions, reader->counts, num_rows, versions_end);
  // Without a division for each id. Where there is one bucket, the directory need not have a part.
  const uint64_t scale =
      reader->buckets.size() == 1 ? 0 : (uint64_t{reader->buckets.size()} << 32) / directory->num_parts();
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = ids[i];
    if (passes > 1 && (mix_id(id) >> 8) % passes != pass) continue;
    Entry entry = kAbsent;
    if (trailer.kind == ChunkKind::kData) {
      entry = entry_of_position(log->position(segment.id, trailer.first_slot + i));
    } else if (trailer.kind == ChunkKind::kCount && counts.keeps(reader->counts[i])) {
      entry = reader->counts[i];
    }
    const size_t bucket = scale == 0 ? 0 : directory->part_of(id) * scale >> 32;
    reader->buckets.add(bucket, {id, versions[i], entry});
  }
  if (trailer.kind == ChunkKind::kTombstone && !versions.empty())
    chunk->oldest_tombstone = *std::min_element(versions.begin(), versions.end());
}

// Sets the entries of the ids, and leaves what these had in their place.
void Replay::enter(const Writer& writer, std::vector<Entry>* entries) const {
  const std::vector<int64_t>& ids = writer.ids;
  if (in_use == nullptr) return directory->bulk_exchange(ids.data(), entries->data(), ids.size());
  std::vector<int64_t> stored;
  for (size_t i = 0; i < ids.size(); ++i) {
    if ((*entries)[i] != kAbsent) stored.push_back(ids[i]);
  }
  in_use->reserve(stored.data(), stored.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const Entry before = directory->find(ids[i]);
    directory->set(ids[i], (*entries)[i]);
    (*entries)[i] = before;
  }
}

Replay::Result Replay::run(const std::vector<Segment*>& segments) const {
  // More threads than processors, because some wait for their reads.
  const size_t most_threads = 2 * num_threads();
  std::vector<Chunk> chunks = find_chunks(segments, segments.size() > 16 ? most_threads : 1);
  Result result;
  uint64_t largest = 1;
  for (const Chunk& chunk : chunks) {
    result.entries += chunk.trailer->count;
    largest = std::max<uint64_t>(largest, chunk.trailer->count);
  }
  const uint64_t total = result.entries;
  uint64_t passes = 1;
  while (passes < 4096 && (total / passes + total / passes / 8) * sizeof(Found) > scratch_bytes) ++passes;
  const size_t most_buckets = std::min(kMostBuckets, std::max<size_t>(directory->num_parts(), 1));
  const size_t num_buckets = std::clamp<size_t>(total / passes / kBucketItems, 1, most_buckets);
  const size_t reader_bytes = largest * (4 * sizeof(uint64_t)) + num_buckets * Buckets::kPieceItems / 2 * sizeof(Found);
  const size_t threads =
      total < kWorthThreads ? 1 : std::clamp<size_t>(scratch_bytes / 16 / reader_bytes, 1, most_threads);
  const SegmentFinder finder(*log);
  if (in_use == nullptr) directory->begin_bulk(directory->stored_rows());
  auto stored = static_cast<int64_t>(directory->stored_rows());
  auto counted = static_cast<int64_t>(directory->counted_rows());
  try {
    PerThread<Writer> writers([&] { return std::make_unique<Writer>(finder); });
    for (uint64_t pass = 0; pass < passes; ++pass) {
      PerThread<Reader> readers([&] { return std::make_unique<Reader>(num_buckets, total / passes); });
      const auto read_some = [&](size_t from, size_t to) {
        readers.with_one([&](Reader& reader) {
          for (size_t i = from; i < to; ++i) read(&chunks[i], pass, passes, &reader);
        });
      };
      threads > 1 ? io_pool().run(chunks.size(), 1, threads - 1, read_some) : read_some(0, chunks.size());
      const auto enter_some = [&](size_t from, size_t to) {
        writers.with_one([&](Writer& writer) {
          for (size_t bucket = from; bucket < to; ++bucket) enter_bucket(bucket, readers.all(), finder, &writer);
        });
      };
      in_use != nullptr ? enter_some(0, num_buckets) : parallel_for(num_buckets, 1, enter_some);
      for (const auto& reader : readers.all()) log->reader().count_read_bytes(reader->read_bytes);
    }
    for (const auto& writer : writers.all()) {
      size_t place = 0;
      for (const auto& [id, segment] : log->segments()) segment->live += static_cast<uint64_t>(writer->live[place++]);
      result.lost += writer->lost;
      stored += writer->stored;
      counted += writer->counted;
    }
  } catch (...) {
    if (in_use == nullptr) {
      directory->end_bulk(0, 0);
      directory->clear();
    }
    throw;
  }
  if (in_use == nullptr) directory->end_bulk(static_cast<size_t>(stored), static_cast<size_t>(counted));
  for (const Chunk& chunk : chunks)
    chunk.segment->oldest_tombstone = std::min(chunk.segment->oldest_tombstone, chunk.oldest_tombstone);
  return result;
}

// Enters the newest of each id of a bucket.
void Replay::enter_bucket(size_t bucket, const std::vector<std::unique_ptr<Reader>>& readers,
                          const SegmentFinder& finder, Writer* writer) const {
  size_t items = 0;
  for (const auto& reader : readers) items += reader->buckets.count(bucket);
  writer->newest.clear(std::min(items, kBucketItems));
  for (const auto& reader : readers) {
    reader->buckets.each(bucket, [&](const Found* found, size_t n) {
      for (size_t i = 0; i < n; ++i) {
        if (i + kAhead < n) writer->newest.prefetch(found[i + kAhead].id);
        writer->newest.add(found[i]);
      }
    });
  }
  writer->ids.clear();
  writer->entries.clear();
  writer->newest.each([&](const Found& found) {
    writer->ids.push_back(found.id);
    writer->entries.push_back(found.entry);
  });
  writer->before = writer->entries;
  enter(*writer, &writer->before);
  const auto count = [&](Entry entry, int64_t more) {
    writer->counted += is_count(entry) ? more : 0;
    if (!is_stored(entry)) return;
    writer->stored += more;
    uint64_t slot;
    const size_t place = finder.find(position_of(entry), &slot);
    place == SegmentFinder::kNone ? ++writer->lost : writer->live[place] += more;
  };
  for (size_t i = 0; i < writer->ids.size(); ++i) {
    count(writer->entries[i], 1);
    const Entry before = writer->before[i];
    if (in_use == nullptr) {
      count(before, -1);
    } else if (is_stored(before)) {
      in_use->give_up(before);
    }
  }
}

Replay::Result Replay::run_all() const {
  std::vector<Segment*> all;
  for (const auto& [id, segment] : log->segments()) all.push_back(segment.get());
  return run(all);
}

}  // namespace bunkbed
