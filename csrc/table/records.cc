// Records as they are: raw slots for imports, whole records for a tier above.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/workers.h"
#include "batch/pieces.h"
#include "format/record.h"
#include "table/table.h"

namespace bunkbed {

namespace {
constexpr size_t kCopyBlockBytes = 64u << 10;  // what one thread copies at a time
}  // namespace

// ---- Whole records, for a tier above ---------------------------------------------------------------------------

void Table::gather_records(const int64_t* ids, size_t n, std::byte* records) {
  auto guard = lock_.work();
  require_writable();
  check_ids(ids, n);
  settle_for(guard, ids, n);
  require_writable();
  check_not_held(ids, n);
  require_disk_above(ids, n);
  require_directory_above(ids, n);
  const size_t piece = piece_ids();
  for (size_t begin = 0; begin < n; begin += piece) {
    store_->fetch_counted(ids + begin, std::min(piece, n - begin), payload_bytes_, records + begin * payload_bytes_);
  }
}

// In parts by hash, so that a large call needs no more memory than a small one.
void Table::require_distinct(const int64_t* ids, size_t n) {
  constexpr int64_t kFree = -1;
  constexpr size_t kAhead = 8;
  const size_t parts = std::max<size_t>(1, (n + piece_ids() - 1) / piece_ids());
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
        throw Error(ErrorKind::kInvalid, "table '" + name_ + "': records to scatter name an id twice: " +
                                             std::to_string(ids[i]) + ", again at position " + std::to_string(i) +
                                             "; nothing was changed");
      }
      seen[slot] = ids[i];
    }
  }
}

void Table::scatter_records(const int64_t* ids, size_t n, const std::byte* records) {
  const auto guard = lock_to_write(ids, n);
  require_distinct(ids, n);
  const bool is_write_back = holder_ != nullptr && holder_->first_not_held(ids, n) == n;
  if (!is_write_back) release_for_change(ids, n);
  store_->reserve_rows(ids, n);
  bool wrote = false;
  try {
    for (size_t begin = 0; begin < n;) {
      const size_t count = std::min({store_->max_pinned(), piece_ids(), n - begin});
      frames_.resize(count);
      store_->pin(ids + begin, count, true, frames_.data(), true);
      wrote = true;
      const Cache& cache = store_->cache();
      parallel_for(count, std::max<size_t>(16, kCopyBlockBytes / payload_bytes_), [&](size_t from, size_t to) {
        constexpr size_t kAhead = 6;
        for (size_t i = from; i < to; ++i) {
          if (i + kAhead < to) cache.prefetch_record(frames_[i + kAhead], payload_bytes_);
          std::memcpy(cache.record(frames_[i]), records + (begin + i) * payload_bytes_, payload_bytes_);
        }
      });
      store_->mark_dirty(frames_.data(), count);
      store_->unpin(frames_.data(), count);
      begin += count;
    }
  } catch (const std::exception& error) {
    if (wrote) broken_ = std::string("scattering more records than its memory takes failed half-way (") + error.what() + ")";
    throw;
  }
  if (is_write_back) holder_->arrived(ids, n);
  if (n == 0) return;
  changed_ = true;
  ++changes_;
}

void Table::set_holder(std::shared_ptr<Holder> holder, std::function<void()> write_back) {
  if (holder == nullptr) {
    // What they refer to may refer to this table: it goes without the lock.
    std::function<void()> gone;
    const auto guard = lock_.exclusive(TableLock::Commits::kMayRun);
    std::swap(gone, write_back_);
    std::swap(holder, holder_);
    if (store_ != nullptr) store_->reserve_held(0);
    return;
  }
  const auto guard = lock_with_disk_above(holder->max_held());
  if (holder_ != nullptr) {
    store_->forget_admitted();  // the room that lock_with_disk_above() reserved
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "' has a device cache already; a table has one at a time");
  }
  holder_ = std::move(holder);
  write_back_ = std::move(write_back);
  store_->reserve_held(rows_above());
  store_->forget_admitted();
}

