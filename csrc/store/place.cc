// Locates and touches rows, and copies records: the calls of a training step whose rows are in RAM.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/workers.h"
#include "store/store.h"

namespace bunkbed {

namespace {

constexpr size_t kFetchBlockBytes = 64u << 10;  // bytes that one thread copies at a time

// Locates rows, prefetches their heats and passes each frame to `touch`, which returns whether to count a hit. Returns
// the number of hits. `located`, unless null, receives the entries of the rows without a frame.
template <typename Touch>
uint64_t locate_and_touch(const Directory& directory, const Cache& cache, const int64_t* rows, size_t n,
                          uint32_t* frames, Entry* located, const Touch& touch) {
  std::atomic<uint64_t> hits{0};
  parallel_for(n, kBlockRows, [&](size_t from, size_t to) {
    Entry entries[kBlockRows];
    uint64_t block_hits = 0;
    for (size_t begin = from; begin < to; begin += kBlockRows) {
      const size_t count = std::min(kBlockRows, to - begin);
      directory.locate(rows + begin, count, entries);
      for (size_t i = 0; i < count; ++i) {
        const bool resident = is_frame(entries[i]);
        frames[begin + i] = resident ? frame_of(entries[i]) : kNoFrame;
        if (resident) cache.prefetch_heat(frame_of(entries[i]));
      }
      for (size_t i = 0; i < count; ++i) {
        if (frames[begin + i] != kNoFrame) {
          block_hits += touch(frames[begin + i]);
        } else if (located != nullptr) {
          located[begin + i] = entries[i];
        }
      }
    }
    if (block_hits != 0) hits.fetch_add(block_hits, std::memory_order_relaxed);
  });
  return hits;
}

}  // namespace

uint64_t Store::touch_resident(const int64_t* rows, size_t n, uint32_t* frames, bool touch) {
  if (!touch) return touch_distinct(rows, n, frames, false);
  return locate_and_touch(*directory_, cache_, rows, n, frames, nullptr,
                          [this](uint32_t frame) { return cache_.touch(frame); });
}

// The rows are distinct, so no two threads touch the same frame.
uint64_t Store::touch_distinct(const int64_t* rows, size_t n, uint32_t* frames, bool touch, Entry* entries) {
  if (touch) begin_touches();
  return locate_and_touch(*directory_, cache_, rows, n, frames, entries,
                          [this, touch](uint32_t frame) { return touch && cache_.touch_alone(frame); });
}

struct Store::Fetched {
  std::atomic<uint64_t> hits{0}, misses{0}, first_touches{0};
};

void Store::fetch_counted(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records) {
  Fetched counts;
  fetch(rows, n, record_bytes, records, &counts);
  count_hits(counts.hits);
  stats_.misses += counts.misses;
  stats_.first_touches += counts.first_touches;
  stats_.unique_rows += counts.misses + counts.first_touches;
}

void Store::fetch(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records, Fetched* counts) {
  // Several threads copy the rows that need no read and note the positions of the others.
  constexpr size_t kAhead = 6;
  constexpr size_t kLines = 1024;  // the first bytes of a record, which are prefetched
  ArrayVector<uint64_t> positions(n);
  parallel_for(n, std::max<size_t>(16, kFetchBlockBytes / record_bytes), [&](size_t from, size_t to) {
    Entry entries[kBlockRows];
    uint64_t hits = 0, misses = 0, first_touches = 0;
    for (size_t begin = from; begin < to; begin += kBlockRows) {
      const size_t count = std::min(kBlockRows, to - begin);
      directory_->locate(rows + begin, count, entries);
      for (size_t i = 0; i < count; ++i) {
        if (counts != nullptr) {
          const bool in_ram = is_frame(entries[i]);
          hits += in_ram && !cache_.take_staged(frame_of(entries[i]));
          first_touches += entries[i] == kAbsent;
          misses += !in_ram && entries[i] != kAbsent;
        }
        if (i + kAhead < count && is_frame(entries[i + kAhead])) {
          const std::byte* const record = cache_.record(frame_of(entries[i + kAhead]));
          for (size_t at = 0; at < std::min(record_bytes, kLines); at += 64) __builtin_prefetch(record + at);
        }
        uint64_t position = kNoPosition;
        std::byte* const out = records + (begin + i) * record_bytes;
        if (entries[i] == kAbsent) {
          initial_(rows[begin + i], record_bytes, out);
        } else if (!is_frame(entries[i])) {
          position = position_of(entries[i]);
        } else if (record_bytes <= frame_bytes_) {
          std::memcpy(out, cache_.record(frame_of(entries[i])), record_bytes);
        } else {
          position = cache_.info(frame_of(entries[i])).position;  // a reader's frame is clean and has the weights only
        }
        positions[begin + i] = position;
      }
    }
    if (counts != nullptr) {
      counts->hits += hits;
      counts->misses += misses;
      counts->first_touches += first_touches;
    }
  });
  if (log_ == nullptr) return;
  std::vector<ReadRequest> requests;
  std::vector<size_t> places;  // indexes in `rows` of the rows to read from the log
  for (size_t i = 0; i < n; ++i) {
    if (positions[i] != kNoPosition) places.push_back(i);
  }
  if (places.empty()) return;
  // Each record is read once.
  std::sort(places.begin(), places.end(), [&](size_t a, size_t b) { return positions[a] < positions[b]; });
  for (size_t k = 0; k < places.size(); ++k) {
    const size_t i = places[k];
    if (k > 0 && positions[places[k - 1]] == positions[i]) continue;
    std::byte* const out = records + i * record_bytes;
    if (const std::byte* payload = log_->pending(positions[i])) {
      std::memcpy(out, payload, record_bytes);
    } else {
      requests.push_back({positions[i], rows[i], out});
    }
  }
  if (!requests.empty()) log_->reads().read(std::move(requests), record_bytes, nullptr);
  for (size_t k = 1; k < places.size(); ++k) {
    if (positions[places[k - 1]] != positions[places[k]]) continue;
    std::memcpy(records + places[k] * record_bytes, records + places[k - 1] * record_bytes, record_bytes);
  }
}

void Store::begin_touches() {
  const uint64_t step = cache_.step();
  if (unnoted_in_ == step) {
    for (const uint32_t frame : unnoted_) {
      if (frame != kNoFrame) cache_.touch_alone(frame);
    }
  }
  unnoted_in_ = 0;
  touches_begun_in_ = step;
}

// touch_distinct() of rows whose frames are known.
uint64_t Store::touch_frames(const uint32_t* frames, size_t n) {
  constexpr size_t kAhead = 16;
  begin_touches();
  std::atomic<uint64_t> hits{0};
  parallel_for(n, kBlockRows, [&](size_t from, size_t to) {
    uint64_t block_hits = 0;
    for (size_t i = from; i < to; ++i) {
      if (i + kAhead < to && frames[i + kAhead] != kNoFrame) cache_.prefetch_heat(frames[i + kAhead]);
      if (frames[i] != kNoFrame) block_hits += cache_.touch_alone(frames[i]);
    }
    hits.fetch_add(block_hits, std::memory_order_relaxed);
  });
  return hits;
}

bool Store::place(const Batch& batch, bool touch) {
  Batch::Placement& placement = batch.placement();
  const size_t n = batch.num_unique();
  const bool is_known = is_located(batch);
  if (is_known && (!touch || placement.step == cache_.step())) return placement.missing == 0;
  const bool notes = touch && (log_ != nullptr || touches_begun_in_ == cache_.step());
  uint64_t hits = 0;
  if (!is_known) {
    placement.frames.resize(n);
    placement.entries.resize(n);
    hits = touch_distinct(batch.unique().data(), n, placement.frames.data(), notes, placement.entries.data());
    placement.missing = static_cast<size_t>(std::count(placement.frames.begin(), placement.frames.end(), kNoFrame));
  } else if (notes) {
    hits = touch_frames(placement.frames.data(), n);
  }
  if (touch && !notes) {
    hits = n - placement.missing;
    touches_begun_in_ = unnoted_in_ = cache_.step();
    unnoted_ = placement.frames;
  }
  if (touch) count_hits(hits);
  placement.version = directory_->version();
  placement.step = touch ? cache_.step() : 0;
  return placement.missing == 0;
}

void Store::locate(const Batch& batch) {
  if (!is_located(batch)) place(batch, false);
}

bool Store::place_for_update(const Batch& batch) {
  if (!is_placed(batch)) return false;
  place(batch, true);
  write_frozen_frames(batch.placement().frames.data(), batch.num_unique());
  return true;
}

}  // namespace bunkbed
