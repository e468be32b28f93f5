// Lookups, updates, raw slots: what happens to rows. Work larger than the scratch or the cache is done in exact
// pieces: lookups by ranges of the batch, updates by parts of the ids (all places of an id fall into one part).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "error.h"
#include "fault.h"
#include "table.h"
#include "workers.h"

namespace bunkbed {

namespace {

// Scratch a batch needs for each of its ids: the dedupe, entries, frames and read requests.
constexpr size_t kScratchPerId = 96;
constexpr size_t kBlockIds = 1024;  // ids of one block of a parallel loop over the batch

// Rows of one block of a parallel loop over unique rows: about 32 KiB of weights, so that a small batch stays on
// the caller's thread and a large one is spread evenly.
size_t row_grain(size_t dim) { return std::max<size_t>(8, 16384 / std::max<size_t>(1, dim)); }

}  // namespace

size_t Table::piece_ids() const { return std::max<size_t>(64, store_->plan().scratch_bytes / kScratchPerId); }

// ---- Lookup --------------------------------------------------------------------------------------------------

void Table::lookup(const int64_t* ids, size_t n, bool touch, float* out) {
  auto guard = lock_beside_staging();
  require_usable();
  check_ids(ids, n);
  check_not_held(ids, n);
  settle_for(guard, ids, n);
  ++lookups_;
  ids_seen_ += n;
  const size_t piece = piece_ids();
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t count = std::min(piece, n - begin);
    lookup_piece(ids + begin, count, touch, out + begin * spec_.dim);
  }
}

void Table::lookup_piece(const int64_t* ids, size_t n, bool touch, float* out) {
  const size_t dim = spec_.dim;
  Cache& cache = store_->cache();
  const Directory& directory = store_->directory();

  // 1. Rows in RAM are copied at once, before anything can be evicted; places of the others are noted.
  missing_.resize(n);
  const size_t blocks = (n + kBlockIds - 1) / kBlockIds;
  missing_counts_.assign(blocks, 0);
  std::atomic<uint64_t> hits{0};
  parallel_for(n, kBlockIds, [&](size_t from, size_t to) {
    Entry entries[kBlockIds];
    uint64_t block_hits = 0;
    for (size_t begin = from; begin < to; begin += kBlockIds) {
      const size_t count = std::min(kBlockIds, to - begin);
      directory.locate(ids + begin, count, entries);
      uint32_t missing = 0;
      constexpr size_t kAhead = 6;
      for (size_t i = 0; i < count; ++i) {
        if (i + kAhead < count && is_frame(entries[i + kAhead])) {
          const uint32_t ahead = frame_of(entries[i + kAhead]);
          const std::byte* record = cache.record(ahead);
          for (size_t line = 0; line < weight_bytes_ && line < 512; line += 64) __builtin_prefetch(record + line);
          if (touch) cache.prefetch(ahead);
        }
        if (is_frame(entries[i])) {
          const uint32_t frame = frame_of(entries[i]);
          widen(cache.record(frame), out + (begin + i) * dim);
          if (touch) block_hits += store_->touch(frame);
        } else {
          missing_[begin + missing++] = static_cast<uint32_t>(begin + i);
        }
      }
      missing_counts_[begin / kBlockIds] = missing;
    }
    if (block_hits != 0) hits.fetch_add(block_hits, std::memory_order_relaxed);
  });
  if (touch) store_->count_hits(hits);
  size_t num_missing = 0;
  for (size_t block = 0; block < blocks; ++block) {
    for (uint32_t i = 0; i < missing_counts_[block]; ++i) missing_[num_missing++] = missing_[block * kBlockIds + i];
  }
  if (num_missing == 0) return;

  // 2. The others, once each: initial rows are computed straight into their place, stored ones are read.
  batch_.assign(ids, num_missing, missing_.data());
  batch_.group();
  const size_t num_unique = batch_.num_unique();
  const auto places_of = [&](size_t u, auto&& visit) {
    for (uint32_t o = batch_.offsets()[u]; o < batch_.offsets()[u + 1]; ++o) visit(missing_[batch_.order()[o]]);
  };
  std::vector<uint32_t> stored;  // indexes of unique rows that are on disk
  {
    std::vector<Entry> entries(num_unique);
    directory.locate(batch_.unique().data(), num_unique, entries.data());
    for (uint32_t u = 0; u < num_unique; ++u) {
      if (entries[u] != kAbsent) stored.push_back(u);
    }
    if (stored.size() < num_unique) {
      parallel_for(num_unique, row_grain(dim), [&](size_t from, size_t to) {
        std::vector<std::byte> record(weight_bytes_);
        for (size_t u = from; u < to; ++u) {
          if (entries[u] != kAbsent) continue;
          initial_record(batch_.unique()[u], weight_bytes_, record.data());
          places_of(u, [&](uint32_t place) { widen(record.data(), out + place * dim); });
        }
      });
    }
  }
  const size_t frame_bytes = store_->frame_bytes();
  const size_t most = touch ? store_->max_pinned() : std::max<size_t>(1, store_->plan().scratch_bytes / 2 / frame_bytes);
  for (size_t begin = 0; begin < stored.size(); begin += most) {
    const size_t count = std::min(most, stored.size() - begin);
    missing_ids_.resize(count);
    for (size_t i = 0; i < count; ++i) missing_ids_[i] = batch_.unique()[stored[begin + i]];
    if (touch) {
      frames_.resize(count);
      store_->pin(missing_ids_.data(), count, false, frames_.data());
    } else {
      records_.resize(std::max(records_.size(), count * frame_bytes));
      store_->fetch(missing_ids_.data(), count, frame_bytes, records_.data());
    }
    for (size_t i = 0; i < count; ++i) {
      const std::byte* record = touch ? cache.record(frames_[i]) : records_.data() + i * frame_bytes;
      places_of(stored[begin + i], [&](uint32_t place) { widen(record, out + place * dim); });
    }
    if (touch) store_->unpin(frames_.data(), count);
  }
}

