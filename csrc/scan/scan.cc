#include "scan/scan.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/fault.h"
#include "base/workers.h"
#include "format/record.h"
#include "table/parts.h"

namespace bunkbed {

namespace {

// Bytes to read ahead, as a number of chunk buffers: a 24th of the budget, at most 4 MiB. A reader's plan includes as
// much for chunks, which it never writes. A writer takes this memory in addition to its budget while it scans.
constexpr size_t kChunksAhead = 4;
// Also one for the chunk that the scan returns, and one for the chunk before it.
constexpr size_t kSpare = kChunksAhead + 2;
// Chunks of a table that was written with a smaller budget are smaller.
constexpr size_t kMaxReadsAhead = 32;
constexpr size_t kFramesAhead = 8;

}  // namespace

// A read of a chunk or of its index. Shared by the scan and the thread that reads.
struct Scan::ReadAhead {
  uint64_t segment = 0;
  uint64_t chunk = 0;  // the offset of the chunk
  uint64_t begin = 0;  // of the read
  uint64_t end = 0;
  std::shared_ptr<vfs::File> file;  // keeps the file open if compaction drops the segment meanwhile
  Span span;                        // used by the reading thread until is_over

  std::mutex mutex;  // guards is_over
  std::condition_variable over;
  bool is_over = false;

  void run() {
    span.segment = 0;
    try {
      if (span.memory.size() < end - begin) span.memory = vfs::Buffer(end - begin);
      file->read(span.memory.data(), end - begin, begin);
      span.segment = segment;
      span.begin = begin;
      span.end = end;
    } catch (...) {  // rule 4
    }
    file.reset();  // before is_over: the thread that waits may then destroy the file system
    const std::lock_guard guard(mutex);
    is_over = true;
    over.notify_all();
  }

