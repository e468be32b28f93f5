#include "cache/cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "base/error.h"

namespace bunkbed {

namespace {

constexpr uint32_t kNoFrame = ~0u;
constexpr size_t kHugePage = 2u << 20;
constexpr size_t kHugeInfosFrom = 1u << 30;   // bytes of records from which metadata gets huge pages
constexpr size_t kHugePagesFrom = 64u << 20;  // below, a half-used huge page would be a visible part of the budget

void* reserve(size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorKind::kMemory,
                "cannot reserve " + std::to_string(bytes) + " bytes of address space for the cache");
  }
  return memory;
}

// Frees whole pages of [from, end).
void give_back(std::byte* from, std::byte* end) {
  const auto begin = (reinterpret_cast<uintptr_t>(from) + 4095) / 4096 * 4096;
  const auto stop = reinterpret_cast<uintptr_t>(end) / 4096 * 4096;
  if (stop > begin) ::madvise(reinterpret_cast<void*>(begin), stop - begin, MADV_DONTNEED);
}

// The first set bit from `frame` on, or `end`.
uint32_t next_set(const uint64_t* words, uint32_t frame, uint32_t end) {
  if (frame >= end) return end;
  uint32_t word = frame / 64;
  for (uint64_t bits = words[word] >> frame % 64 << frame % 64;; bits = words[word]) {
    if (bits != 0) return std::min(end, word * 64 + static_cast<uint32_t>(std::countr_zero(bits)));
    if (++word * 64 >= end) return end;
  }
}

}  // namespace

Cache::Cache(size_t record_bytes, size_t max_frames)
    : stride_(padded_record(record_bytes)),
      max_frames_(std::min<size_t>(std::max<size_t>(1, max_frames), kNoFrame - 1)),
      capacity_(max_frames_),
      free_head_(kNoFrame),
      records_bytes_(std::max(kHugePage, (max_frames_ * stride_ + kHugePage - 1) / kHugePage * kHugePage)),
      infos_bytes_((max_frames_ * sizeof(FrameInfo) + 4095) / 4096 * 4096),
      heats_bytes_(((max_frames_ + kBlock) * sizeof(uint16_t) + 4095) / 4096 * 4096),
      dirty_bytes_((max_frames_ / 8 + sizeof(uint64_t) + 4095) / 4096 * 4096),
      ghosts_bytes_((max_frames_ + 4095) / 4096 * 4096) {
  records_ = static_cast<std::byte*>(reserve(records_bytes_));
  infos_ = static_cast<FrameInfo*>(reserve(infos_bytes_));
  heats_ = static_cast<uint16_t*>(reserve(heats_bytes_));
  dirty_ = static_cast<uint64_t*>(reserve(dirty_bytes_));
  frozen_ = static_cast<uint64_t*>(reserve(dirty_bytes_));
  ghosts_ = static_cast<uint8_t*>(reserve(ghosts_bytes_));
  if (record_bytes == 0) pins_ = static_cast<uint16_t*>(reserve(heats_bytes_));
#ifdef MADV_HUGEPAGE
  if (records_bytes_ >= kHugePagesFrom) ::madvise(records_, records_bytes_, MADV_HUGEPAGE);
  if (records_bytes_ >= kHugeInfosFrom || (stride_ == 0 && infos_bytes_ >= 2 * kHugePage)) {
    ::madvise(infos_, infos_bytes_, MADV_HUGEPAGE);
    ::madvise(heats_, heats_bytes_, MADV_HUGEPAGE);
    if (pins_ != nullptr) ::madvise(pins_, heats_bytes_, MADV_HUGEPAGE);
  }
#endif
}

Cache::~Cache() {
  ::munmap(records_, records_bytes_);
  ::munmap(infos_, infos_bytes_);
  ::munmap(heats_, heats_bytes_);
  if (pins_ != nullptr) ::munmap(pins_, heats_bytes_);
  ::munmap(dirty_, dirty_bytes_);
  ::munmap(frozen_, dirty_bytes_);
  ::munmap(ghosts_, ghosts_bytes_);
}

