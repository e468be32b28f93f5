#include "table/row_reader.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/fault.h"
#include "base/workers.h"
#include "batch/pieces.h"
#include "kernels/kernels.h"

namespace bunkbed {

void RowReader::lookup(const int64_t* ids, size_t n, bool touch, float* out) {
  auto guard = begin_lookup(ids, n, touch);
  table_.counts.ids += n;
  const size_t piece = table_.piece_ids();
  if (n <= piece) return lookup_piece(ids, n, touch, out);
  // Rows in RAM first, before any frame can be evicted. Then the others by cell, so that each piece reads its own
  // places of the log.
  table_.require_places(n);
  BlockVector<uint64_t>& is_missing = table_.scratch.is_missing;
  is_missing.assign(n / 64 + 1, 0);
  size_t num_missing = 0;
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t count = std::min(piece, n - begin);
    if (begin > 0 && fault_is("lookup_without_lock")) yield_lock(guard);
    const size_t found = copy_resident_ids(ids + begin, count, touch, out + begin * table_.spec.dim);
    for (size_t i = 0; i < found; ++i) {
      const size_t at = begin + table_.scratch.missing[i];
      is_missing[at / 64] |= uint64_t{1} << at % 64;
    }
    num_missing += found;
  }
  const size_t parts = table_.num_pieces(num_missing);
  for (size_t p = 0; num_missing > 0 && p < parts; ++p) {
    table_.scratch.missing.clear();
    for (size_t at = 0; at < n; ++at) {
      if ((is_missing[at / 64] >> at % 64 & 1) == 0 || cell_of(ids[at], parts) != p) continue;
      table_.scratch.missing.push_back(static_cast<uint32_t>(at));
      if (table_.scratch.missing.size() == piece) {  // an id that occurs very often
        lookup_missing_ids(ids, touch, out);
        table_.scratch.missing.clear();
      }
    }
    lookup_missing_ids(ids, touch, out);
    if (fault_is("lookup_without_lock")) yield_lock(guard);
  }
}

// A seeded bug for the stress: other calls come between two pieces of a lookup.
void RowReader::yield_lock(TableLock::Guard& guard) {
  guard.unlock();
  std::this_thread::yield();
  guard = table_.lock.work();
}

void RowReader::lookup(const Batch& batch, bool touch, float* out) {
  auto guard = table_.lock.work();
  table_.require_usable();
  table_.check_batch(batch);
  prefetcher_.wait_for_rows(guard, batch);
  count_lookup(batch.unique().data(), batch.num_unique(), touch);
  table_.counts.ids += batch.size();
  const bool all_resident = table_.store->rows().place(batch, touch);
  const uint32_t* const frames = batch.placement().frames.data();
  parallel_for(batch.size(), kBlockIds, [&](size_t from, size_t to) REQUIRES(table_.lock) {
    copy_resident(frames, batch.inverse().data() + from, {to - from, batch.size() - from},
                  out + from * table_.spec.dim);
  });
  if (!all_resident) lookup_missing(batch, frames, batch.placement().entries.data(), touch, out);
}

TableLock::Guard RowReader::begin_lookup(const int64_t* ids, size_t n, bool touch) {
  auto guard = table_.lock.work();
  table_.require_usable();
  table_.check_ids(ids, n);
  prefetcher_.wait_for_rows(guard, ids, n);
  count_lookup(ids, n, touch);
  return guard;
}

// Called after all that may release the lock.
void RowReader::count_lookup(const int64_t* rows, size_t n, bool touch) {
  device_.check_not_held(rows, n);
  ++table_.counts.lookups;
  // A reader makes no updates, which end steps, so each lookup is a step. A row counts once in each step.
  if (touch && !table_.options.writable) table_.store->rows().begin_step();
}