  void wait() {
    std::unique_lock guard(mutex);
    over.wait(guard, [this] { return is_over; });
  }
};

Scan::Scan(Table* table, const std::vector<size_t>& fields)
    : parts_(*table->parts_), table_(parts_.state), owner_pid_(::getpid()) {
  for (const size_t field : fields) fields_.push_back(table_.field(field));
  const auto guard =
      parts_.device.lock_written_back([this]() NO_THREAD_SAFETY_ANALYSIS { return table_.lock.exclusive(); });
  table_.require_usable();
  changes_ = table_.changes;
  moves_ = table_.store->compactor().records_moved();
  // Whether frames have all wanted fields. A reader's frames have the weights alone.
  const size_t held = table_.store->frame_bytes();
  is_in_frames_ = fields_.empty() ? table_.payload_bytes <= held
                                  : std::all_of(fields_.begin(), fields_.end(),
                                                [&](const Field& f) { return f.offset + field_bytes(f) <= held; });
  Log* log = table_.store->log();
  if (log == nullptr) return;
  // The log now has every row's newest record and all frames are clean. So lookups during the scan append nothing:
  // evicting a clean frame moves no record.
  if (table_.options.writable) {
    table_.store->flush();
    table_.store->compaction().forgive();
    log->drain();
  }
  uint64_t bytes = 0;
  for (const auto& [id, segment] : log->segments()) {
    segments_.push_back(id);
    bytes += segment->bytes;
  }
  const size_t chunk_bytes = table_.store->plan().log.chunk_bytes;
  if (bytes > kSpare * chunk_bytes) spare_ = vfs::Buffer::side_by_side(kSpare, chunk_bytes);
}

Scan::~Scan() {
  if (owner_pid_ != ::getpid()) {
    // A forked child: the threads that read are the parent's, so these reads never end. They are leaked.
    for (auto& read : ahead_) new std::shared_ptr<ReadAhead>(std::move(read));
    return;
  }
  for (const auto& read : ahead_) read->wait();  // so that no file stays open after the scan
}

// Starts reads of the next chunks, as many as there is room for.
void Scan::read_ahead() {
  Log* const log = table_.store->log();
  const size_t most = kChunksAhead * table_.store->plan().log.chunk_bytes;
  size_t bytes = 0, reads = 0;
  const bool wants_index = is_in_frames_ && !table_.store->can_miss();
  for (size_t s = segment_; s < segments_.size(); ++s) {
    Segment* const segment = log->find_segment(segments_[s]);
    if (segment == nullptr || segment->live == 0) continue;
    const std::vector<ChunkTrailer>& chunks = s == segment_ ? chunks_ : log->reader().chunks(*segment);
    for (size_t c = s == segment_ ? chunk_ : 0; c < chunks.size(); ++c) {
      if (chunks[c].kind != ChunkKind::kData) continue;
      const uint64_t begin = wants_index ? vfs::round_down(chunks[c].index_offset, vfs::kBlockBytes) : chunks[c].begin;
      bytes += chunks[c].end - begin;
      if (bytes > most || ++reads > kMaxReadsAhead) return;
      const bool is_new = std::none_of(ahead_.begin(), ahead_.end(), [&](const auto& read) {
        return read->segment == segment->id && read->chunk == chunks[c].begin;
      });
      if (!is_new) continue;
      auto read = std::make_shared<ReadAhead>();
      if (!spare_.empty()) {
        read->span.memory = std::move(spare_.back());
        spare_.pop_back();
      }
      read->segment = segment->id;
      read->chunk = chunks[c].begin;
      read->begin = begin;
      read->end = chunks[c].end;
      read->file = segment->file;
      ahead_.push_back(read);
      try {
        io_pool().submit([read] { read->run(); });
      } catch (const std::exception&) {  // no thread can be started
        ahead_.pop_back();
        return;
      }
    }
  }
}

// Waits for the read ahead of this chunk, if there is one, and makes its bytes span_.
void Scan::take(const Segment& segment, const ChunkTrailer& chunk) {
  while (!ahead_.empty()) {
    const std::shared_ptr<ReadAhead> read = std::move(ahead_.front());
    ahead_.pop_front();
    read->wait();
    const bool is_it = read->segment == segment.id && read->chunk == chunk.begin;
    if (is_it && read->span.segment != 0) {
      std::swap(span_, read->span);
      table_.store->log()->reader().count_read_bytes(read->end - read->begin);
    }
    if (spare_.size() < kSpare && read->span.memory.size() > 0) spare_.push_back(std::move(read->span.memory));
    if (is_it) return;
  }
}

size_t Scan::next(size_t n, int64_t* ids, std::span<float* const> values) {
  size_t row = 0;
  return visit(n, [&](int64_t id, const std::byte* record) {
    ids[row] = id;
    for (size_t f = 0; f < fields_.size(); ++f) {
      read_field(fields_[f], record, values[f] + row * fields_[f].length);
    }
    ++row;
  });
}

size_t Scan::next_records(size_t n, int64_t* ids, std::byte* records) {
  const size_t bytes = table_.payload_bytes;
  if (!fields_.empty()) throw Error(ErrorKind::kInvalid, "a scan of some fields has no whole records");
  size_t row = 0;
  return visit(n, [&](int64_t id, const std::byte* record) {
    ids[row] = id;
    std::memcpy(records + row * bytes, record, bytes);
    ++row;
  });
}

size_t Scan::visit(size_t n, const Visit& visit) {
  const auto guard = table_.lock.exclusive(TableLock::Commits::kMayRun);
  table_.require_usable();
  if (table_.changes != changes_ && !fault_is("scan_misses_change")) {
    throw Error(ErrorKind::kBroken, "table '" + table_.name +
                                        "' was changed while it was scanned; finish the scan first, or collect the ids "
                                        "and change the rows afterwards");
  }
  Store& store = *table_.store;
  // Compares moved records, not started compactions, because many calls start compaction, even one that fails. The scan
  // would return a moved record twice or never.
  if (store.compactor().records_moved() != moves_ && !fault_is("scan_misses_change")) {
    throw Error(ErrorKind::kBroken,
                "table '" + table_.name +
                    "': compaction moved its records while it was scanned, which compact(), a commit "
                    "or an update next to the scan may ask for: finish the scan first, or scan again");
  }
  Cache& cache = store.cache();
  size_t found = 0;
  Log* log = store.log();
  if (log == nullptr) {
    for (; frame_ < cache.high_water() && found < n; ++frame_) {
      if (cache.info(frame_).row < 0) continue;
      visit(cache.info(frame_).row, cache.record(frame_));
      ++found;
    }
    return found;
  }
  const size_t buffer_bytes = store.plan().log.chunk_bytes;
  while (found < n && segment_ < segments_.size()) {
    Segment* segment = log->find_segment(segments_[segment_]);
    if (segment == nullptr || segment->live == 0) {
      ++segment_;
      continue;
    }
    if (!has_chunks_) {
      chunks_ = log->reader().chunks(*segment);
      has_chunks_ = true;
      chunk_ = record_ = 0;
      ids_.clear();
    }
    if (chunk_ == chunks_.size()) {
      has_chunks_ = false;
      ++segment_;
      continue;
    }
    const ChunkTrailer& chunk = chunks_[chunk_];
    if (chunk.kind != ChunkKind::kData) {
      ++chunk_;
      continue;
    }
    if (ids_.empty()) {
      read_ahead();
      take(*segment, chunk);
      log->reader().read_index(*segment, chunk, &span_, &ids_, &versions_);
    }
    const size_t count =
        std::min({n - found, std::max<size_t>(1, buffer_bytes / log->stride()), ids_.size() - record_});
    const std::byte* records = nullptr;
    entries_.resize(count);
    store.directory().locate(ids_.data() + record_, count, entries_.data());
    for (size_t i = record_; i < record_ + count; ++i) {
      const uint64_t place = log->position(segment->id, chunk.first_slot + i);
      const Entry entry = entries_[i - record_];
      if (const size_t coming = i - record_ + kFramesAhead;
          is_in_frames_ && coming < count && is_frame(entries_[coming])) {
        cache.prefetch_record(frame_of(entries_[coming]), store.frame_bytes());
      }
      if (is_frame(entry)) {
        const uint32_t frame = frame_of(entry);
        if (cache.info(frame).position != place) continue;
        if (is_in_frames_) {
          visit(ids_[i], cache.record(frame));
          ++found;
          continue;
        }
      } else if (!is_position(entry) || position_of(entry) != place) {
        continue;
      }
      if (records == nullptr)
        records = log->reader().read_records(*segment, chunk, record_, count, ids_.data(), &span_);
      visit(ids_[i], records + (i - record_) * log->stride());
      ++found;
    }
    record_ += count;
    if (record_ == ids_.size()) {
      ++chunk_;
      record_ = 0;
      ids_.clear();
    }
  }
  return found;
}

}  // namespace bunkbed
