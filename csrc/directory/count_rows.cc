#include "directory/count_rows.h"

#include <algorithm>
#include <bit>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "directory/directory.h"
#include "directory/replay.h"

namespace bunkbed {

namespace {

// What an id has: a record, or a tombstone or a count that is none, or a count.
enum class Has : uint64_t { kRecord = 0, kNothing = 1, kCount = 2 };

// Maps an id to its highest version and to what it has with that.
class Newest {
 public:
  static constexpr size_t kSlotBytes = 16;

  explicit Newest(size_t slots) : slots_(std::bit_ceil(std::max<size_t>(64, slots)), Slot{-1, 0}) {}

  bool has_room() const { return used_ * 4 < slots_.size() * 3; }

  void see(int64_t id, uint64_t version, Has has) {
    size_t at = (mix_id(id) >> 20) & (slots_.size() - 1);
    while (slots_[at].id >= 0 && slots_[at].id != id) at = (at + 1) & (slots_.size() - 1);
    Slot& slot = slots_[at];
    used_ += slot.id < 0;
    if (slot.id >= 0 && slot.mark >> 2 >= version) return;
    slot = {id, version << 2 | static_cast<uint64_t>(has)};
  }

  uint64_t num(Has has) const {
    const auto has_it = [has](const Slot& slot) {
      return slot.id >= 0 && (slot.mark & 3) == static_cast<uint64_t>(has);
    };
    return static_cast<uint64_t>(std::count_if(slots_.begin(), slots_.end(), has_it));
  }

 private:
  struct Slot {
    int64_t id;
    uint64_t mark;  // version, shifted by two; the lowest bits: Has
  };
  BlockVector<Slot> slots_;
  size_t used_ = 0;
};

struct Part {
  Segment* segment;
  std::vector<ChunkTrailer> chunks;
};

// Calls see(id, version, has, count) for everything in the log.
template <typename See>
void walk(Log* log, const std::vector<Part>& parts, int64_t num_rows, uint64_t versions_end, const CountRule& rule,
          const std::function<void()>& at, const See& see) {
  std::vector<int64_t> ids;
  std::vector<uint64_t> versions, counts;
  Span span;
  for (const Part& part : parts) {
    for (const ChunkTrailer& chunk : part.chunks) {
      log->reader().read_index(*part.segment, chunk, &span, &ids, &versions, &counts);
      check_index(*part.segment, chunk, ids, versions, counts, num_rows, versions_end);
      for (size_t i = 0; i < ids.size(); ++i) {
        const bool is_counted = !counts.empty() && rule.keeps(counts[i]);
        see(ids[i], versions[i],
            chunk.kind == ChunkKind::kData ? Has::kRecord
            : is_counted                   ? Has::kCount
                                           : Has::kNothing,
            counts.empty() ? kAbsent : counts[i]);
      }
      at();
    }
  }
}

}  // namespace

CountedRows count_rows(Log* log, int64_t num_rows, uint64_t versions_end, size_t ram_bytes, const CountRule& rule,
                       const std::function<void()>& at) {
  std::vector<Part> parts;
  uint64_t total = 0;
  bool has_others = false;
  for (const auto& [id, segment] : log->segments()) {
    parts.push_back({segment.get(), log->reader().chunks(*segment)});
    for (const ChunkTrailer& chunk : parts.back().chunks) {
      total += chunk.count;
      has_others |= chunk.kind != ChunkKind::kData;
    }
  }
  if (num_rows >= 0 && !has_others && static_cast<uint64_t>(num_rows) / 8 <= ram_bytes) {
    BlockVector<uint64_t> seen(static_cast<size_t>(num_rows) / 64 + 1, 0);
    uint64_t rows = 0;
    walk(log, parts, num_rows, versions_end, rule, at, [&](int64_t id, uint64_t, Has, Entry) {
      uint64_t& word = seen[static_cast<size_t>(id) / 64];
      const uint64_t bit = uint64_t{1} << (id % 64);
      rows += (word & bit) == 0;
      word |= bit;
    });
    return {rows, 0};
  }
  // The largest power of two of slots that fits; at most three quarters are used.
  const size_t most = std::bit_floor(std::max<size_t>(1024, ram_bytes / Newest::kSlotBytes));
  for (uint64_t passes = std::max<uint64_t>(1, total / (most / 2) + 1);; passes *= 2) {
    CountedRows found;
    bool overflowed = false;
    for (uint64_t pass = 0; pass < passes && !overflowed; ++pass) {
      Newest newest(std::min<uint64_t>(most, total / passes * 2 + 1024));
      walk(log, parts, num_rows, versions_end, rule, at, [&](int64_t id, uint64_t version, Has has, Entry) {
        if (overflowed || (passes > 1 && (mix_id(id) >> 8) % passes != pass)) return;
        overflowed = !newest.has_room();
        if (!overflowed) newest.see(id, version, has);
      });
      found.rows += newest.num(Has::kRecord);
      found.counted += newest.num(Has::kCount);
    }
    if (!overflowed) return found;  // the ids are spread unevenly: take smaller shares
  }
}

std::vector<std::pair<int64_t, Entry>> counts_in(Log* log, int64_t num_rows, uint64_t versions_end,
                                                 const CountRule& rule, uint64_t part, uint64_t parts) {
  const auto is_ours = [&](int64_t id) { return (mix_id(id) >> 8) % parts == part; };
  std::vector<Part> all, with_counts;
  for (const auto& [id, segment] : log->segments()) {
    all.push_back({segment.get(), log->reader().chunks(*segment)});
    with_counts.push_back({segment.get(), {}});
    std::copy_if(all.back().chunks.begin(), all.back().chunks.end(), std::back_inserter(with_counts.back().chunks),
                 [](const ChunkTrailer& chunk) { return chunk.kind == ChunkKind::kCount; });
  }
  struct Last {
    uint64_t version = 0;
    Entry count = kAbsent;
  };
  std::unordered_map<int64_t, Last> last;
  const auto none = [] {};
  walk(log, with_counts, num_rows, versions_end, rule, none, [&](int64_t id, uint64_t, Has, Entry) {
    if (is_ours(id)) last.try_emplace(id);
  });
  walk(log, all, num_rows, versions_end, rule, none, [&](int64_t id, uint64_t version, Has has, Entry count) {
    const auto found = is_ours(id) ? last.find(id) : last.end();
    if (found == last.end() || found->second.version >= version) return;
    found->second = {version, has == Has::kCount ? count : kAbsent};
  });
  std::vector<std::pair<int64_t, Entry>> counts;
  for (const auto& [id, one] : last) {
    if (one.count != kAbsent) counts.emplace_back(id, one.count);
  }
  std::sort(counts.begin(), counts.end());
  return counts;
}

}  // namespace bunkbed
