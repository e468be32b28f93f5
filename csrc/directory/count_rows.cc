#include "directory/count_rows.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "directory/directory.h"

namespace bunkbed {

namespace {

// Maps an id to its highest version and whether that is a tombstone's.
class Newest {
 public:
  static constexpr size_t kSlotBytes = 16;

  explicit Newest(size_t slots) : slots_(std::bit_ceil(std::max<size_t>(64, slots)), Slot{-1, 0}) {}

  bool has_room() const { return used_ * 4 < slots_.size() * 3; }

  void see(int64_t id, uint64_t version, bool is_tombstone) {
    size_t at = (mix_id(id) >> 20) & (slots_.size() - 1);
    while (slots_[at].id >= 0 && slots_[at].id != id) at = (at + 1) & (slots_.size() - 1);
    Slot& slot = slots_[at];
    used_ += slot.id < 0;
    if (slot.id >= 0 && slot.mark >> 1 >= version) return;
    slot = {id, version << 1 | (is_tombstone ? 1u : 0u)};
  }

  uint64_t rows() const {
    uint64_t found = 0;
    for (const Slot& slot : slots_) found += slot.id >= 0 && (slot.mark & 1) == 0;
    return found;
  }

 private:
  struct Slot {
    int64_t id;
    uint64_t mark;  // version, shifted by one; the lowest bit: a tombstone
  };
  BlockVector<Slot> slots_;
  size_t used_ = 0;
};

struct Part {
  Segment* segment;
  std::vector<ChunkTrailer> chunks;
};

// Calls see(id, version, is_tombstone) for everything in the log.
template <typename See>
void walk(Log* log, const std::vector<Part>& parts, int64_t num_rows, uint64_t versions_end,
          const std::function<void()>& at, const See& see) {
  std::vector<int64_t> ids;
  std::vector<uint64_t> versions;
  Span span;
  for (const Part& part : parts) {
    for (const ChunkTrailer& chunk : part.chunks) {
      log->reader().read_index(*part.segment, chunk, &span, &ids, &versions);
      for (size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] < 0 || (num_rows >= 0 && ids[i] >= num_rows) || versions[i] == 0 || versions[i] >= versions_end) {
          throw Error(ErrorKind::kCorruption, "segment " + part.segment->file->path() + ": the chunk at byte " +
                                                  std::to_string(chunk.begin) + " holds id " + std::to_string(ids[i]) +
                                                  " with version " + std::to_string(versions[i]) +
                                                  ", which this commit cannot have");
        }
        see(ids[i], versions[i], chunk.kind == ChunkKind::kTombstone);
      }
      at();
    }
  }
}

}  // namespace

uint64_t count_rows(Log* log, int64_t num_rows, uint64_t versions_end, size_t ram_bytes,
                    const std::function<void()>& at) {
  std::vector<Part> parts;
  uint64_t total = 0;
  bool has_tombstones = false;
  for (const auto& [id, segment] : log->segments()) {
    parts.push_back({segment.get(), log->reader().chunks(*segment)});
    for (const ChunkTrailer& chunk : parts.back().chunks) {
      if (chunk.kind == ChunkKind::kMapDelta) {
        throw Error(ErrorKind::kFormat, "segment " + segment->file->path() + " holds a chunk of a kind (MAPDELTA) " +
                                            "this release cannot read");
      }
      total += chunk.count;
      has_tombstones |= chunk.kind == ChunkKind::kTombstone;
    }
  }
  if (num_rows >= 0 && !has_tombstones && static_cast<uint64_t>(num_rows) / 8 <= ram_bytes) {
    BlockVector<uint64_t> seen(static_cast<size_t>(num_rows) / 64 + 1, 0);
    uint64_t rows = 0;
    walk(log, parts, num_rows, versions_end, at, [&](int64_t id, uint64_t, bool) {
      uint64_t& word = seen[static_cast<size_t>(id) / 64];
      const uint64_t bit = uint64_t{1} << (id % 64);
      rows += (word & bit) == 0;
      word |= bit;
    });
    return rows;
  }
  // The largest power of two of slots that fits; at most three quarters are used.
  const size_t most = std::bit_floor(std::max<size_t>(1024, ram_bytes / Newest::kSlotBytes));
  for (uint64_t passes = std::max<uint64_t>(1, total / (most / 2) + 1);; passes *= 2) {
    uint64_t rows = 0;
    bool overflowed = false;
    for (uint64_t pass = 0; pass < passes && !overflowed; ++pass) {
      Newest newest(std::min<uint64_t>(most, total / passes * 2 + 1024));
      walk(log, parts, num_rows, versions_end, at, [&](int64_t id, uint64_t version, bool is_tombstone) {
        if (overflowed || (passes > 1 && (mix_id(id) >> 8) % passes != pass)) return;
        overflowed = !newest.has_room();
        if (!overflowed) newest.see(id, version, is_tombstone);
      });
      rows += newest.rows();
    }
    if (!overflowed) return rows;  // the ids are spread unevenly: take smaller shares
  }
}

}  // namespace bunkbed
