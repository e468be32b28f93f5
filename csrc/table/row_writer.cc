#include "table/row_writer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <bit>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/fault.h"
#include "base/workers.h"
#include "batch/gradients.h"
#include "batch/pieces.h"
#include "format/record.h"
#include "format/record_update.h"
#include "kernels/kernels.h"

namespace bunkbed {

namespace {

constexpr size_t kCopyBlockBytes = 64u << 10;  // bytes that one thread copies at a time

}  // namespace

Error changed_during_search(const std::string& name) {
  return Error(ErrorKind::kBroken, "table '" + name +
                                       "' was changed while its rows to remove were searched; sweep it between two "
                                       "steps; nothing was changed");
}

// Throws an error that names the gradient that is not finite, or the id whose gradients overflow when summed.
void RowWriter::not_finite(const Batch& batch, const int64_t* ids, size_t n, const float* grads) const {
  table_.check_finite(ids, n, grads, table_.spec.dim, "gradient");
  std::vector<float> sum(table_.spec.dim);
  size_t u = 0;
  while (u + 1 < batch.num_unique() && sum_row(batch, u, grads, sum.data())) ++u;
  const int64_t id = batch.unique()[u];
  throw Error(ErrorKind::kInvalid, "table '" + table_.name + "': the gradients of id " + std::to_string(id) +
                                       " are finite one by one and overflow float32 when summed; nothing was changed; "
                                       "lower the loss scale or the batch's size");
}

TableLock::Guard RowWriter::begin_update(const int64_t* ids, size_t n, const Batch* batch) {
  auto guard = lock_to_write(ids, n, batch);
  device_.release_for_change(ids, n);
  return guard;
}

// Returns the lock when none of these rows is being read and there is disk for them. Staging of other rows goes on.
// `batch`: the batch that has these unique rows, or null.
TableLock::Guard RowWriter::lock_to_write(const int64_t* ids, size_t n, const Batch* batch) {
  for (;;) {
    auto guard = table_.lock.work();
    table_.require_writable();
    batch != nullptr ? table_.check_batch(*batch) : table_.check_ids(ids, n);
    if (table_.lock.is_staging() && table_.store->must_shrink_for(ids, n)) {
      table_.lock.settle(guard);
      table_.require_writable();
    } else if (batch != nullptr ? prefetcher_.wait_for_rows(guard, *batch) : prefetcher_.wait_for_rows(guard, ids, n)) {
      // Other calls may have staged and added rows meanwhile, so that these rows now need frames to be evicted.
      if (table_.lock.is_staging() && table_.store->must_shrink_for(ids, n)) continue;
      table_.require_writable();
    }
    // Disk for as many rows as the device cache has frames is reserved, so rows on their way from it need none.
    const bool are_held = table_.store->disk().is_limited() && device_.are_reserved(ids, n);
    if (are_held || disk_.has_room_for(ids, n)) return guard;
    guard.unlock();
    disk_.make_room(ids, n);
  }
}

RowWriter::Step RowWriter::next_step(std::optional<double> lr, std::optional<int64_t> step) const {
  const double rate = lr.value_or(table_.spec.optimizer.lr);
  if (!std::isfinite(rate) || rate < 0) {
    throw Error(ErrorKind::kInvalid,
                "table '" + table_.name + "': lr must be finite and at least 0, got " + std::to_string(rate));
  }
  // One below the largest, so that the next step is an int64, too.
  constexpr int64_t kLastStep = std::numeric_limits<int64_t>::max() - 1;
  const int64_t number = step.value_or(std::min(table_.step, kLastStep) + 1);
  if (number < 1 || number > kLastStep) {
    throw Error(ErrorKind::kInvalid, "table '" + table_.name + "': step must be in [1, " + std::to_string(kLastStep) +
                                         "], got " + std::to_string(number) + "; nothing was changed");
  }
  if (table_.has_usage && table_.spec.retention.clock == AgeClock::kStep && number < table_.step) {
    throw Error(ErrorKind::kInvalid, "table '" + table_.name + "': step " + std::to_string(number) +
                                         " is before step " + std::to_string(table_.step) +
                                         ", which the table has taken; the steps of a table "
                                         "whose rows expire by step cannot go back; nothing was changed");
  }
  if (table_.now() < 0) {
    throw Error(ErrorKind::kInvalid, "table '" + table_.name +
                                         "': its rows expire by clock=\"event\", which was not set; assign "
                                         "table.clock before the first update; nothing was changed");
  }
  std::optional<Admission> admission;
  if (table_.spec.retention.has_admission()) {
    const uint32_t from = table_.spec.retention.admit_from;
    const int64_t now = table_.spec.retention.clock == AgeClock::kStep ? number : table_.event_clock;
    admission = from > 0 ? Admission::counted(from, now)
                         : Admission(table_.spec.retention.admit, table_.spec.init.seed, number);
  }
  return {number, make_step(table_.spec.optimizer, rate, number), admission};
}

// Runs `write`, which sets its argument to true before it writes the first row. A failure after that breaks the table.
template <typename Write>
void RowWriter::write_rows(const char* what, const Write& write) {
  bool wrote = false;
  try {
    write(&wrote);
  } catch (const std::exception& error) {
    if (wrote) table_.broken = std::string(what) + " larger than its memory failed half-way (" + error.what() + ")";
    throw;
  }
}

void RowWriter::finish_step(const Step& step) {
  table_.step = step.number;
  ++table_.counts.updates;
  table_.mark_changed();
  table_.store->rows().begin_step();
}

// Reserves directory space for the rows of the batch that the step will store.
void RowWriter::reserve_for(const Batch& batch, const Step& step) {
  if (table_.store->rows().is_placed(batch)) return;
  table_.store->reserve(table_.store->new_rows(batch.unique().data(), batch.num_unique(), step.draws()));
}

void RowWriter::check_change(const Batch& batch, bool is_step, std::optional<double> lr, std::optional<int64_t> step) {
  const auto guard = lock_to_write(batch.unique().data(), batch.num_unique(), &batch);
  if (is_step) return reserve_for(batch, next_step(lr, step));
  table_.store->reserve(table_.store->new_rows(batch.unique().data(), batch.num_unique()));
}

void RowWriter::update(const Batch& batch, const float* sums, std::optional<double> lr, std::optional<int64_t> step) {
  const auto guard = begin_update(batch.unique().data(), batch.num_unique(), &batch);
  const Step next = next_step(lr, step);
  reserve_for(batch, next);
  write_rows("an update", [&](bool* wrote) REQUIRES(table_.lock) { apply_update(batch, nullptr, sums, next, wrote); });
  finish_step(next);
}

void RowWriter::update(const int64_t* ids, size_t n, const float* grads, std::optional<double> lr,
                       std::optional<int64_t> step) {
  const auto guard = begin_update(ids, n, nullptr);
  const Step next = next_step(lr, step);
  const size_t dim = table_.spec.dim;
  table_.require_places(n);

  const size_t parts = table_.num_pieces(n);
  Batch& batch = table_.scratch.batch;
  const auto select = [&](size_t p) REQUIRES(table_.lock) { table_.assign_part(&batch, ids, n, p, parts); };

  // Everything is validated before anything is written. The sums are kept when the scratch has room, otherwise computed
  // a second time.
  float* sums = nullptr;
  Directory::NewRows coming;  // of all parts: each part may fit where together they do not
  for (size_t p = 0; p < parts; ++p) {
    select(p);
    const size_t floats = batch.num_unique() * dim;
    if (parts == 1 && floats * sizeof(float) <= table_.store->plan().scratch_bytes / 2) {
      table_.scratch.sums.resize(std::max(table_.scratch.sums.size(), floats));
      sums = table_.scratch.sums.data();
    }
    if (!sum_finite_gradients(batch, grads, dim, sums)) not_finite(batch, ids, n, grads);
    add_new_rows(table_.store->new_rows(batch.unique().data(), batch.num_unique(), next.draws()), &coming);
  }
  table_.store->reserve(coming);

  write_rows("an update", [&](bool* wrote) REQUIRES(table_.lock) {
    for (size_t p = 0; p < parts; ++p) {
      if (parts > 1) {
        select(p);
        reserve_for(batch, next);  // the ids may have changed
      }
      apply_update(batch, grads, sums, next, wrote);
    }
  });
  finish_step(next);
}

// Sums the gradients of unique row u. Returns whether the sums are finite.
bool RowWriter::sum_row(const Batch& batch, size_t u, const float* grads, float* sum) const {
  return kernels().sum_rows(table_.spec.dim, grads, batch.order().data(), batch.offsets().data() + u, 1,
                            static_cast<uint32_t>(batch.size()), sum, nullptr);
}

// Notes in a record of a table with usage that a step named its row.
void RowWriter::note_step(std::byte* record, int64_t now) const {
  std::byte* const usage = record + table_.usage_offset();
  const Usage before = read_usage(usage);
  if (before.last_step == kNeverGoes) return;
  write_usage({now, before.count == ~uint32_t{0} ? before.count : before.count + 1}, usage);
}

// Pins the batch's rows, as many at a time as the cache holds, and applies the step to each row once. Where the cache
// does not hold them all, rows that are in RAM come first: they are the last ones that the step's lookup read. Rows
// that the step does not admit get no frame, and their gradients are dropped.
void RowWriter::apply_update(const Batch& batch, const float* grads, const float* sums, const Step& step, bool* wrote) {
  const size_t dim = table_.spec.dim;
  Cache& cache = table_.store->cache();
  const RecordUpdate step_record(table_.fields, step.constants, table_.spec.init.seed, step.number);
  const size_t num_unique = batch.num_unique();
  const bool has_log = table_.store->log() != nullptr;
  const int64_t now = table_.spec.retention.clock == AgeClock::kStep ? step.number : table_.event_clock;
  std::vector<uint32_t> order;  // of the rows, in pieces; empty: as in the batch
  // A piece has no more rows than there is room for counts.
  const size_t most = step.admission.has_value() && step.admission->counts()
                          ? std::min(table_.store->max_pinned(), table_.store->counts().room())
                          : table_.store->max_pinned();
  if (num_unique > most && !table_.store->rows().is_placed(batch)) {
    order = table_.store->rows().reading_order(batch.unique().data(), num_unique);
  }
  BlockVector<int64_t>& piece = table_.scratch.missing_ids;
  for (size_t begin = 0; begin < num_unique;) {
    // Rows that are all in RAM need no pins, because no frame is evicted before the next pin().
    const bool is_placed = begin == 0 && table_.store->place_for_update(batch);
    const size_t count = is_placed ? num_unique : std::min(most, num_unique - begin);
    const int64_t* rows = batch.unique().data() + begin;
    if (!order.empty()) {
      piece.resize(count);
      for (size_t i = 0; i < count; ++i) piece[i] = batch.unique()[order[begin + i]];
      rows = piece.data();
    }
    if (!is_placed) {
      table_.scratch.frames.resize(count);
      table_.store->pin(rows, count, true, table_.scratch.frames.data(), false, step.draws());
    }
    const uint32_t* const frames = is_placed ? batch.placement().frames.data() : table_.scratch.frames.data();
    *wrote = true;
    std::atomic<bool> has_clean{false};
    const FramedRecords records{cache.record(0), cache.stride(), table_.payload_bytes};
    parallel_for(count, row_grain(dim), [&](size_t from, size_t to) {
      bool clean = false;
      if (has_log) {  // without a log every frame is always dirty
        for (size_t i = from; i < to; ++i) clean |= frames[i] != kNoFrame && !cache.is_dirty(frames[i]);
      }
      if (sums != nullptr && order.empty()) {
        step_record.step_rows(from, to, count, rows, sums + begin * dim, frames, records);
      } else {
        std::vector<float> sum(dim);
        for (size_t i = from; i < to; ++i) {
          if (frames[i] == kNoFrame) continue;
          const size_t u = order.empty() ? begin + i : order[begin + i];
          if (sums == nullptr) sum_row(batch, u, grads, sum.data());
          step_record(rows[i], sums == nullptr ? sum.data() : sums + u * dim, cache.record(frames[i]));
        }
      }
      if (clean) has_clean.store(true, std::memory_order_relaxed);
      // Seeded bug for the exactness tests: one row of the step is applied twice.
      if (begin + from == 0 && frames[0] != kNoFrame && fault_is("double_update")) {
        const size_t u = order.empty() ? 0 : order[0];
        std::vector<float> sum(dim);
        if (sums == nullptr) sum_row(batch, u, grads, sum.data());
        step_record(rows[0], sums == nullptr ? sum.data() : sums + u * dim, cache.record(frames[0]));
      }
      if (table_.has_usage && !fault_is("stale_usage")) {
        for (size_t i = from; i < to; ++i) {
          if (frames[i] != kNoFrame) note_step(cache.record(frames[i]), now);
        }
      }
    });
    if (has_clean) table_.store->mark_dirty(frames, count);
    if (!is_placed) table_.store->unpin(frames, count);
    begin += count;
  }
}

// ---- Raw slots and whole records ---------------------------------------------------------------------------------

void RowWriter::set(const int64_t* ids, size_t n, size_t field, const float* values) {
  const auto guard = disk_.lock_for(ids, n);
  device_.release_for_change(ids, n);
  table_.require_places(n);
  const Field f = table_.field(field);
  const bool is_usage = field == table_.fields.size();
  if (!is_usage) table_.check_finite(ids, n, values, f.length, "value");
  if (!is_usage) table_.check_fits(ids, n, values, f);
  const size_t parts = table_.num_pieces(n);
  Batch& batch = table_.scratch.batch;
  const auto select = [&](size_t p) REQUIRES(table_.lock) {
    table_.assign_part(&batch, ids, n, p, parts);
    return table_.store->new_rows(batch.unique().data(), batch.num_unique());
  };
  Directory::NewRows coming;  // of all parts
  for (size_t p = 0; p < parts; ++p) add_new_rows(select(p), &coming);
  table_.store->reserve(coming);
  BlockVector<uint32_t>& frames = table_.scratch.frames;
  write_rows("a set()", [&](bool* wrote) REQUIRES(table_.lock) {
    for (size_t p = 0; p < parts; ++p) {
      if (parts > 1) table_.store->reserve(select(p));  // another thread may have changed the ids
      for (size_t begin = 0; begin < batch.num_unique();) {
        const size_t count = std::min(table_.store->max_pinned(), batch.num_unique() - begin);
        frames.resize(count);
        table_.store->pin(batch.unique().data() + begin, count, true, frames.data());
        *wrote = true;
        for (size_t i = 0; i < count; ++i) {
          const size_t u = begin + i;
          const float* value = values + size_t{batch.order()[batch.offsets()[u + 1] - 1]} * f.length;
          std::byte* const record = table_.store->cache().record(frames[i]);
          write_field(f, value, record);
          if (table_.has_usage && !is_usage) {
            std::byte* const usage = record + table_.usage_offset();
            const Usage before = read_usage(usage);
            if (before.last_step != kNeverGoes) write_usage({table_.now(), before.count}, usage);
          }
          table_.store->mark_dirty(&frames[i], 1);
        }
        table_.store->unpin(frames.data(), count);
        begin += count;
      }
    }
  });
  if (n > 0) table_.mark_changed();
}

// Commits need not end first, but rows that a device cache holds are written back: a sweep deletes rows of all ages.
Erased RowWriter::erase(const int64_t* ids, size_t n, std::optional<uint64_t> changes) {
  const auto guard =
      device_.lock_written_back([&]() NO_THREAD_SAFETY_ANALYSIS { return disk_.lock_for_tombstones(ids, n); });
  if (changes.has_value() && *changes != table_.changes) {
    throw changed_during_search(table_.name);
  }
  table_.store->disk().forget_admitted();  // no other call can take the room: this one has the lock
  table_.require_places(n);
  device_.release_for_change(ids, n);
  const size_t before = table_.store->directory().stored_rows();
  const size_t counted = table_.store->directory().counted_rows();
  Batch& batch = table_.scratch.batch;
  const size_t parts = table_.num_pieces(n);
  write_rows("a delete()", [&](bool* wrote) REQUIRES(table_.lock) {
    for (size_t p = 0; p < parts; ++p) {
      table_.assign_part(&batch, ids, n, p, parts);
      table_.store->erase(batch.unique().data(), batch.num_unique(), wrote);
    }
  });
  const uint64_t erased = before - table_.store->directory().stored_rows();
  if (erased > 0 || table_.store->directory().counted_rows() < counted) table_.mark_changed();
  return {erased, table_.changes};
}

// Checks in parts by hash, so that a large call needs no more memory than a small one.
void RowWriter::require_distinct(const int64_t* ids, size_t n) {
  constexpr int64_t kFree = -1;
  constexpr size_t kAhead = 8;
  const size_t parts = std::max<size_t>(1, (n + table_.piece_ids() - 1) / table_.piece_ids());
  const size_t capacity = std::bit_ceil(std::max<size_t>(16, 2 * n / parts + n / parts / 2));
  const auto slot_of = [&](int64_t id) { return mix_id(id) & (capacity - 1); };
  ArrayVector<int64_t> seen;
  for (size_t p = 0; p < parts; ++p) {
    seen.assign(capacity, kFree);
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(&seen[slot_of(ids[i + kAhead])], 1);
      if (parts > 1 && (mix_id(ids[i]) >> 32) % parts != p) continue;
      size_t slot = slot_of(ids[i]);
      while (seen[slot] != kFree && seen[slot] != ids[i]) slot = (slot + 1) & (capacity - 1);
      if (seen[slot] == ids[i]) {
        throw Error(ErrorKind::kInvalid, "table '" + table_.name +
                                             "': records name an id twice: " + std::to_string(ids[i]) +
                                             ", again at position " + std::to_string(i) + "; nothing was changed");
      }
      seen[slot] = ids[i];
    }
  }
}

