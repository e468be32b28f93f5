#include "stress/subject.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <system_error>

#include "base/error.h"
#include "maintenance/check.h"
#include "stress/stress.h"

namespace bunkbed::stress {

Subject::Subject(std::string name, std::string path, const Shape& shape, uint64_t seed)
    : bounds(2 * shape.pairs),
      floor(2 * shape.pairs),
      name_(std::move(name)),
      path_(std::move(path)),
      shape_(shape),
      rng_(seed) {
  for (size_t row = 0; row < rows(); ++row) rows_by_id_[id_of(row)] = row;
}

int64_t Subject::id_of(size_t row) const {
  const auto id = static_cast<int64_t>(row);
  return shape_.is_open ? id * 1'000'003'007 + 11 : id;
}

std::vector<int64_t> Subject::ids_of(const std::vector<size_t>& rows) const {
  std::vector<int64_t> ids;
  for (const size_t row : rows) ids.push_back(id_of(row));
  return ids;
}

size_t Subject::row_of(int64_t id) const {
  const auto found = rows_by_id_.find(id);
  return found == rows_by_id_.end() ? rows() : found->second;
}

TableSpec Subject::spec() const {
  TableSpec spec;
  spec.num_rows = shape_.is_open ? -1 : static_cast<int64_t>(rows());
  spec.dim = shape_.dim;
  spec.optimizer.kind = OptimizerKind::kSgd;
  spec.optimizer.lr = 1.0;
  spec.belongs_to_run = shape_.in_run;
  spec.is_scratch = shape_.is_scratch;
  return spec;
}

size_t Subject::some_ram(Rng* rng) const {
  if (!shape_.on_disk) return 0;
  const size_t least = minimum_ram(spec(), rows(), true);
  switch (rng->below(4)) {
    case 0:
      return least;
    case 1:
      return least + rng->below(least);
    case 2:
      return 4 * least;
    default:
      return least + rng->below(least / 8);
  }
}

void Subject::set_some_ram(Rng* rng) {
  const size_t bytes = some_ram(rng);
  size_t most = most_ram_;
  while (most < bytes && !most_ram_.compare_exchange_weak(most, bytes)) {
  }
  table->set_ram(bytes);
}

std::vector<size_t> Subject::all_rows() const {
  std::vector<size_t> all(rows());
  std::iota(all.begin(), all.end(), size_t{0});
  return all;
}

std::shared_ptr<Batch> Subject::shared_batch(Rng* rng) {
  const std::lock_guard guard(batches_mutex_);
  if (batches_.size() < 4) batches_.resize(4);
  std::shared_ptr<Batch>& batch = batches_[rng->below(batches_.size())];
  if (batch == nullptr || rng->one_in(6)) {
    std::vector<size_t> wanted;
    for (size_t n = 1 + rng->below(24); n > 0; --n) {
      const size_t row = rng->below(rows());
      wanted.insert(wanted.end(), {row, twin(row)});
    }
    const std::vector<int64_t> ids = ids_of(wanted);
    batch = std::make_shared<Batch>(table->batch(ids.data(), ids.size()));
  }
  return batch;
}

void Subject::create(Tally* tally) {
  if (shape_.is_scratch) close();
  table = Table::create(vfs::posix(), shape_.on_disk ? path_ : "", name_, spec(), some_ram(&rng_));
  for (size_t row = 0; row < rows(); ++row) {
    bounds.put(row, 0);
    floor.put(row, 0);
  }
  if (shape_.has_limit) limit_files(tally);
}

// Stores every row, and limits the files to little more than such a table needs at least.
void Subject::limit_files(Tally* tally) {
  const std::vector<int64_t> ids = ids_of(all_rows());
  std::vector<float> grads(ids.size() * shape_.dim);
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = -element(1, i % shape_.dim);
  table->update(ids.data(), ids.size(), grads.data(), std::nullopt, std::nullopt);
  for (size_t row = 0; row < rows(); ++row) bounds.put(row, 1);
  commit("");
  close();
  disk_bytes_ = 1;
  open(tally);
}

// Returns the limit that the error message asks for.
static uint64_t disk_wanted(const std::string& message) {
  const size_t at = message.rfind("disk=");
  return at == std::string::npos ? 0 : std::stoull(message.substr(at + 5));
}

void Subject::open(Tally* tally) {
  OpenOptions options;
  options.ram_bytes = some_ram(&rng_);
  options.disk_bytes = disk_bytes_;
  options.through_run = shape_.in_run;
  if (shape_.in_run && pinned_epoch > 0) options.epoch = pinned_epoch;
  const size_t most_ram = most_ram_.exchange(options.ram_bytes);
  const auto open_table = [&] { table = Table::open(vfs::posix(), path_, name_, options); };
  try {
    return open_table();
  } catch (const Error& error) {
    if (disk_bytes_ == 0 || error.kind() != ErrorKind::kInvalid) throw;
    if (disk_bytes_ > 1 && options.ram_bytes < most_ram) {
      ++tally->refused["open: no room within its limit with less RAM"];  // smaller chunks pack less tightly
      options.ram_bytes = most_ram_ = most_ram;
      return open_table();
    }
    if (disk_bytes_ > 1) tally->fail(std::string("open: within the limit it had: ") + error.what());
    // Little more than what it needs, so that it waits and compacts.
    disk_bytes_ = disk_wanted(error.what());
    disk_bytes_ += disk_bytes_ / 8 * rng_.below(3);
    options.disk_bytes = disk_bytes_;
  }
  open_table();
}

void Subject::close() {
  const std::lock_guard guard(batches_mutex_);
  batches_.clear();  // a batch belongs to one table
  if (table != nullptr) table->close();
  table.reset();
}

void Subject::settle(Tally* tally) {
  const std::vector<size_t> all = all_rows();
  const std::vector<int64_t> ids = ids_of(all);
  std::vector<float> values(all.size() * shape_.dim);
  const Reading reading(floor, all);
  table->lookup(ids.data(), ids.size(), false, values.data());
  const std::vector<int32_t> found = reading.check(values.data(), shape_.dim, "opened again", tally, &bounds);
  for (const size_t row : all) {
    bounds.put(row, std::max(0, found[row]));
    floor.put(row, std::max(0, found[row]));
  }
}

void Subject::verify(const std::string& when, Tally* tally) {
  const std::vector<size_t> all = all_rows();
  const std::vector<int64_t> ids = ids_of(all);
  std::vector<float> values(all.size() * shape_.dim);
  for (const bool touch : {true, false}) {
    table->lookup(ids.data(), ids.size(), touch, values.data());
    Reading(bounds, all).check(values.data(), shape_.dim, when + ", lookup", tally);
  }
  table->get(ids.data(), ids.size(), 0, values.data());
  Reading(bounds, all).check(values.data(), shape_.dim, when + ", get", tally);
  const std::unique_ptr<bool[]> is_there(new bool[all.size()]);
  table->contains(ids.data(), ids.size(), is_there.get());
  size_t stored = 0;
  for (const size_t row : all) {
    stored += bounds.low(row) > 0;
    if (is_there[row] != (bounds.low(row) > 0))
      tally->fail(when + ": contains() is wrong for row " + std::to_string(row));
  }
  scan_and_check(*this, table.get(), bounds, 1 + rng_.below(100), when + ", scan", [] {}, tally);
  if (const uint64_t rows = table->stats().stored_rows; rows != stored) {
    tally->fail(when + ": stats() says " + std::to_string(rows) + " stored rows, there are " + std::to_string(stored));
  }
}

uint64_t Subject::commit(const std::string& keep) {
  const std::vector<int32_t> counts = bounds.lows();
  const uint64_t epoch = table->commit(std::nullopt, keep);
  for (size_t row = 0; row < rows(); ++row) floor.raise_low(row, counts[row]);
  if (!keep.empty()) kept_[keep] = counts;
  return epoch;
}

std::string Subject::some_kept(Rng* rng) const {
  if (kept_.empty()) return "";
  auto chosen = kept_.begin();
  std::advance(chosen, static_cast<ptrdiff_t>(rng->below(kept_.size())));
  return chosen->first;
}

void Subject::rewind(Rng* rng, Tally* tally) {
  const std::string name = some_kept(rng);
  if (name.empty()) return;
  table->rewind(name, std::nullopt);
  for (size_t row = 0; row < rows(); ++row) {
    bounds.put(row, kept_.at(name)[row]);
    floor.put(row, kept_.at(name)[row]);
  }
  ++tally->calls["rewind"];
  verify("after a rewind", tally);
  if (rng->one_in(2)) {
    table->drop(name);
    kept_.erase(name);
    ++tally->calls["drop"];
  }
}

void Subject::set_some(Rng* rng) {
  std::map<size_t, int32_t> counts;  // for a row that occurs twice the last value counts
  std::vector<int64_t> ids;
  std::vector<float> values;
  for (size_t n = 1 + rng->below(40); n > 0; --n) {
    const size_t first = rng->below(shape_.pairs);
    for (const size_t row : {first, twin(first)}) {
      const int32_t count = counts.emplace(row, bounds.low(row)).first->second += 1;
      ids.push_back(id_of(row));
      for (size_t j = 0; j < shape_.dim; ++j) values.push_back(element(count, j));
    }
  }
  table->set(ids.data(), ids.size(), 0, values.data());
  for (const auto& [row, count] : counts) bounds.put(row, count);
}

void Subject::check_files(Tally* tally) {
  if (!is_durable()) return;
  ++tally->calls["check_table"];
  for (const std::string& problem : check_table(vfs::posix(), path_)) tally->fail("check: " + problem);
  if (disk_bytes_ == 0) return;
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) {
    std::error_code is_gone;  // a temporary file of an index snapshot, which a thread of its own writes
    if (const uint64_t size = entry.file_size(is_gone); !is_gone) bytes += size;
  }
  if (bytes > disk_bytes_) {
    tally->fail("its files take " + std::to_string(bytes) + " bytes, its limit is " + std::to_string(disk_bytes_));
  }
}

}  // namespace bunkbed::stress