// Copies the rows in RAM. Notes the places of the others in scratch.missing and returns their number.
size_t RowReader::copy_resident_ids(const int64_t* ids, size_t n, bool touch, float* out) {
  table_.scratch.missing.resize(n);
  const size_t blocks = (n + kBlockIds - 1) / kBlockIds;
  table_.scratch.missing_counts.assign(blocks, 0);
  std::atomic<uint64_t> hits{0};
  if (touch) table_.store->rows().begin_touches();
  parallel_for(n, kBlockIds, [&](size_t from, size_t to) REQUIRES(table_.lock) {
    uint32_t frames[kBlockIds];
    uint64_t block_hits = 0;
    for (size_t begin = from; begin < to; begin += kBlockIds) {
      const size_t count = std::min(kBlockIds, to - begin);
      block_hits += table_.store->rows().touch_resident(ids + begin, count, frames, touch);
      copy_resident(frames, nullptr, {count, count}, out + begin * table_.spec.dim);
      uint32_t missing = 0;
      for (size_t i = 0; i < count; ++i) {
        if (frames[i] == kNoFrame) table_.scratch.missing[begin + missing++] = static_cast<uint32_t>(begin + i);
      }
      table_.scratch.missing_counts[begin / kBlockIds] = missing;
    }
    if (block_hits != 0) hits.fetch_add(block_hits, std::memory_order_relaxed);
  });
  if (touch) table_.store->rows().count_hits(hits);
  size_t num_missing = 0;
  for (size_t block = 0; block < blocks; ++block) {
    for (uint32_t i = 0; i < table_.scratch.missing_counts[block]; ++i)
      table_.scratch.missing[num_missing++] = table_.scratch.missing[block * kBlockIds + i];
  }
  return num_missing;
}

// Looks up as many ids as the scratch has room for.
void RowReader::lookup_piece(const int64_t* ids, size_t n, bool touch, float* out) {
  table_.scratch.missing.resize(copy_resident_ids(ids, n, touch, out));
  lookup_missing_ids(ids, touch, out);
}

// Looks up the ids at the places in scratch.missing.
void RowReader::lookup_missing_ids(const int64_t* ids, bool touch, float* out) {
  const BlockVector<uint32_t>& missing = table_.scratch.missing;
  if (missing.empty()) return;
  table_.assign_checked(&table_.scratch.batch, ids, missing.size(), missing.data());
  const Batch& batch = table_.scratch.batch;
  std::vector<Entry> entries(batch.num_unique());
  table_.store->directory().locate(batch.unique().data(), batch.num_unique(), entries.data());
  lookup_missing(batch, nullptr, entries.data(), touch, out);
}

// Copies the weights of frames[i], or of frames[index[i]], to row i of `out`. Skips rows with kNoFrame. Prefetches
// known rows after the last one.
//
// Uses ordinary stores: streaming stores were 7 % faster here but made the next read of the rows slower by twice as
// much.
void RowReader::copy_resident(const uint32_t* frames, const uint32_t* index, CopiedRows rows, float* out) const {
  static_assert(kNoFrame == RowPlaces::kNowhere);
  const Cache& cache = table_.store->cache();
  const std::byte* const weights = cache.record(0) + table_.fields[0].offset;
  kernels().gather_rows(
      table_.spec.dtype, table_.spec.dim,
      {weights, cache.stride(), frames, index, static_cast<int64_t>(rows.n), static_cast<int64_t>(rows.known)}, out);
}

