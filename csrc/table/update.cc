// Updates: gradients summed and rows stepped.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/fault.h"
#include "base/workers.h"
#include "batch/gradients.h"
#include "batch/pieces.h"
#include "format/record_update.h"
#include "table/table.h"

namespace bunkbed {

// Says which gradient is not finite, or which sum of finite ones.
void Table::not_finite(const Batch& batch, const int64_t* ids, size_t n, const float* grads) const {
  check_finite(ids, n, grads, spec_.dim, "gradient");
  std::vector<float> sum(spec_.dim);
  size_t u = 0;
  while (u + 1 < batch.num_unique() && std::isfinite(sum_row(batch, u, grads, sum.data()))) ++u;
  const int64_t id = batch.unique()[u];
  throw Error(ErrorKind::kInvalid, "table '" + name_ + "': the gradients of id " + std::to_string(id) +
                                       " are finite one by one and overflow float32 when summed; nothing was changed; "
                                       "lower the loss scale or the batch's size");
}

// Places in a call's ids are kept in 32 bits.
void Table::require_places(size_t n) const {
  if (n <= ~uint32_t{0}) return;
  throw Error(ErrorKind::kInvalid, "table '" + name_ + "': one call takes at most 2**32 - 1 ids, got " +
                                       std::to_string(n) + "; split it");
}

TableLock::Guard Table::begin_update(const int64_t* ids, size_t n) {
  auto guard = lock_to_write(ids, n);
  release_for_change(ids, n);
  return guard;
}

// The lock, once none of these rows is being read, and with disk for them. Other rows' staging goes on.
TableLock::Guard Table::lock_to_write(const int64_t* ids, size_t n) {
  for (;;) {
    auto guard = lock_.work();
    require_writable();
    check_ids(ids, n);
    if (lock_.is_staging() && store_->must_shrink_for(ids, n)) {
      lock_.settle(guard);
      require_writable();
    } else if (settle_for(guard, ids, n)) {
      // Others may have staged, and added rows, so that frames must go for these now.
      if (lock_.is_staging() && store_->must_shrink_for(ids, n)) continue;
      require_writable();
    }
    // There is room for as many rows as the holder has frames, wherever they are on their way.
    const bool are_held = store_->disk_limit() != 0 && holder_ != nullptr && holder_->num_held() <= holder_->max_held() &&
                          holder_->first_not_held(ids, n) == n;
    if (are_held || has_disk_for(ids, n)) return guard;
    guard.unlock();
    make_disk_room(ids, n);
  }
}

Table::Step Table::next_step(std::optional<double> lr, std::optional<int64_t> step) const {
  const double rate = lr.value_or(spec_.optimizer.lr);
  if (!std::isfinite(rate) || rate < 0) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': lr must be finite and at least 0, got " + std::to_string(rate));
  }
  // One below the largest, so that the step after it is a number too.
  constexpr int64_t kLastStep = std::numeric_limits<int64_t>::max() - 1;
  const int64_t number = step.value_or(std::min(step_, kLastStep) + 1);
  if (number < 1 || number > kLastStep) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': step must be in [1, " + std::to_string(kLastStep) +
                                         "], got " + std::to_string(number) + "; nothing was changed");
  }
  return {number, make_step(spec_.optimizer, rate, number)};
}

// Whatever failed before the first write changed nothing; after it, the table is no longer what any commit says.
template <typename Apply>
void Table::take_step(const Step& step, const Apply& apply) {
  bool wrote = false;
  try {
    apply(&wrote);
  } catch (const std::exception& error) {
    if (wrote) {
      broken_ = std::string("an update larger than its memory failed half-way (") + error.what() + ")";
    }
    throw;
  }
  step_ = step.number;
  ++updates_;
  changed_ = true;
  ++changes_;
  store_->begin_step();
}

void Table::update(const Batch& batch, const float* sums, std::optional<double> lr, std::optional<int64_t> step) {
  const auto guard = begin_update(batch.unique().data(), batch.num_unique());
  const Step next = next_step(lr, step);
  if (!store_->is_placed(batch)) store_->reserve_rows(batch.unique().data(), batch.num_unique());
  take_step(next, [&](bool* wrote) { apply_update(batch, nullptr, sums, next, wrote); });
}