void Table::lookup_bags(const int64_t* ids, size_t n, const int64_t* offsets, size_t num_bags, Pooling pooling,
                        const float* weights, bool touch, float* out) {
  const auto guard = lock();
  require_usable();
  check_ids(ids, n);
  check_not_held(ids, n);
  ++lookups_;
  ids_seen_ += n;
  const size_t dim = spec_.dim;
  std::fill_n(out, num_bags * dim, 0.0f);

  // Rows of one piece lie in scratch, then are added to their bags in batch order. A bag may span pieces.
  const size_t by_rows = std::max<size_t>(1, store_->plan().scratch_bytes / 2 / (dim * sizeof(float)));
  const size_t piece = std::min(piece_ids(), std::min<size_t>(by_rows, 1u << 16));
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t count = std::min(piece, n - begin);
    sums_.resize(std::max(sums_.size(), count * dim));
    lookup_piece(ids + begin, count, touch, sums_.data());
    pool_rows(sums_.data(), begin, begin + count, offsets, num_bags, n, weights, out);
  }
  if (pooling == Pooling::kSum) return;
  for (size_t bag = 0; bag < num_bags; ++bag) {
    const auto from = static_cast<size_t>(offsets[bag]);
    const size_t to = bag + 1 < num_bags ? static_cast<size_t>(offsets[bag + 1]) : n;
    if (from == to) continue;
    // With weights as TensorFlow's combiners: mean by the sum of weights, sqrtn by the root of their squares' sum.
    float divisor = 0.0f;
    if (weights == nullptr) {
      divisor = static_cast<float>(to - from);
    } else {
      for (size_t i = from; i < to; ++i) divisor += pooling == Pooling::kMean ? weights[i] : weights[i] * weights[i];
    }
    if (pooling == Pooling::kSqrtN) divisor = std::sqrt(divisor);
    for (size_t d = 0; d < dim; ++d) out[bag * dim + d] /= divisor;
  }
}

