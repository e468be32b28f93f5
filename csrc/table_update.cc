// Updates: gradients summed and rows stepped.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "error.h"
#include "fault.h"
#include "record_update.h"
#include "table.h"
#include "table_rows.h"
#include "workers.h"

namespace bunkbed {

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
  if (is_staging() && store_->must_shrink_for(ids, n)) {
    settle(guard);
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
  Cache& cache = store_->cache();
  const RecordUpdate step_record(fields_, constants, spec_.init.seed, step);
  const size_t num_unique = batch.num_unique();
  for (size_t begin = 0; begin < num_unique;) {
    const size_t count = std::min(store_->max_pinned(), num_unique - begin);
    frames_.resize(count);
    store_->pin(batch.unique().data() + begin, count, true, frames_.data());
    *wrote = true;
    parallel_for(count, row_grain(dim), [&](size_t from, size_t to) {
      std::vector<float> sum(sums == nullptr ? dim : 0);
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
        step_record(batch.unique()[u], grad, record);
        // Seeded bug for the exactness tests: one row of the step is applied twice.
        if (u == 0 && fault_is("double_update")) step_record(batch.unique()[u], grad, record);
      }
    });
    for (size_t i = 0; i < count; ++i) store_->mark_dirty(frames_[i]);
    store_->unpin(frames_.data(), count);
    begin += count;
  }
}

}  // namespace bunkbed