bool Cache::allocate(uint32_t* frame) {
  if (resident_ >= capacity_) return false;
  // Frames above a lowered capacity may still be in the free list: drop them.
  while (free_head_ != kNoFrame && free_head_ >= capacity_) {
    free_head_ = static_cast<uint32_t>(infos_[free_head_].position);
  }
  if (free_head_ != kNoFrame) {
    *frame = free_head_;
    free_head_ = static_cast<uint32_t>(infos_[free_head_].position);
  } else {
    if (high_water_ >= capacity_) return false;
    *frame = high_water_++;
  }
  ++resident_;
  infos_[*frame] = FrameInfo{-1, kNoPosition, kNoUse, 1, 0};
  set_dirty(*frame, false);
  heats_[*frame] = static_cast<uint16_t>(step_ << kStepShift);
  return true;
}

void Cache::admit(uint32_t frame, int64_t row) {
  infos_[frame].row = row;
  const Ghost ghost = ghost_of(row);
  if (*ghost.place == ghost.print) set_count(frame, kReturn);
}

// A row has one place, which a later evicted row overwrites. So ghosts fade after about one cache's worth of evictions.
// One row in 255 is taken for another, which costs only some room in the cache.
Cache::Ghost Cache::ghost_of(int64_t row) const {
  const uint64_t mixed = static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15ull;
  return {&ghosts_[static_cast<uint64_t>((static_cast<unsigned __int128>(mixed) * high_water_) >> 64)],
          static_cast<uint8_t>(1 + (mixed >> 16) % 255)};
}

void Cache::begin_step() {
  step_ = step_ % kSteps + 1;
  ++steps_;
  // Step numbers repeat: a frame must lose its number before that number is used again. No frame was wanted yet in the
  // step that begins, so every number in a heat is old.
  for (uint32_t left = high_water_ / (kSteps - 5) + 1; left > 0 && high_water_ > 0;) {
    if (sweep_ >= high_water_) sweep_ = 0;
    const uint32_t end = sweep_ + std::min(left, high_water_ - sweep_);
    left -= end - sweep_;
    for (; sweep_ < end; ++sweep_) heats_[sweep_] &= kStagedBit | kMaxCount;
  }
}

bool Cache::victim(uint32_t* frame, uint32_t keep_until) {
  // Where nearly every frame is wanted, the hand would walk far to each unwanted one.
  const size_t loose = resident_ - num_pinned_ - num_chosen_;
  const bool has_unwanted = loose - num_wanted_ > 0 && (loose - num_wanted_) * 16 >= loose;
  bool found = false;
  if (num_wanted_ > 0 && !has_unwanted) {
    found = lately_unwanted(frame) || furthest(frame, keep_until);
    if (!found && keep_until != kNoUse) return false;  // staging stops here: the rest is for calls that cannot wait
  }
  found = found || take_by_hand(frame) || (num_wanted_ > 0 && furthest(frame, keep_until));
  if (!found) return false;
  const Ghost ghost = ghost_of(infos_[*frame].row);
  *ghost.place = ghost.print;
  return true;
}

std::vector<uint32_t> Cache::victims(size_t n, uint32_t keep_until) {
  std::vector<uint32_t> chosen;
  chosen.reserve(n);
  for (uint32_t frame; chosen.size() < n && victim(&frame, keep_until);) {
    forget_use(frame);
    infos_[frame].pinned = 1;  // so that it is not chosen twice
    num_chosen_ = chosen.size() + 1;
    chosen.push_back(frame);
  }
  for (const uint32_t frame : chosen) infos_[frame].pinned = 0;
  num_chosen_ = 0;
  return chosen;
}