// Adds rows [begin, end) of the batch, which lie at `rows`, to their bags.
void Table::pool_rows(const float* rows, size_t begin, size_t end, const int64_t* offsets, size_t num_bags, size_t n,
                      const float* weights, float* out) const {
  const size_t dim = spec_.dim;
  // The bags that this range meets.
  const int64_t* const first = std::upper_bound(offsets, offsets + num_bags, static_cast<int64_t>(begin));
  const size_t first_bag = first == offsets ? 0 : static_cast<size_t>(first - offsets) - 1;
  const int64_t* const last = std::lower_bound(offsets, offsets + num_bags, static_cast<int64_t>(end));
  const auto last_bag = static_cast<size_t>(last - offsets);
  const Kernels& k = kernels();
  parallel_for(last_bag - first_bag, 64, [&](size_t from_bag, size_t to_bag) {
    for (size_t bag = first_bag + from_bag; bag < first_bag + to_bag; ++bag) {
      const size_t from = std::max(begin, static_cast<size_t>(offsets[bag]));
      const size_t to = std::min(end, bag + 1 < num_bags ? static_cast<size_t>(offsets[bag + 1]) : n);
      for (size_t i = from; i < to; ++i) {
        const float* row = rows + (i - begin) * dim;
        if (weights == nullptr) {
          k.add_row(static_cast<int64_t>(dim), row, out + bag * dim);
        } else {
          k.add_scaled_row(static_cast<int64_t>(dim), weights[i], row, out + bag * dim);
        }
      }
    }
  });
}

// Returns as soon as the reads are on their way (Store says how). A batch larger than half of the cache, or than the
// scratch, is staged in part: what is not staged is read when it is wanted.
void Table::stage(const int64_t* ids, size_t n) {
  const auto guard = lock();  // one staging at a time
  require_usable();
  check_ids(ids, n);
  if (store_->log() == nullptr) return;
  batch_.assign(ids, std::min(piece_ids(), n));
  auto staging = std::make_shared<Store::Staging>(
      store_->begin_staging(batch_.unique().data(), batch_.num_unique()));
  if (staging->plan.extents.empty()) {
    store_->end_staging(*staging, false);
  } else {
    is_staging_ = true;
    io_pool().submit([this, staging] {
      bool failed = false;
      try {
        store_->log()->execute(staging->plan, store_->frame_bytes(), store_->log()->staging_lane(), nullptr);
      } catch (...) {
        failed = true;  // whoever wants a row reads it again, and gets the error
      }
      // Notified under the lock: the table may go as soon as the staging is seen finished.
      const std::lock_guard finish(mutex_);
      store_->end_staging(*staging, failed);
      store_->log()->count_reads(staging->plan, 0.0);
      is_staging_ = false;
      staged_.notify_all();
    });
  }
  store_->compact_some();  // beside the reads
}

void Table::settle_for(std::unique_lock<std::mutex>& guard, const int64_t* ids, size_t n) {
  if (!is_staging_) return;
  Entry entries[kBlockIds];
  for (size_t begin = 0; begin < n; begin += kBlockIds) {
    const size_t count = std::min(kBlockIds, n - begin);
    store_->directory().locate(ids + begin, count, entries);
    for (size_t i = 0; i < count; ++i) {
      if (!is_frame(entries[i]) || !store_->is_loading(frame_of(entries[i]))) continue;
      settle(guard);
      require_usable();  // it may have been closed meanwhile
      return;
    }
  }
}

void Table::contains(const int64_t* ids, size_t n, bool* out) {
  const auto guard = lock();
  require_usable();
  check_ids(ids, n);
  Entry entries[kBlockIds];
  for (size_t begin = 0; begin < n; begin += kBlockIds) {
    const size_t count = std::min(kBlockIds, n - begin);
    store_->directory().locate(ids + begin, count, entries);
    for (size_t i = 0; i < count; ++i) out[begin + i] = entries[i] != kAbsent;
  }
}

// ---- Update --------------------------------------------------------------------------------------------------

