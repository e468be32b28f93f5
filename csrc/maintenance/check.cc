#include "maintenance/check.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <span>
#include <stdexcept>

#include "base/error.h"
#include "commit/cursors.h"
#include "commit/manifests.h"
#include "directory/index_snapshot_file.h"
#include "directory/count_rows.h"
#include "format/format.h"
#include "format/record.h"
#include "log/log.h"
#include "maintenance/ordered_work.h"

namespace bunkbed {

namespace {

constexpr size_t kPieceBytes = 1u << 20;
constexpr size_t kReadBytes = 2u << 20;    // several chunks are read at once, into one huge page
constexpr size_t kMaxRecordProblems = 20;  // listed for a segment; the rest is counted
// A thread either waits for a read or verifies its bytes: a few threads keep both the disk and two processors busy.
constexpr size_t kThreads = 4;
constexpr uint64_t kBytesWorthAThread = 16u << 20;

// Verifies one segment.
class SegmentCheck {
 public:
  SegmentCheck(Log* log, Segment* segment, const std::vector<uint64_t>& epochs, std::vector<Problem>* problems,
               ShardPlace place)
      : log_(log), segment_(segment), epochs_(epochs), problems_(problems), place_(place) {}

  void run(const std::function<void(uint64_t)>& at) {
    check_header();
    std::vector<ChunkTrailer> chunks;
    find_chunks(&chunks);
    uint64_t done = kSegmentHeaderBytes;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const ChunkTrailer& chunk = chunks[i];
      read_from({chunks.begin() + static_cast<ptrdiff_t>(i), chunks.end()});
      check_chunk(chunk, [&](uint64_t to) {
        at(to - done);
        done = to;
      });
      at(chunk.end - done);
      done = chunk.end;
    }
    at(segment_->bytes - done);
    if (damaged_records_ > kMaxRecordProblems) {
      report("record", -1,
             "segment " + segment_->file->path() + ": " + std::to_string(damaged_records_ - kMaxRecordProblems) +
                 " more records fail their checksums");
    }
  }

 private:
  void report(const char* kind, int64_t offset, const std::string& what) {
    problems_->push_back({kind, segment_name(segment_->id), offset, what,
                          std::string(kind) == "padding" ? std::vector<uint64_t>{} : epochs_});
  }

  // Bytes [begin, end) are unused and were written as zeros: another value is damage.
  void check_zeros(uint64_t begin, uint64_t end) {
    if (begin >= end || has_padding_) return;
    log_->reader().read_span(*segment_, begin, end - begin, &span_);
    const std::byte* const bytes = span_.memory.data() - span_.begin;
    const auto* const found = std::find_if(bytes + begin, bytes + end, [](std::byte b) { return b != std::byte{0}; });
    if (found == bytes + end) return;
    has_padding_ = true;  // one for each segment is enough
    report("padding", found - bytes,
           "segment " + segment_->file->path() + ": byte " + std::to_string(found - bytes) +
               ", which means nothing, is not zero as it was written");
  }

  // Log::adopt() has verified the header, but not the zeros behind it.
  void check_header() {
    try {
      check_zeros(60, kSegmentHeaderBytes);
    } catch (const Error& error) {
      report("segment", 0, error.what());
    }
  }

  // Walks backwards, as a reader does. Chunks before a damaged trailer cannot be found.
  void find_chunks(std::vector<ChunkTrailer>* chunks) {
    for (uint64_t end = segment_->bytes; end > kSegmentHeaderBytes;) {
      const uint64_t at = end - kChunkTrailerBytes;
      try {
        log_->reader().read_span(*segment_, at, kChunkTrailerBytes, &span_);
        chunks->push_back(decode_chunk_trailer({span_.memory.data() + (at - span_.begin), kChunkTrailerBytes},
                                               log_->layout().uuid, segment_->id, end, log_->stride(),
                                               log_->slots_per_segment(), segment_->file->path()));
        if (chunks->back().epoch != segment_->epoch) {
          report("chunk", static_cast<int64_t>(at),
                 "segment " + segment_->file->path() + ": a chunk of commit " + std::to_string(chunks->back().epoch) +
                     " in a segment of commit " + std::to_string(segment_->epoch));
        }
      } catch (const Error& error) {
        report("chunk", static_cast<int64_t>(at), error.what());
        break;
      }
      end = chunks->back().begin;
    }
    std::reverse(chunks->begin(), chunks->end());
  }