void Table::update(const int64_t* ids, size_t n, const float* grads, std::optional<double> lr,
                   std::optional<int64_t> step) {
  const auto guard = begin_update(ids, n);
  const Step next = next_step(lr, step);
  const size_t dim = spec_.dim;
  require_places(n);

  const size_t parts = std::max<size_t>(1, (n + piece_ids() - 1) / piece_ids());
  // All places of the ids of part p.
  const auto select = [&](size_t p) {
    if (parts == 1) {
      assign_checked(&batch_, ids, n);
      return;
    }
    members_.clear();
    for (size_t i = 0; i < n; ++i) {
      if ((mix_id(ids[i]) >> 16) % parts == p) members_.push_back(static_cast<uint32_t>(i));
    }
    assign_checked(&batch_, ids, members_.size(), members_.data());
  };

  // Everything is validated before anything is written. The sums are kept where they fit the scratch, otherwise
  // computed a second time.
  float* sums = nullptr;
  for (size_t p = 0; p < parts; ++p) {
    select(p);
    const size_t floats = batch_.num_unique() * dim;
    if (parts == 1 && floats * sizeof(float) <= store_->plan().scratch_bytes / 2) {
      sums_.resize(std::max(sums_.size(), floats));
      sums = sums_.data();
    }
    if (!std::isfinite(sum_gradients(batch_, grads, dim, sums))) not_finite(batch_, ids, n, grads);
    store_->reserve_rows(batch_.unique().data(), batch_.num_unique());
  }

  take_step(next, [&](bool* wrote) {
    for (size_t p = 0; p < parts; ++p) {
      if (parts > 1) {
        select(p);
        store_->reserve_rows(batch_.unique().data(), batch_.num_unique());  // other ids than before, if they were changed
      }
      apply_update(batch_, grads, sums, next, wrote);
    }
  });
}

// Row u's gradients summed; returns the sum of the sums' squares.
double Table::sum_row(const Batch& batch, size_t u, const float* grads, float* sum) const {
  return kernels().sum_rows(spec_.dim, grads, batch.order().data(), batch.offsets().data() + u, 1,
                            static_cast<uint32_t>(batch.size()), sum);
}

// Pins the batch's rows, as many at a time as the cache holds, and steps each once.
void Table::apply_update(const Batch& batch, const float* grads, const float* sums, const Step& step, bool* wrote) {
  const size_t dim = spec_.dim;
  Cache& cache = store_->cache();
  const RecordUpdate step_record(fields_, step.constants, spec_.init.seed, step.number);
  const size_t num_unique = batch.num_unique();
  const bool has_log = store_->log() != nullptr;
  for (size_t begin = 0; begin < num_unique;) {
    // All of them where they are known to be in RAM: nothing gives way before the next pin(), so they need no pins.
    const bool is_placed = begin == 0 && store_->place_for_update(batch);
    const size_t count = is_placed ? num_unique : std::min(store_->max_pinned(), num_unique - begin);
    if (!is_placed) {
      frames_.resize(count);
      store_->pin(batch.unique().data() + begin, count, true, frames_.data());
    }
    const uint32_t* const frames = is_placed ? batch.placement().frames.data() : frames_.data();
    *wrote = true;
    std::atomic<bool> has_clean{false};
    const FramedRecords records{cache.record(0), cache.stride(), payload_bytes_};
    parallel_for(count, row_grain(dim), [&](size_t from, size_t to) {
      bool clean = false;
      if (has_log) {  // nowhere else is it asked what is dirty
        for (size_t i = from; i < to; ++i) clean |= !cache.is_dirty(frames[i]);
      }
      if (sums != nullptr) {
        step_record.step_rows(from, to, count, batch.unique().data() + begin, sums + begin * dim, frames, records);
      } else {
        std::vector<float> sum(dim);
        for (size_t i = from; i < to; ++i) {
          sum_row(batch, begin + i, grads, sum.data());
          step_record(batch.unique()[begin + i], sum.data(), cache.record(frames[i]));
        }
      }
      if (clean) has_clean.store(true, std::memory_order_relaxed);
      // Seeded bug for the exactness tests: one row of the step is applied twice.
      if (begin + from == 0 && fault_is("double_update")) {
        std::vector<float> sum(dim);
        if (sums == nullptr) sum_row(batch, 0, grads, sum.data());
        step_record(batch.unique()[0], sums == nullptr ? sum.data() : sums, cache.record(frames[0]));
      }
    });
    if (has_clean) store_->mark_dirty(frames, count);
    if (!is_placed) store_->unpin(frames, count);
    begin += count;
  }
}

}  // namespace bunkbed