namespace {

const float* gradient_of(const float* grads, const uint32_t* members, uint32_t place, size_t dim) {
  return grads + size_t{members == nullptr ? place : members[place]} * dim;
}

}  // namespace

void Table::sum_gradients(const Batch& batch, const uint32_t* members, const float* grads, size_t u, float* out) const {
  const size_t dim = spec_.dim;
  const Kernels& k = kernels();
  const uint32_t* order = batch.order().data();
  const uint32_t begin = batch.offsets()[u];
  const uint32_t end = batch.offsets()[u + 1];
  std::memcpy(out, gradient_of(grads, members, order[begin], dim), dim * sizeof(float));
  for (uint32_t o = begin + 1; o < end; ++o) {
    if (o + 2 < end) {
      const float* ahead = gradient_of(grads, members, order[o + 2], dim);
      for (size_t line = 0; line < dim && line < 128; line += 16) __builtin_prefetch(ahead + line);
    }
    k.add_row(static_cast<int64_t>(dim), gradient_of(grads, members, order[o], dim), out);
  }
}

// Sums each unique row's gradients, into `sums` (num_unique, dim) when it is given, and says whether all are finite.
bool Table::sums_are_finite(const Batch& batch, const uint32_t* members, const float* grads, float* sums) const {
  const size_t dim = spec_.dim;
  const Kernels& k = kernels();
  std::atomic<bool> finite{true};
  parallel_for(batch.num_unique(), row_grain(dim), [&](size_t from, size_t to) {
    std::vector<float> own(sums == nullptr ? dim : 0);
    bool all = true;
    for (size_t u = from; u < to; ++u) {
      // The first gradients of the rows that come next: each lies somewhere else in the batch.
      if (u + 4 < to) {
        const float* ahead = gradient_of(grads, members, batch.order()[batch.offsets()[u + 4]], dim);
        for (size_t line = 0; line < dim && line < 128; line += 16) __builtin_prefetch(ahead + line);
      }
      float* out = sums == nullptr ? own.data() : sums + u * dim;
      sum_gradients(batch, members, grads, u, out);
      all &= k.all_finite(static_cast<int64_t>(dim), out);
    }
    if (!all) finite.store(false, std::memory_order_relaxed);
  });
  return finite;
}

void sum_duplicates(const Batch& batch, const float* grads, size_t dim, float* sums) {
  const Kernels& k = kernels();
  const uint32_t* order = batch.order().data();
  parallel_for(batch.num_unique(), row_grain(dim), [&](size_t from, size_t to) {
    const uint32_t last = batch.offsets()[to];
    // Each gradient lies somewhere else in the batch: ask for those to come.
    const auto prefetch = [&](uint32_t o) {
      constexpr uint32_t kAhead = 6;
      if (o + kAhead >= last) return;
      const float* ahead = grads + size_t{order[o + kAhead]} * dim;
      for (size_t line = 0; line < dim && line < 128; line += 16) __builtin_prefetch(ahead + line);
    };
    for (size_t u = from; u < to; ++u) {
      float* out = sums + u * dim;
      const uint32_t begin = batch.offsets()[u];
      prefetch(begin);
      std::memcpy(out, grads + size_t{order[begin]} * dim, dim * sizeof(float));
      for (uint32_t o = begin + 1; o < batch.offsets()[u + 1]; ++o) {
        prefetch(o);
        k.add_row(static_cast<int64_t>(dim), grads + size_t{order[o]} * dim, out);
      }
    }
  });
}

void Table::overflowed(int64_t id) const {
  throw Error(ErrorKind::kInvalid, "table '" + name_ + "': the gradients of id " + std::to_string(id) +
                                       " are finite one by one and overflow float32 when summed; nothing was changed; "
                                       "lower the loss scale or the batch's size");
}