  // Reads the first of these chunks, and as many more as there is room for, unless it was read with one before. Where
  // that fails, the read of the part that cannot be read reports it.
  void read_from(std::span<const ChunkTrailer> chunks) {
    const uint64_t begin = chunks.front().begin;
    if (span_.segment == segment_->id && span_.begin <= begin && chunks.front().end <= span_.end) return;
    if (begin < unreadable_to_) return;
    uint64_t end = begin;
    for (const ChunkTrailer& chunk : chunks) {
      if (chunk.begin != end || chunk.end - begin > kReadBytes) break;
      end = chunk.end;
    }
    if (end == begin) return;
    const size_t room = std::min<uint64_t>(kReadBytes, segment_->bytes);
    if (span_.memory.size() < room) span_ = {.memory = vfs::Buffer(room)};
    try {
      log_->reader().read_span(*segment_, begin, end - begin, &span_);
    } catch (const Error&) {
      unreadable_to_ = end;
    }
  }

  template <typename At>
  void check_chunk(const ChunkTrailer& chunk, const At& at) {
    try {
      log_->reader().read_index(*segment_, chunk, &span_, &ids_, &versions_);
      check_zeros(chunk.index_offset + chunk.index_bytes(), chunk.end - kChunkTrailerBytes);
    } catch (const Error& error) {
      report("chunk", static_cast<int64_t>(chunk.index_offset), error.what());
      return;
    }
    if (chunk.kind != ChunkKind::kData) return;
    check_shard(chunk);
    const size_t piece = std::max<size_t>(1, kPieceBytes / log_->stride());
    for (size_t from = 0; from < ids_.size(); from += piece) {
      const size_t count = std::min(piece, ids_.size() - from);
      try {
        const std::byte* const records =
            log_->reader().read_records(*segment_, chunk, from, count, ids_.data(), &span_);
        check_record_padding(chunk, from, count, records);
      } catch (const Error&) {
        check_one_by_one(chunk, from, count);
      }
      at(std::min(chunk.end, (chunk.first_slot + from + count) * log_->stride()));
    }
    try {
      check_zeros(chunk.begin, chunk.first_slot * log_->stride());
    } catch (const Error& error) {
      report("chunk", static_cast<int64_t>(chunk.begin), error.what());
    }
  }

  // No lookup finds a row in another shard's directory, and the row's own shard may have it too.
  void check_shard(const ChunkTrailer& chunk) {
    const auto bad = std::find_if(ids_.begin(), ids_.end(), [this](int64_t id) { return !place_.owns(id); });
    if (bad == ids_.end() || has_misplaced_) return;
    has_misplaced_ = true;  // one for each segment is enough
    const uint64_t slot = chunk.first_slot + static_cast<uint64_t>(bad - ids_.begin());
    report("misplaced", static_cast<int64_t>(slot * log_->stride()),
           "segment " + segment_->file->path() + ": a record of id " + std::to_string(*bad) + ", which is shard " +
               std::to_string(shard_of(*bad, place_.shards)) + "'s, in shard " + std::to_string(place_.index));
  }

  void check_record_padding(const ChunkTrailer& chunk, size_t from, size_t count, const std::byte* records) {
    const size_t used = log_->layout().payload_bytes + 4;
    for (size_t i = 0; i < count && !has_padding_; ++i) {
      for (size_t byte = used; byte < log_->stride(); ++byte) {
        if (records[i * log_->stride() + byte] == std::byte{0}) continue;
        const uint64_t offset = (chunk.first_slot + from + i) * log_->stride() + byte;
        check_zeros(offset, offset + 1);
      }
    }
  }