void RowWriter::scatter_records(const int64_t* ids, size_t n, const std::byte* records) {
  const auto guard = lock_to_write(ids, n, nullptr);
  require_distinct(ids, n);
  const bool is_write_back = device_.is_write_back(ids, n);
  if (!is_write_back) device_.release_for_change(ids, n);
  table_.store->reserve(table_.store->new_rows(ids, n));
  BlockVector<uint32_t>& frames = table_.scratch.frames;
  write_rows("a write of records", [&](bool* wrote) REQUIRES(table_.lock) {
    for (size_t begin = 0; begin < n;) {
      const size_t count = std::min({table_.store->max_pinned(), table_.piece_ids(), n - begin});
      frames.resize(count);
      table_.store->pin(ids + begin, count, true, frames.data(), true);
      *wrote = true;
      const Cache& cache = table_.store->cache();
      const size_t bytes = table_.payload_bytes;
      parallel_for(count, std::max<size_t>(16, kCopyBlockBytes / bytes),
                   [&](size_t from, size_t to) REQUIRES(table_.lock) {
                     constexpr size_t kAhead = 6;
                     for (size_t i = from; i < to; ++i) {
                       if (i + kAhead < to) cache.prefetch_record(frames[i + kAhead], bytes);
                       std::memcpy(cache.record(frames[i]), records + (begin + i) * bytes, bytes);
                     }
                   });
      table_.store->mark_dirty(frames.data(), count);
      table_.store->unpin(frames.data(), count);
      begin += count;
    }
  });
  if (is_write_back) device_.arrived(ids, n);
  if (n > 0) table_.mark_changed();
}

void RowWriter::append_records(const int64_t* ids, size_t n, const std::byte* records) {
  const auto guard = disk_.lock_for(ids, n);
  if (table_.store->log() == nullptr) {
    throw Error(ErrorKind::kInvalid,
                "table '" + table_.name + "': a table in RAM only has no log to append records to");
  }
  require_distinct(ids, n);
  device_.release_for_change(ids, n);
  table_.store->reserve(table_.store->new_rows(ids, n));
  write_rows("a write of records",
             [&](bool* wrote) REQUIRES(table_.lock) { table_.store->append_records(ids, n, records, wrote); });
  if (n > 0) table_.mark_changed();
}

}  // namespace bunkbed