// Looks up the batch's unique rows that are not in RAM: those with kNoFrame, or all when `frames` is null. Computes
// initial rows in `out`, and reads stored ones. `entries`: the directory entries of these rows.
void RowReader::lookup_missing(const Batch& batch, const uint32_t* frames, const Entry* entries, bool touch,
                               float* out) {
  const size_t dim = table_.spec.dim;
  Store& store = *table_.store;
  const auto places_of = [&](size_t u, auto&& visit) {
    for (uint32_t o = batch.offsets()[u]; o < batch.offsets()[u + 1]; ++o) visit(size_t{batch.order()[o]});
  };
  std::vector<uint32_t> absent, stored;  // indexes of unique rows that are not stored, and of those in the log
  for (uint32_t u = 0; u < batch.num_unique(); ++u) {
    if (frames == nullptr || frames[u] == kNoFrame) (is_stored(entries[u]) ? stored : absent).push_back(u);
  }
  parallel_for(absent.size(), row_grain(dim), [&](size_t from, size_t to) REQUIRES(table_.lock) {
    std::vector<std::byte> record(table_.weight_bytes);
    for (size_t i = from; i < to; ++i) {
      table_.initial_record(batch.unique()[absent[i]], table_.weight_bytes, record.data());
      places_of(absent[i], [&](size_t place) { widen(record.data(), out + place * dim); });
    }
  });
  const size_t frame_bytes = store.frame_bytes();
  const size_t most = touch ? store.max_pinned() : std::max<size_t>(1, store.plan().scratch_bytes / 2 / frame_bytes);
  TableState::Scratch& scratch = table_.scratch;
  if (stored.size() > most) {  // each piece then reads one region of the log
    std::sort(stored.begin(), stored.end(), [&](uint32_t a, uint32_t b) { return entries[a] < entries[b]; });
  }
  std::vector<Entry> wanted;
  for (size_t begin = 0; begin < stored.size(); begin += most) {
    const size_t count = std::min(most, stored.size() - begin);
    scratch.missing_ids.resize(count);
    for (size_t i = 0; i < count; ++i) scratch.missing_ids[i] = batch.unique()[stored[begin + i]];
    if (touch) {
      wanted.resize(count);
      if (begin == 0) {
        for (size_t i = 0; i < count; ++i) wanted[i] = entries[stored[i]];
      } else {  // compaction may have moved them since
        store.directory().locate(scratch.missing_ids.data(), count, wanted.data());
      }
      scratch.frames.resize(count);
      store.pin_stored(scratch.missing_ids.data(), wanted.data(), count, scratch.frames.data());
    } else {
      scratch.records.resize(std::max(scratch.records.size(), count * frame_bytes));
      store.fetch(scratch.missing_ids.data(), count, frame_bytes, scratch.records.data());
    }
    for (size_t i = 0; i < count; ++i) {
      const std::byte* record =
          touch ? store.cache().record(scratch.frames[i]) : scratch.records.data() + i * frame_bytes;
      places_of(stored[begin + i], [&](size_t place) { widen(record, out + place * dim); });
    }
    if (touch) store.unpin(scratch.frames.data(), count);
  }
}

void RowReader::contains(const int64_t* ids, size_t n, bool* out) {
  const auto guard = table_.lock.exclusive(TableLock::Commits::kMayRun);
  table_.require_usable();
  table_.check_ids(ids, n);
  Entry entries[kBlockIds];
  for (size_t begin = 0; begin < n; begin += kBlockIds) {
    const size_t count = std::min(kBlockIds, n - begin);
    table_.store->directory().locate(ids + begin, count, entries);
    for (size_t i = 0; i < count; ++i) {
      // A row that the device cache holds is stored when it is written back, so it counts as stored.
      out[begin + i] = is_stored(entries[i]) || device_.is_held(ids[begin + i]);
    }
  }
}

void RowReader::get(const int64_t* ids, size_t n, size_t field, float* out) {
  const auto guard = table_.lock.exclusive(TableLock::Commits::kMayRun);
  table_.require_usable();
  table_.check_ids(ids, n);
  device_.check_not_held(ids, n);
  const Field f = table_.field(field);
  // A reader's frames have weights only, so slots are read from the log.
  const size_t record_bytes = field == 0 ? table_.weight_bytes : table_.payload_bytes;
  const size_t piece =
      std::min(table_.piece_ids(), std::max<size_t>(1, table_.store->plan().scratch_bytes / 2 / record_bytes));
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t count = std::min(piece, n - begin);
    table_.assign_checked(&table_.scratch.batch, ids + begin, count);
    table_.scratch.records.resize(
        std::max(table_.scratch.records.size(), table_.scratch.batch.num_unique() * record_bytes));
    table_.store->fetch(table_.scratch.batch.unique().data(), table_.scratch.batch.num_unique(), record_bytes,
                        table_.scratch.records.data());
    for (size_t i = 0; i < count; ++i) {
      const std::byte* record = table_.scratch.records.data() + table_.scratch.batch.inverse()[i] * record_bytes;
      read_field(f, record, out + (begin + i) * f.length);
    }
  }
}

void RowReader::gather_records(const int64_t* ids, size_t n, std::byte* records) {
  auto guard = table_.lock.work();
  table_.require_writable();
  table_.check_ids(ids, n);
  prefetcher_.wait_for_rows(guard, ids, n);
  table_.require_writable();
  device_.check_not_held(ids, n);
  device_.require_disk(ids, n);
  device_.require_directory(ids, n);
  const size_t piece = table_.piece_ids();
  for (size_t begin = 0; begin < n; begin += piece) {
    table_.store->fetch_counted(ids + begin, std::min(piece, n - begin), table_.payload_bytes,
                                records + begin * table_.payload_bytes);
  }
}

}  // namespace bunkbed