  void check_one_by_one(const ChunkTrailer& chunk, size_t from, size_t count) {
    for (size_t i = from; i < from + count; ++i) {
      try {
        log_->reader().read_records(*segment_, chunk, i, 1, ids_.data(), &span_);
      } catch (const Error& error) {
        if (++damaged_records_ > kMaxRecordProblems) continue;
        report("record", static_cast<int64_t>((chunk.first_slot + i) * log_->stride()), error.what());
      }
    }
  }

  Log* log_;
  Segment* segment_;
  const std::vector<uint64_t>& epochs_;
  std::vector<Problem>* problems_;
  Span span_;
  std::vector<int64_t> ids_;
  std::vector<uint64_t> versions_;
  size_t damaged_records_ = 0;
  bool has_padding_ = false;
  uint64_t unreadable_to_ = 0;  // chunks before it are read one by one
  const ShardPlace place_;
  bool has_misplaced_ = false;
};

LogMemory small_memory() {
  LogMemory memory;
  memory.num_read_slices = 1;  // no check reads single records through them
  return memory;
}

class TableCheck {
 public:
  TableCheck(vfs::Vfs& vfs, const std::string& path, size_t ram_bytes, const CheckProgress& progress, ShardPlace place)
      : vfs_(vfs), path_(path), ram_bytes_(ram_bytes), progress_(progress), place_(place), manifests_(vfs, path) {}

  CheckedTable run() {
    load_manifests();
    check_segments();
    check_index_snapshots();
    count_rows();
    list_directory();
    for (const uint64_t epoch : result_.epochs) {
      if (!damaged_.contains(epoch)) result_.sound.push_back(epoch);
    }
    return std::move(result_);
  }

 private:
  void report(Problem problem) {
    damaged_.insert(problem.epochs.begin(), problem.epochs.end());
    result_.problems.push_back(std::move(problem));
  }

  // A writer may collect old commits meanwhile: problems of a commit without a manifest are no damage.
  bool is_gone(uint64_t epoch) { return !vfs_.exists(path_ + "/" + manifest_name(epoch)); }

  void load_manifests() {
    for (const uint64_t epoch : manifests_.epochs()) {
      try {
        loaded_.emplace(epoch, manifests_.load(epoch));
      } catch (const Error& error) {
        if (is_gone(epoch)) continue;
        report({"manifest", manifest_name(epoch), -1, error.what(), {epoch}});
      }
      result_.epochs.push_back(epoch);
    }
    if (loaded_.empty()) return;
    const Manifest& newest = loaded_.rbegin()->second;
    result_.belongs_to_run = (newest.writer_flags & kWriterFlagRun) != 0;
    for (auto entry = loaded_.begin(); entry != loaded_.end();) {
      const auto& [epoch, manifest] = *entry;
      const std::string commit = "commit " + std::to_string(epoch);
      if (manifest.uuid != newest.uuid || manifest.payload_bytes != newest.payload_bytes ||
          manifest.slots_per_segment != newest.slots_per_segment) {
        report({"foreign",
                manifest_name(epoch),
                -1,
                commit + " belongs to another table than commit " + std::to_string(newest.epoch),
                {epoch}});
        entry = loaded_.erase(entry);
        continue;
      }
      if (manifest.fields != record_fields(manifest.dim, manifest.dtype(), manifest.optimizer) ||
          manifest.payload_bytes != payload_of(manifest)) {
        report({"fields",
                manifest_name(epoch),
                -1,
                commit + ": its record holds fields this release does not know",
                {epoch}});
      }
      ++entry;
    }
  }

  struct Wanted {
    SegmentEntry entry;  // with the largest length that any commit names
    std::vector<uint64_t> epochs;
  };