void Table::update(const int64_t* ids, size_t n, const float* grads, std::optional<double> lr,
                   std::optional<int64_t> step) {
  auto guard = lock_beside_staging();
  require_writable();
  check_ids(ids, n);
  check_not_held(ids, n);
  if (store_->directory().grows()) {
    settle(guard);  // a growing directory may take frames that staging reads into
    require_writable();
  } else {
    settle_for(guard, ids, n);
  }
  const double rate = lr.value_or(spec_.optimizer.lr);
  if (!std::isfinite(rate) || rate < 0) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': lr must be finite and at least 0, got " + std::to_string(rate));
  }
  const int64_t number = step.value_or(step_ + 1);
  if (number < 1) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': step must be at least 1, got " + std::to_string(number));
  }
  const size_t dim = spec_.dim;
  const StepConstants constants = make_step(spec_.optimizer, rate, number);

  const size_t parts = std::max<size_t>(1, (n + piece_ids() - 1) / piece_ids());
  // The members of part p, in batch order.
  const auto select = [&](size_t p) -> const uint32_t* {
    if (parts == 1) {
      batch_.assign(ids, n);
    } else {
      members_.clear();
      for (size_t i = 0; i < n; ++i) {
        if ((mix_id(ids[i]) >> 16) % parts == p) members_.push_back(static_cast<uint32_t>(i));
      }
      batch_.assign(ids, members_.size(), members_.data());
    }
    batch_.group();
    return parts == 1 ? nullptr : members_.data();
  };

  // Everything is validated before anything is written. The sums are kept where they fit the scratch, otherwise
  // computed a second time.
  bool sums_are_kept = false;
  const float* sums = nullptr;
  for (size_t p = 0; p < parts; ++p) {
    const uint32_t* members = select(p);
    if (parts == 1 && batch_.num_unique() == n) {
      // No id twice: first occurrence is batch order, and the gradients are their own sums.
      sums = grads;
      std::atomic<bool> finite{true};
      parallel_for(n, row_grain(dim), [&](size_t from, size_t to) {
        if (!kernels().all_finite(static_cast<int64_t>((to - from) * dim), grads + from * dim)) {
          finite.store(false, std::memory_order_relaxed);
        }
      });
      if (!finite) check_finite(ids, n, grads, dim, "gradient");
      store_->reserve_rows(batch_.unique().data(), n);
      continue;
    }
    const size_t floats = batch_.num_unique() * dim;
    sums_are_kept = parts == 1 && floats * sizeof(float) <= store_->plan().scratch_bytes / 2;
    if (sums_are_kept) {
      sums_.resize(std::max(sums_.size(), floats));
      sums = sums_.data();
    }
    if (sums_are_finite(batch_, members, grads, sums_are_kept ? sums_.data() : nullptr)) {
      store_->reserve_rows(batch_.unique().data(), batch_.num_unique());
      continue;
    }
    check_finite(ids, n, grads, dim, "gradient");
    std::vector<float> sum(dim);
    for (size_t u = 0; u < batch_.num_unique(); ++u) {
      sum_gradients(batch_, members, grads, u, sum.data());
      if (!kernels().all_finite(static_cast<int64_t>(dim), sum.data())) overflowed(batch_.unique()[u]);
    }
  }

  bool wrote = false;
  try {
    for (size_t p = 0; p < parts; ++p) {
      const uint32_t* members = parts == 1 ? nullptr : select(p);
      apply_update(batch_, members, grads, sums, constants, number, &wrote);
    }
  } catch (const std::exception& error) {
    if (wrote) {
      broken_ = std::string("an update larger than its memory failed half-way (") + error.what() + ")";
    }
    throw;
  }
  step_ = number;
  ++updates_;
  changed_ = true;
  ++changes_;
  store_->begin_step();
}

