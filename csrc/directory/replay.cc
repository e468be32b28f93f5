#include "directory/replay.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"

namespace bunkbed {

namespace {

// id -> highest version seen, open addressing; a tombstone's version counts like a record's.
class Versions {
 public:
  explicit Versions(size_t expected) : slots_(std::bit_ceil(std::max<size_t>(16, expected * 3 / 2)), Slot{-1, 0}) {}
  static size_t bytes_for(size_t expected) {
    return std::bit_ceil(std::max<size_t>(16, expected * 3 / 2)) * sizeof(Slot);
  }
  void prefetch(int64_t id) const { __builtin_prefetch(&slots_[(mix_id(id) >> 20) & (slots_.size() - 1)]); }
  // True when `version` is higher than any seen of this id.
  bool raise(int64_t id, uint64_t version) {
    if (used_ * 8 > slots_.size() * 7) grow();  // more ids than expected fell into this pass
    size_t at = place(id);
    if (slots_[at].id == id && slots_[at].version >= version) return false;
    used_ += slots_[at].id < 0;
    slots_[at] = {id, version};
    return true;
  }

 private:
  struct Slot {
    int64_t id;
    uint64_t version;
  };
  size_t place(int64_t id) const {
    size_t at = (mix_id(id) >> 20) & (slots_.size() - 1);
    while (slots_[at].id >= 0 && slots_[at].id != id) at = (at + 1) & (slots_.size() - 1);
    return at;
  }
  void grow() {
    BlockVector<Slot> old(slots_.size() * 2, Slot{-1, 0});
    std::swap(old, slots_);
    for (const Slot& slot : old) {
      if (slot.id >= 0) slots_[place(slot.id)] = slot;
    }
  }

  BlockVector<Slot> slots_;
  size_t used_ = 0;
};

}  // namespace

void refuse_count(const Segment& segment, const ChunkTrailer& chunk, int64_t id) {
  throw Error(ErrorKind::kCorruption, "segment " + segment.file->path() + ": the chunk at byte " +
                                          std::to_string(chunk.begin) + " holds a count of id " + std::to_string(id) +
                                          " that is none");
}

uint64_t Replay::run(const std::vector<Segment*>& segments) const {
  uint64_t total = 0;
  for (Segment* const segment : segments) {
    segment->records = 0;
    segment->live = 0;
    segment->tombstones = 0;
    segment->counts = 0;
    segment->oldest_tombstone = ~uint64_t{0};
    for (const ChunkTrailer& chunk : log->reader().chunks(*segment)) {
      total += chunk.count;
      if (chunk.kind == ChunkKind::kData) segment->records += chunk.count;
      if (chunk.kind == ChunkKind::kTombstone) segment->tombstones += chunk.count;
      if (chunk.kind == ChunkKind::kCount) segment->counts += chunk.count;
    }
  }
  uint64_t passes = 1;
  while (passes < 4096 && Versions::bytes_for(total / passes + total / passes / 8 + 64) > scratch_bytes) ++passes;

  std::vector<int64_t> ids;
  std::vector<uint64_t> versions, found;
  // The ids of a chunk that belong to this pass. locate() brings their entries into the processor's cache, a block at a
  // time, for find(). Its results are not used, because an id may occur twice.
  constexpr size_t kBlock = 256;
  std::vector<uint32_t> chosen;
  std::vector<int64_t> chosen_ids;
  Entry fetched[kBlock];
  Span span;
  for (uint64_t pass = 0; pass < passes; ++pass) {
    Versions newest(total / passes + total / passes / 8 + 64);
    for (Segment* const segment : segments) {
      for (const ChunkTrailer& chunk : segment->chunks) {
        if (chunk.kind == ChunkKind::kCount && !counts.are_kept) continue;
        log->reader().read_index(*segment, chunk, &span, &ids, &versions, &found);
        for (size_t i = 0; i < found.size(); ++i) {
          if (!is_sound_count(found[i])) refuse_count(*segment, chunk, ids[i]);
        }
        for (size_t i = 0; i < ids.size(); ++i) {
          const int64_t id = ids[i];
          if (id >= 0 && (num_rows < 0 || id < num_rows) && versions[i] != 0 && versions[i] < versions_end) continue;
          throw Error(ErrorKind::kCorruption, "segment " + segment->file->path() + ": the chunk at byte " +
                                                  std::to_string(chunk.begin) + " holds id " + std::to_string(id) +
                                                  " with version " + std::to_string(versions[i]) +
                                                  ", which this commit cannot have");
        }
        if (pass == 0 && chunk.kind == ChunkKind::kTombstone) {
          for (const uint64_t version : versions)
            segment->oldest_tombstone = std::min(segment->oldest_tombstone, version);
        }
        if (pass == 0 && reserve != nullptr && chunk.kind == ChunkKind::kData) reserve(ids.data(), ids.size());
        chosen.clear();
        chosen_ids.clear();
        for (size_t i = 0; i < ids.size(); ++i) {
          if (passes > 1 && (mix_id(ids[i]) >> 8) % passes != pass) continue;
          chosen.push_back(static_cast<uint32_t>(i));
          chosen_ids.push_back(ids[i]);
        }
        for (size_t k = 0; k < chosen.size(); ++k) {
          if (k % kBlock == 0) directory->locate(&chosen_ids[k], std::min(kBlock, chosen.size() - k), fetched);
          if (k + 16 < chosen.size()) newest.prefetch(chosen_ids[k + 16]);
          const size_t i = chosen[k];
          const int64_t id = ids[i];
          if (!newest.raise(id, versions[i]) && !fault_is("replay_last_record")) continue;
          const Entry before = directory->find(id);
          if (is_stored(before)) {
            if (give_up != nullptr) {
              give_up(before);
            } else {
              --log->segment_of(position_of(before)).live;
            }
          }
          if (chunk.kind != ChunkKind::kData) {
            const Entry after = chunk.kind == ChunkKind::kCount && counts.keeps(found[i]) ? found[i] : kAbsent;
            if (before != after) directory->set(id, after);
            continue;
          }
          directory->set(id, entry_of_position(log->position(segment->id, chunk.first_slot + i)));
          ++segment->live;
        }
      }
    }
  }
  return total;
}

uint64_t Replay::run_all() const {
  std::vector<Segment*> all;
  for (const auto& [id, segment] : log->segments()) all.push_back(segment.get());
  return run(all);
}

}  // namespace bunkbed
