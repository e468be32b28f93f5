// Copies of records that change nothing in the cache.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/workers.h"
#include "store/store.h"

namespace bunkbed {

namespace {

constexpr size_t kFetchBlockBytes = 64u << 10;  // bytes that one thread copies at a time

}  // namespace

struct Store::Fetched {
  std::atomic<uint64_t> hits{0}, misses{0}, first_touches{0};
};

void Store::fetch_counted(const int64_t* rows, size_t n, size_t record_bytes, std::byte* records) {
  Fetched counts;
  fetch(rows, n, record_bytes, records, &counts);
  rows_.count_hits(counts.hits);
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

}  // namespace bunkbed