// Pins the batch's rows, as many at a time as the cache holds, and steps each once.
void Table::apply_update(const Batch& batch, const uint32_t* members, const float* grads, const float* sums,
                         const StepConstants& constants, int64_t step, bool* wrote) {
  const size_t dim = spec_.dim;
  const Kernels& k = kernels();
  Cache& cache = store_->cache();
  const size_t slots_offset = fields_.size() > 1 ? fields_[1].offset : 0;
  const bool is_wide = spec_.dtype == DType::kFloat32;
  const size_t num_unique = batch.num_unique();
  for (size_t begin = 0; begin < num_unique;) {
    const size_t count = std::min(store_->max_pinned(), num_unique - begin);
    frames_.resize(count);
    store_->pin(batch.unique().data() + begin, count, true, frames_.data());
    *wrote = true;
    parallel_for(count, row_grain(dim), [&](size_t from, size_t to) {
      std::vector<float> sum(sums == nullptr ? dim : 0);
      std::vector<float> wide(is_wide ? 0 : dim);
      for (size_t i = from; i < to; ++i) {
        constexpr size_t kAhead = 3;
        if (i + kAhead < to) {
          const std::byte* ahead = cache.record(frames_[i + kAhead]);
          for (size_t line = 0; line < payload_bytes_ && line < 1024; line += 64) __builtin_prefetch(ahead + line, 1);
        }
        const size_t u = begin + i;
        if (sums == nullptr) sum_gradients(batch, members, grads, u, sum.data());
        const float* grad = sums == nullptr ? sum.data() : sums + u * dim;
        std::byte* record = cache.record(frames_[i]);
        auto* slots = reinterpret_cast<float*>(record + slots_offset);
        if (is_wide) {
          k.update_row(constants, static_cast<int64_t>(dim), grad, reinterpret_cast<float*>(record), slots);
          // Seeded bug for the exactness tests: one row of the step is applied twice.
          if (u == 0 && fault_is("double_update")) {
            k.update_row(constants, static_cast<int64_t>(dim), grad, reinterpret_cast<float*>(record), slots);
          }
        } else {
          k.widen(spec_.dtype, static_cast<int64_t>(dim), record, wide.data());
          k.update_row(constants, static_cast<int64_t>(dim), grad, wide.data(), slots);
          k.narrow_stochastic(spec_.dtype, static_cast<int64_t>(dim), wide.data(), spec_.init.seed, batch.unique()[u],
                              step, record);
        }
      }
    });
    for (size_t i = 0; i < count; ++i) store_->mark_dirty(frames_[i]);
    store_->unpin(frames_.data(), count);
    begin += count;
  }
}

// ---- Whole records, for a tier above ---------------------------------------------------------------------------

void Table::gather_records(const int64_t* ids, size_t n, std::byte* records) {
  const auto guard = lock();
  require_writable();
  check_ids(ids, n);
  const size_t piece = std::min(piece_ids(), std::max<size_t>(1, store_->plan().scratch_bytes / 2 / payload_bytes_));
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t count = std::min(piece, n - begin);
    batch_.assign(ids + begin, count);
    records_.resize(std::max(records_.size(), batch_.num_unique() * payload_bytes_));
    store_->fetch(batch_.unique().data(), batch_.num_unique(), payload_bytes_, records_.data());
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(records + (begin + i) * payload_bytes_, records_.data() + batch_.inverse()[i] * payload_bytes_,
                  payload_bytes_);
    }
  }
}

void Table::scatter_records(const int64_t* ids, size_t n, const std::byte* records) {
  const auto guard = lock();
  require_writable();
  check_ids(ids, n);
  batch_.assign(ids, n);
  if (batch_.num_unique() != n) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': records to scatter name an id twice");
  }
  store_->reserve_rows(ids, n);
  for (size_t begin = 0; begin < n;) {
    const size_t count = std::min(store_->max_pinned(), n - begin);
    frames_.resize(count);
    store_->pin(ids + begin, count, true, frames_.data());
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(store_->cache().record(frames_[i]), records + (begin + i) * payload_bytes_, payload_bytes_);
      store_->mark_dirty(frames_[i]);
    }
    store_->unpin(frames_.data(), count);
    begin += count;
  }
  changed_ = true;
  ++changes_;
}

void Table::hold(const int64_t* ids, size_t n) {
  const auto guard = lock();
  require_writable();
  check_ids(ids, n);
  held_.insert(ids, ids + n);
}

void Table::release_held(const int64_t* ids, size_t n) {
  const auto guard = lock();
  for (size_t i = 0; i < n; ++i) held_.erase(ids[i]);
}

