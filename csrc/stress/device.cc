#include "stress/device.h"

#include <algorithm>
#include <cstring>

namespace bunkbed::stress {

namespace {

using Locks = std::scoped_lock<std::recursive_mutex, std::recursive_mutex>;

}  // namespace

Device::Device(Subject& subject, size_t frames)
    : subject_(subject),
      num_frames_(std::min(frames, subject.rows())),
      floats_(subject.table->payload_bytes() / sizeof(float)) {}

void Device::attach() {
  map_ = DeviceMap::make(subject_.name(), num_frames_);
  memory_.assign(num_frames_ * floats_, -1.0f);
  subject_.table->set_device_cache(map_, [this] { write_back(); });
}

void Device::detach() {
  if (map_ == nullptr) return;
  write_back();
  subject_.table->set_device_cache(nullptr, nullptr);
  map_.reset();
}

// Requires `mutex_`. Returns null where the frames that other threads use leave too few.
std::unique_ptr<DeviceMap::Plan> Device::place(const Batch& batch) {
  auto plan = map_->plan(batch, 0);
  if (plan == nullptr) return plan;
  const auto arrays = plan->arrays();
  const size_t bytes = floats_ * sizeof(float);
  std::vector<std::byte> coming(arrays->load_rows.size() * bytes), going(arrays->evict_rows.size() * bytes);
  subject_.table->gather_records(arrays->load_rows.data(), arrays->load_rows.size(), coming.data());
  for (size_t i = 0; i < arrays->evict_rows.size(); ++i)
    std::memcpy(&going[i * bytes], frame(arrays->evict_frames[i]), bytes);
  subject_.table->scatter_records(arrays->evict_rows.data(), arrays->evict_rows.size(), going.data());
  for (size_t i = 0; i < arrays->load_rows.size(); ++i)
    std::memcpy(frame(arrays->load_frames[i]), &coming[i * bytes], bytes);
  plan->done();
  return plan;
}

void Device::write_back() {
  const Locks guard(mutex_, frames_mutex_);
  const DeviceMap::Dirty dirty = map_->dirty();
  const size_t bytes = floats_ * sizeof(float);
  std::vector<std::byte> records(dirty.rows.size() * bytes);
  for (size_t i = 0; i < dirty.rows.size(); ++i) std::memcpy(&records[i * bytes], frame(dirty.frames[i]), bytes);
  subject_.table->scatter_records(dirty.rows.data(), dirty.rows.size(), records.data());
  map_->mark_clean(dirty.frames.data(), dirty.frames.size());
}

void Device::verify(const std::string& when, Tally* tally) {
  if (const DeviceStats stats = map_->stats(); stats.pinned > 0 || stats.leaving > 0 || stats.plans > 0) {
    tally->fail(when + ": " + std::to_string(stats.pinned) + " frames pinned, " + std::to_string(stats.leaving) +
                " rows leaving");
  }
  std::vector<int64_t> ids, frames(subject_.rows());
  for (size_t row = 0; row < subject_.rows(); ++row) ids.push_back(subject_.id_of(row));
  map_->find(ids.data(), ids.size(), frames.data());
  std::vector<size_t> rows;
  std::vector<float> values;
  for (size_t row = 0; row < subject_.rows(); ++row) {
    if (frames[row] < 0) continue;
    rows.push_back(row);
    values.insert(values.end(), frame(frames[row]), frame(frames[row]) + subject_.shape().dim);
  }
  Reading(subject_.bounds, rows).check(values.data(), subject_.shape().dim, when, tally);
}

// Makes one training step: places the rows in frames, reads them, and changes them there.
void Device::step(Worker* worker, const Batch& batch, const std::map<size_t, int32_t>& amounts) {
  Subject& s = subject_;
  const size_t dim = s.shape().dim;
  std::vector<size_t> rows;
  for (const int64_t id : batch.unique()) rows.push_back(s.row_of(id));
  std::unique_ptr<DeviceMap::Plan> plan;
  const Reading reading(s.bounds, rows);
  if (!worker->attempt(s, "device: place",
                       [&] {
                         const std::lock_guard guard(mutex_);
                         plan = place(batch);
                       }) ||
      plan == nullptr) {
    return;
  }
  const auto& frames = plan->arrays()->frames;
  std::vector<float> values;
  {
    const std::lock_guard guard(frames_mutex_);
    for (const int64_t number : frames) values.insert(values.end(), frame(number), frame(number) + dim);
  }
  reading.check(values.data(), dim, "device: lookup", &worker->tally());
  if (amounts.empty()) return;
  for (const auto& [row, by] : amounts) s.bounds.begin(row, by);
  const bool is_done = worker->attempt(s, "device: step", [&] {
    const std::lock_guard guard(frames_mutex_);
    s.table->update(nullptr, 0, nullptr, std::nullopt, std::nullopt);
    plan->mark_dirty();
    for (size_t i = 0; i < rows.size(); ++i) {
      const int32_t by = amounts.at(rows[i]);
      for (size_t j = 0; j < dim; ++j) frame(frames[i])[j] += element(by, j);
    }
  });
  for (const auto& [row, by] : amounts) is_done ? s.bounds.end(row, by) : s.bounds.cancel(row, by);
}

bool Device::call(Worker* worker, bool is_quiet) {
  Subject& s = subject_;
  Rng& rng = worker->rng();
  const size_t most = std::max<size_t>(1, num_frames_ / 4);
  std::map<size_t, int32_t> amounts;
  for (size_t n = 1 + rng.below(std::min<size_t>(most, 24)); n > 0 && amounts.size() + 2 <= num_frames_; --n) {
    const size_t row = rng.below(s.shape().pairs);
    if (s.is_owned(row)) continue;
    const auto by = static_cast<int32_t>(1 + rng.below(2));
    amounts[row] = amounts[s.twin(row)] = by;
  }
  std::vector<size_t> rows;
  for (const auto& [row, by] : amounts) rows.push_back(row);
  const std::vector<int64_t> ids = s.ids_of(rows);
  const Batch batch = s.table->batch(ids.data(), ids.size());
  const size_t choice = rng.below(12);
  if (choice < 7) {
    step(worker, batch, is_quiet || choice < 2 ? std::map<size_t, int32_t>() : amounts);
  } else if (choice < 8) {
    worker->attempt(s, "device: expect", [&] {
      const uint32_t number = map_->expect(batch);
      if (number != DeviceMap::kWindowFull) map_->forget(number);
    });
  } else if (choice < 9) {
    worker->attempt(s, "device: write back", [&] { write_back(); });
  } else if (choice < 10) {  // writes back first, as a table's own call next to its layers does
    std::vector<float> values(rows.size() * s.shape().dim);
    const Locks guard(mutex_, frames_mutex_);
    const Reading reading(s.bounds, rows);
    if (worker->attempt(s, "device: lookup below", [&] {
          write_back();
          s.table->lookup(ids.data(), ids.size(), true, values.data());
        })) {
      reading.check(values.data(), s.shape().dim, "device: lookup below", &worker->tally());
    }
  } else {
    const Locks guard(mutex_, frames_mutex_);
    const std::vector<int32_t> counts = s.bounds.lows();
    if (worker->attempt(s, "device: commit", [&] {
          write_back();
          s.table->commit(std::nullopt, "");
        })) {
      for (size_t row = 0; row < counts.size(); ++row) s.floor.raise_low(row, counts[row]);
    }
  }
  return true;
}

}  // namespace bunkbed::stress