// Takes the first frame at zero that is neither pinned nor wanted; false after a round in which all frames were at zero
// and none was usable.
bool Cache::take_by_hand(uint32_t* frame) {
  constexpr size_t kAhead = 4;
  for (size_t in_vain = 0;; walk(&in_vain)) {
    while (next_candidate_ < num_candidates_) {
      // A dirty victim's record will be copied: prefetch it. (walk() has prefetched its FrameInfo.)
      if (const size_t ahead = next_candidate_ + kAhead; ahead < num_candidates_ && is_dirty(candidates_[ahead])) {
        const std::byte* record = this->record(candidates_[ahead]);
        for (size_t line = 0; line < stride_ && line < 1024; line += 64) __builtin_prefetch(record + line);
      }
      const uint32_t here = candidates_[next_candidate_++];
      // The frame may have changed since walk() found it.
      if (here >= high_water_ || count(here) > 0) continue;
      const FrameInfo& info = infos_[here];
      if (info.row < 0 || is_pinned(here) || is_wanted(here)) continue;
      if (++taken_ * 128 > high_water_) walked_ = taken_ = 0;
      *frame = here;
      return true;
    }
    if (in_vain >= high_water_) return false;
  }
}

// Moves the hand until it has passed some frames at zero, or a full round, and lowers the counts of the others.
// `in_vain` counts the frames passed since the last frame that was not at zero.
void Cache::walk(size_t* in_vain) {
  num_candidates_ = next_candidate_ = 0;
  // Counts may be too high when the hot rows change or nearly all rows are hot. So the decrement doubles with each
  // round in which the hand took less than a 128th of the frames.
  const auto less = static_cast<uint16_t>(1u << std::min<size_t>(walked_ / high_water_, 6));
  size_t passed = 0;
  while (num_candidates_ + kBlock <= kCandidates && passed < high_water_ && *in_vain < high_water_) {
    if (hand_ >= high_water_) hand_ = 0;
    // Whole blocks, without a branch. take_by_hand() rejects candidates above the high-water mark.
    uint16_t* heats = heats_ + hand_;
    uint32_t found = num_candidates_;
    for (uint32_t i = 0; i < kBlock; ++i) {
      candidates_[found] = hand_ + i;
      found += (heats[i] & kMaxCount) == 0;
    }
    for (uint32_t i = 0; i < kBlock; ++i) {
      const auto now = static_cast<uint16_t>(heats[i] & kMaxCount);
      heats[i] = static_cast<uint16_t>(heats[i] - (now < less ? now : less));
    }
    for (uint32_t i = num_candidates_; i < found; ++i) prefetch(candidates_[i]);
    *in_vain = found - num_candidates_ < kBlock ? 0 : *in_vain + kBlock;
    num_candidates_ = found;
    hand_ += kBlock;
    passed += kBlock;
  }
  walked_ += passed;
  frames_passed_ += passed;
}

bool Cache::lately_unwanted(uint32_t* frame) {
  while (!unwanted_.empty()) {
    const uint32_t last = unwanted_.back();
    unwanted_.pop_back();
    // trim() has freed the metadata of frames above the high-water mark.
    if (last >= high_water_ || infos_[last].row < 0 || is_pinned(last) || is_wanted(last)) continue;
    *frame = last;
    return true;
  }
  return false;
}

bool Cache::furthest(uint32_t* frame, uint32_t keep_until) {
  for (size_t i = uses_.size(); i > 0; --i) {
    const uint32_t batch = first_batch_ + static_cast<uint32_t>(i - 1);
    if (batch <= keep_until) return false;
    BlockVector<uint32_t>& frames = uses_[i - 1];
    for (size_t at = frames.size(); at > 0; --at) {
      const FrameInfo& info = infos_[frames[at - 1]];
      if (frames[at - 1] >= high_water_ || info.row < 0 || info.next_use != batch) {
        frames[at - 1] = frames.back();
        frames.pop_back();
      } else if (!is_pinned(frames[at - 1])) {
        *frame = frames[at - 1];
        return true;
      }
    }
  }
  return false;
}

void Cache::set_first_batch(uint32_t batch) {
  for (; first_batch_ < batch; ++first_batch_) {
    if (uses_.empty()) continue;
    constexpr size_t kAhead = 16;
    const BlockVector<uint32_t>& frames = uses_.front();
    for (size_t i = 0; i < frames.size(); ++i) {
      if (i + kAhead < frames.size()) prefetch(frames[i + kAhead]);
      if (frames[i] < high_water_ && infos_[frames[i]].next_use == first_batch_) forget_use(frames[i]);
    }
    uses_.pop_front();
  }
  if (num_wanted_ == 0) unwanted_ = BlockVector<uint32_t>();
}