// A row whose newest value lies above this table must not be read or written here behind its holder's back.
void Table::check_not_held(const int64_t* ids, size_t n) const {
  if (holder_ == nullptr) return;
  const size_t i = holder_->first_held(ids, n);
  if (i == n) return;
  throw Error(ErrorKind::kBroken, "table '" + name_ + "': id " + std::to_string(ids[i]) + " at position " +
                                      std::to_string(i) +
                                      " is held by a device cache, which has its newest value; use the layer that "
                                      "owns the cache, or let it write back first");
}

void Table::require_not_in_use() const {
  if (holder_ == nullptr || holder_->num_in_use() == 0) return;
  throw rows_in_use(holder_->num_in_use());
}

// Drops the device cache's copies before every row changes. A plan made afterwards finds no copy and waits for the lock.
void Table::give_up_above() {
  if (holder_ == nullptr) return;
  if (const size_t rows = holder_->give_up_all(); rows > 0) throw rows_in_use(rows);
}

Error Table::rows_in_use(size_t rows) const {
  return Error(ErrorKind::kBroken, "table '" + name_ + "': " + std::to_string(rows) +
                                       " rows are in use by a device cache; end the step under way first");
}

// Copies above that are as good as these rows would be wrong once they change here.
void Table::release_for_change(const int64_t* ids, size_t n) {
  check_not_held(ids, n);
  if (holder_ == nullptr) return;
  const size_t i = holder_->give_up(ids, n);
  if (i == n) return;
  throw Error(ErrorKind::kBroken, "table '" + name_ + "': id " + std::to_string(ids[i]) + " at position " +
                                      std::to_string(i) +
                                      " is in use by a device cache; use the layer that owns the cache, or end the step "
                                      "under way first");
}

// ---- Raw slots -----------------------------------------------------------------------------------------------

void Table::get(const int64_t* ids, size_t n, size_t field, float* out) {
  const auto guard = lock_.exclusive(TableLock::Commits::kMayRun);
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
    assign_checked(&batch_, ids + begin, count);
    records_.resize(std::max(records_.size(), batch_.num_unique() * record_bytes));
    store_->fetch(batch_.unique().data(), batch_.num_unique(), record_bytes, records_.data());
    for (size_t i = 0; i < count; ++i) {
      const std::byte* record = records_.data() + batch_.inverse()[i] * record_bytes;
      read_field(f, record, out + (begin + i) * f.length);
    }
  }
}

void Table::set(const int64_t* ids, size_t n, size_t field, const float* values) {
  const auto guard = lock_with_disk_for(ids, n);
  release_for_change(ids, n);
  require_places(n);
  const Field& f = fields_.at(field);
  check_finite(ids, n, values, f.length, "value");
  check_fits(ids, n, values, f);
  const size_t parts = std::max<size_t>(1, (n + piece_ids() - 1) / piece_ids());
  const auto select = [&](size_t p) {
    members_.clear();
    for (size_t i = 0; i < n; ++i) {
      if (parts == 1 || (mix_id(ids[i]) >> 16) % parts == p) members_.push_back(static_cast<uint32_t>(i));
    }
    assign_checked(&batch_, ids, members_.size(), members_.data());
  };
  for (size_t p = 0; p < parts; ++p) {
    select(p);
    store_->reserve_rows(batch_.unique().data(), batch_.num_unique());
  }
  bool wrote = false;
  try {
    for (size_t p = 0; p < parts; ++p) {
      if (parts > 1) {
        select(p);
        store_->reserve_rows(batch_.unique().data(), batch_.num_unique());  // other ids than before, if they were changed
      }
      for (size_t begin = 0; begin < batch_.num_unique();) {
        const size_t count = std::min(store_->max_pinned(), batch_.num_unique() - begin);
        frames_.resize(count);
        store_->pin(batch_.unique().data() + begin, count, true, frames_.data());
        wrote = true;
        for (size_t i = 0; i < count; ++i) {
          const size_t u = begin + i;
          const float* value = values + size_t{batch_.order()[batch_.offsets()[u + 1] - 1]} * f.length;
          std::byte* record = store_->cache().record(frames_[i]);
          write_field(f, value, record);
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