  void check_segments() {
    for (const auto& [epoch, manifest] : loaded_) {
      for (const SegmentEntry& entry : manifest.segments) {
        const auto [found, is_new] = wanted_.try_emplace(entry.segment, Wanted{entry, {}});
        Wanted& wanted = found->second;
        wanted.epochs.push_back(epoch);
        wanted.entry.bytes = std::max(wanted.entry.bytes, entry.bytes);
        total_ += is_new ? entry.bytes : 0;
      }
    }
    for (const auto& [epoch, manifest] : loaded_) {
      for (const IndexSnapshotEntry& entry : manifest.index_snapshots) {
        const auto [found, is_new] = index_snapshots_.try_emplace(entry.file, NamedIndexSnapshot{entry, {}});
        found->second.epochs.push_back(epoch);
        if (is_new) total_ += entry.bytes;
      }
    }
    if (loaded_.empty()) return;
    std::vector<const Wanted*> segments;
    for (const auto& [number, wanted] : wanted_) segments.push_back(&wanted);
    std::vector<Found> found(segments.size());
    const auto verify = [&](size_t i, const std::function<void(uint64_t)>& at) {
      found[i] = verify_segment(*segments[i], at);
    };
    const auto take = [&](size_t i) {
      for (Problem& problem : found[i].problems) report(std::move(problem));
      found[i].problems.clear();
      if (found[i].cannot_open.empty()) return;
      std::vector<uint64_t> epochs;
      for (const uint64_t epoch : segments[i]->epochs) {
        if (!is_gone(epoch)) epochs.push_back(epoch);
      }
      const std::string name = segment_name(segments[i]->entry.segment);
      if (!epochs.empty()) report({"segment", name, -1, found[i].cannot_open, std::move(epochs)});
    };
    const size_t threads = std::min<uint64_t>({kThreads, segments.size(), total_ / kBytesWorthAThread});
    if (threads < 2) {
      for (size_t i = 0; i < segments.size(); ++i) {
        verify(i, [this](uint64_t bytes) { advance(bytes); });
        take(i);
      }
      return;
    }
    std::atomic<uint64_t> done{0};
    std::atomic<bool> stop{false};
    const auto work = [&](size_t i) {
      verify(i, [&](uint64_t bytes) {
        done += bytes;
        if (stop) throw std::runtime_error("the check was ended");  // not reported: work_in_order() has another error
      });
    };
    work_in_order(segments.size(), threads, &stop, work, take, [&] { advance(done - result_.bytes); });
    advance(done - result_.bytes);
  }

  // The problems of one segment, found by one thread.
  struct Found {
    std::string cannot_open;
    std::vector<Problem> problems;
  };
  // Calls `at` with numbers of bytes done; their sum is the segment's length.
  Found verify_segment(const Wanted& wanted, const std::function<void(uint64_t)>& at) const {
    Found found;
    const Manifest& newest = loaded_.rbegin()->second;
    uint64_t done = 0;
    Log log(vfs_, path_, newest.uuid, newest.payload_bytes, newest.slots_per_segment, small_memory());
    try {
      log.adopt({wanted.entry});
    } catch (const Error& error) {
      found.cannot_open = error.what();
    }
    if (found.cannot_open.empty()) {
      check_segment(
          &log, log.find_segment(wanted.entry.segment), wanted.epochs, &found.problems,
          [&](uint64_t bytes) {
            done += bytes;
            at(bytes);
          },
          place_);
    }
    at(wanted.entry.bytes - std::min(done, wanted.entry.bytes));
    return found;
  }

  struct NamedIndexSnapshot {
    IndexSnapshotEntry entry;
    std::vector<uint64_t> epochs;
  };

  void check_index_snapshots() {
    for (const auto& [number, named] : index_snapshots_) {
      const Manifest& manifest = loaded_.at(named.epochs.front());
      try {
        verify_index_snapshot(vfs_, path_, named.entry, manifest.uuid, manifest.num_rows,
                              [this](uint64_t bytes) { advance(bytes); });
      } catch (const Error& error) {
        std::vector<uint64_t> epochs;
        for (const uint64_t epoch : named.epochs) {
          if (!is_gone(epoch)) epochs.push_back(epoch);
        }
        // The segments have the same information, so these commits are sound. Opening them fails until a repair.
        if (!epochs.empty()) {
          result_.problems.push_back({"directory", directory_name(number), -1, error.what(), std::move(epochs)});
        }
      }
    }
  }

  void advance(uint64_t bytes) {
    result_.bytes += bytes;
    if (progress_) progress_(result_.bytes, total_);
  }