// A row whose newest value lies above this table must not be read or written here behind its holder's back.
void Table::check_not_held(const int64_t* ids, size_t n) const {
  if (held_.empty()) return;
  for (size_t i = 0; i < n; ++i) {
    if (!held_.contains(ids[i])) continue;
    throw Error(ErrorKind::kBroken, "table '" + name_ + "': id " + std::to_string(ids[i]) + " at position " +
                                        std::to_string(i) +
                                        " is held by a device cache, which has its newest value; use the layer that "
                                        "owns the cache, or let it write back first");
  }
}

// ---- Raw slots -----------------------------------------------------------------------------------------------

void Table::get(const int64_t* ids, size_t n, size_t field, float* out) {
  const auto guard = lock();
  require_usable();
  check_ids(ids, n);
  check_not_held(ids, n);
  const Field& f = fields_.at(field);
  // A reader's frames hold weights only; its slots come from the log.
  const size_t record_bytes = field == 0 ? weight_bytes_ : payload_bytes_;
  const size_t piece =
      std::min(piece_ids(), std::max<size_t>(1, store_->plan().scratch_bytes / 2 / record_bytes));
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t count = std::min(piece, n - begin);
    batch_.assign(ids + begin, count);
    records_.resize(std::max(records_.size(), batch_.num_unique() * record_bytes));
    store_->fetch(batch_.unique().data(), batch_.num_unique(), record_bytes, records_.data());
    for (size_t i = 0; i < count; ++i) {
      const std::byte* record = records_.data() + batch_.inverse()[i] * record_bytes;
      if (field == 0) {
        widen(record, out + (begin + i) * f.length);
      } else {
        std::memcpy(out + (begin + i) * f.length, record + f.offset, f.length * sizeof(float));
      }
    }
  }
}

void Table::set(const int64_t* ids, size_t n, size_t field, const float* values) {
  const auto guard = lock();
  require_writable();
  check_ids(ids, n);
  check_not_held(ids, n);
  const Field& f = fields_.at(field);
  check_finite(ids, n, values, f.length, "value");
  const size_t parts = std::max<size_t>(1, (n + piece_ids() - 1) / piece_ids());
  const auto select = [&](size_t p) {
    members_.clear();
    for (size_t i = 0; i < n; ++i) {
      if (parts == 1 || (mix_id(ids[i]) >> 16) % parts == p) members_.push_back(static_cast<uint32_t>(i));
    }
    batch_.assign(ids, members_.size(), members_.data());
    batch_.group();
  };
  for (size_t p = 0; p < parts; ++p) {
    select(p);
    store_->reserve_rows(batch_.unique().data(), batch_.num_unique());
  }
  bool wrote = false;
  try {
    for (size_t p = 0; p < parts; ++p) {
      if (parts > 1) select(p);
      for (size_t begin = 0; begin < batch_.num_unique();) {
        const size_t count = std::min(store_->max_pinned(), batch_.num_unique() - begin);
        frames_.resize(count);
        store_->pin(batch_.unique().data() + begin, count, true, frames_.data());
        wrote = true;
        for (size_t i = 0; i < count; ++i) {
          const size_t u = begin + i;
          const float* value = values + size_t{members_[batch_.order()[batch_.offsets()[u + 1] - 1]]} * f.length;
          std::byte* record = store_->cache().record(frames_[i]);
          if (field == 0 && spec_.dtype != DType::kFloat32) {
            kernels().narrow_nearest(spec_.dtype, f.length, value, record);
          } else {
            std::memcpy(record + f.offset, value, f.length * sizeof(float));
          }
          store_->mark_dirty(frames_[i]);
        }
        store_->unpin(frames_.data(), count);
        begin += count;
      }
    }
  } catch (const std::exception& error) {
    if (wrote) broken_ = std::string("a set() larger than its memory failed half-way (") + error.what() + ")";
    throw;
  }
  if (n > 0) {
    changed_ = true;
    ++changes_;
  }
}

}  // namespace bunkbed