void Cache::set_next_use(uint32_t frame, uint32_t batch) {
  if (infos_[frame].next_use == batch) return;
  forget_use(frame);
  if (batch < first_batch_) {
    set_unwanted(frame);
    return;
  }
  const size_t place = batch - first_batch_;
  if (uses_.size() <= place) uses_.resize(place + 1);
  uses_[place].push_back(frame);
  infos_[frame].next_use = batch;
  ++num_wanted_;
}

void Cache::forget_use(uint32_t frame) {
  num_wanted_ -= is_wanted(frame);
  infos_[frame].next_use = kNoUse;
}

size_t Cache::uses_bytes() const {
  size_t bytes = unwanted_.capacity() * sizeof(uint32_t);
  for (const auto& frames : uses_) bytes += frames.capacity() * sizeof(uint32_t);
  return bytes;
}

size_t Cache::freeze() {
  size_t count = 0;
  for (uint32_t word = 0; word * 64 < high_water_; ++word) {
    frozen_[word] = std::exchange(dirty_[word], 0);
    count += static_cast<size_t>(std::popcount(frozen_[word]));
  }
  return count;
}

uint32_t Cache::next_unwritten(uint32_t frame, bool is_frozen) const {
  return next_set(is_frozen ? frozen_ : dirty_, frame, high_water_);
}

void Cache::thaw() {
  for (uint32_t word = 0; word * 64 < high_water_; ++word) dirty_[word] |= std::exchange(frozen_[word], 0);
}

void Cache::release(uint32_t frame) {
  forget_use(frame);
  infos_[frame] = FrameInfo{-1, free_head_, kNoUse, 0, 0};
  set_dirty(frame, false);
  free_head_ = frame;
  --resident_;
}

void Cache::trim() {
  if (high_water_ <= capacity_) return;
  // Rebuild the free list without the frames above the capacity.
  free_head_ = kNoFrame;
  for (uint32_t frame = static_cast<uint32_t>(capacity_); frame-- > 0;) {
    if (infos_[frame].row < 0) {
      infos_[frame].position = free_head_;
      free_head_ = frame;
    }
  }
  give_back(record(static_cast<uint32_t>(capacity_)), record(high_water_));
  give_back(reinterpret_cast<std::byte*>(infos_ + capacity_), reinterpret_cast<std::byte*>(infos_ + high_water_));
  give_back(reinterpret_cast<std::byte*>(heats_ + capacity_), reinterpret_cast<std::byte*>(heats_ + high_water_));
  give_back(reinterpret_cast<std::byte*>(ghosts_ + capacity_), reinterpret_cast<std::byte*>(ghosts_ + high_water_));
  high_water_ = static_cast<uint32_t>(capacity_);
  hand_ = 0;
}

void Cache::clear() {
  give_back(records_, record(high_water_));
  give_back(reinterpret_cast<std::byte*>(infos_), reinterpret_cast<std::byte*>(infos_ + high_water_));
  give_back(reinterpret_cast<std::byte*>(heats_), reinterpret_cast<std::byte*>(heats_ + high_water_));
  give_back(reinterpret_cast<std::byte*>(ghosts_), reinterpret_cast<std::byte*>(ghosts_ + high_water_));
  give_back(reinterpret_cast<std::byte*>(dirty_), reinterpret_cast<std::byte*>(dirty_) + dirty_bytes_);
  if (pins_ != nullptr)
    give_back(reinterpret_cast<std::byte*>(pins_), reinterpret_cast<std::byte*>(pins_) + heats_bytes_);
  high_water_ = 0;
  hand_ = 0;
  num_candidates_ = next_candidate_ = 0;
  resident_ = 0;
  free_head_ = kNoFrame;
  num_wanted_ = num_pinned_ = 0;
  uses_.clear();
  unwanted_.clear();
}

}  // namespace bunkbed