  void count_rows() {
    for (const auto& [epoch, manifest] : loaded_) {
      if (damaged_.contains(epoch)) continue;
      try {
        Log log(vfs_, path_, manifest.uuid, manifest.payload_bytes, manifest.slots_per_segment, small_memory());
        log.adopt(manifest.segments);
        const auto [rows, counted] = bunkbed::count_rows(&log, manifest.num_rows, manifest.next_version, ram_bytes_,
                                                         {.since = manifest.counts_since}, [this] { advance(0); });
        if (counted != manifest.counted_ids) {
          report({"rows",
                  manifest_name(epoch),
                  -1,
                  "commit " + std::to_string(epoch) + ": its segments hold counts of " + std::to_string(counted) +
                      " ids that are not stored, the manifest says " + std::to_string(manifest.counted_ids),
                  {epoch}});
        }
        if (rows != manifest.stored_rows) {
          report({"rows",
                  manifest_name(epoch),
                  -1,
                  "commit " + std::to_string(epoch) + ": its segments hold " + std::to_string(rows) +
                      " rows, it names " + std::to_string(manifest.stored_rows),
                  {epoch}});
        }
      } catch (const Error& error) {
        if (is_gone(epoch)) continue;
        report({"rows", manifest_name(epoch), -1, "commit " + std::to_string(epoch) + ": " + error.what(), {epoch}});
      }
    }
  }

  void list_directory() {
    // The files that an unreadable commit names are unknown: then no segment is listed as a leftover.
    const bool all_known = loaded_.size() == result_.epochs.size();
    for (const std::string& name : vfs_.list(path_)) {
      uint64_t number;
      if (name == kLockName || name.starts_with(kCursorPrefix) || parse_name(name, "manifest-", &number)) continue;
      const bool is_temporary = name.rfind(kTemporaryPrefix, 0) == 0;
      const bool is_segment = parse_name(name, "segment-", &number);
      const bool is_index_snapshot = parse_name(name, "directory-", &number);
      if (is_index_snapshot && (index_snapshots_.contains(number) || !all_known)) continue;
      if (!is_temporary && !is_segment && !is_index_snapshot) {
        result_.problems.push_back({"stranger", name, -1, "a file that is none of the table's: " + name, {}});
        continue;
      }
      uint64_t bytes = 0;
      try {
        bytes = vfs_.open(path_ + "/" + name, false)->size();
      } catch (const Error&) {
        continue;  // removed meanwhile, or reported above
      }
      if (is_temporary) {
        result_.leftovers.push_back({"temporary", name, bytes});
        continue;
      }
      if (is_index_snapshot) {
        result_.leftovers.push_back({"directory", name, bytes});
        continue;
      }
      const auto wanted = wanted_.find(number);
      if (wanted == wanted_.end()) {
        if (all_known) result_.leftovers.push_back({"segment", name, bytes});
      } else if (bytes > wanted->second.entry.bytes) {
        result_.leftovers.push_back({"tail", name, bytes - wanted->second.entry.bytes});
      }
    }
  }

  vfs::Vfs& vfs_;
  const std::string path_;
  const size_t ram_bytes_;
  const CheckProgress& progress_;
  const ShardPlace place_;
  const Manifests manifests_;
  std::map<uint64_t, Manifest> loaded_;
  std::map<uint64_t, Wanted> wanted_;
  std::map<uint64_t, NamedIndexSnapshot> index_snapshots_;
  std::set<uint64_t> damaged_;
  uint64_t total_ = 0;
  CheckedTable result_;
};

}  // namespace

void check_segment(Log* log, Segment* segment, const std::vector<uint64_t>& epochs, std::vector<Problem>* problems,
                   const std::function<void(uint64_t bytes)>& at, ShardPlace place) {
  SegmentCheck(log, segment, epochs, problems, place).run(at);
}

CheckedTable inspect_table(vfs::Vfs& vfs, const std::string& path, size_t ram_bytes, const CheckProgress& progress,
                           ShardPlace place) {
  return TableCheck(vfs, path, ram_bytes, progress, place).run();
}

std::vector<std::string> check_table(vfs::Vfs& vfs, const std::string& path) {
  std::vector<std::string> lines;
  for (const Problem& problem : inspect_table(vfs, path).problems) lines.push_back(problem.what);
  return lines;
}

}  // namespace bunkbed
