#include "stress/worker.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace bunkbed::stress {

std::string Worker::allowed(const Subject& subject, const std::string& call, const Error& error) {
  const std::string what = error.what();
  const auto says = [&what](const char* part) { return what.find(part) != std::string::npos; };
  if (error.kind() == ErrorKind::kClosed && episode_.is_closing) {
    is_over_ = true;
    return "closed";
  }
  const bool may_change = !episode_.is_quiet || episode_.goes_back || subject.shape().has_limit;
  if (call == "scan" && error.kind() == ErrorKind::kBroken && may_change) {
    if (says("was changed while it was scanned")) return "changed";
    if (says("compaction moved its records while it was scanned")) return "compacted";
  }
  if (episode_.has_device && error.kind() == ErrorKind::kBroken && call.rfind("device: ", 0) != 0) {
    if (says("held by a device cache")) return "held by the device";
    if (says("in use by a device cache")) return "in use by the device";
  }
  if (subject.shape().has_limit) {
    if (error.kind() == ErrorKind::kSystem && error.error_number() == ENOSPC) return "no room within its limit";
    if (call == "set_ram" && says("its writes are so small")) return "no room within its limit";
  }
  return "";
}

// ---- Rows

size_t Worker::some_count(const Subject& subject) {
  switch (rng_.below(16)) {
    case 0:
      return subject.shape().pairs;  // more than its RAM holds
    case 1:
      return 1 + rng_.below(subject.shape().pairs / 2);
    default:
      return 1 + rng_.below(16);
  }
}

std::vector<size_t> Worker::rows_to_read(const Subject& subject, size_t n) {
  std::vector<size_t> rows;
  const size_t hot = std::max<size_t>(1, subject.shape().pairs / 8);
  for (; n > 0; --n) {
    const size_t row = rng_.below(rng_.one_in(2) ? hot : subject.shape().pairs);
    rows.push_back(rng_.one_in(2) ? row : subject.twin(row));
    if (!rng_.one_in(4)) rows.push_back(subject.twin(rows.back()));
    if (rng_.one_in(8)) rows.push_back(rows[rng_.below(rows.size())]);
  }
  return rows;
}

std::map<size_t, int32_t> Worker::rows_to_change(const Subject& subject, size_t n) {
  std::map<size_t, int32_t> amounts;
  const size_t hot = std::max<size_t>(8, subject.shape().pairs / 8);
  for (; n > 0; --n) {
    const size_t row = rng_.below(rng_.one_in(2) ? std::min(hot, subject.shape().pairs) : subject.shape().pairs);
    if (subject.is_owned(row)) continue;
    const auto times = static_cast<int32_t>(1 + rng_.one_in(4));
    amounts[row] += times;
    amounts[subject.twin(row)] += times;
  }
  return amounts;
}

std::vector<size_t> Worker::own_rows(const Subject& subject) {
  std::vector<size_t> rows;
  for (size_t tries = 4 + rng_.below(100); tries > 0; --tries) {
    const size_t row = rng_.below(subject.shape().pairs);
    if (!subject.is_owned(row) || subject.owner(row, episode_.threads) != index_) continue;
    if (std::find(rows.begin(), rows.end(), row) != rows.end()) continue;
    rows.insert(rows.end(), {row, subject.twin(row)});
  }
  return rows;
}

template <typename Run>
void Worker::change(Subject& s, const std::string& name, const std::map<size_t, int32_t>& amounts, const Run& run) {
  if (amounts.empty()) return;
  for (const auto& [row, by] : amounts) s.bounds.begin(row, by);
  const bool is_done = attempt(s, name, run);
  for (const auto& [row, by] : amounts) is_done ? s.bounds.end(row, by) : s.bounds.cancel(row, by);
}

// ---- Reading

void Worker::lookup(Subject& s) {
  const std::vector<size_t> rows = rows_to_read(s, some_count(s));
  const std::vector<int64_t> ids = s.ids_of(rows);
  std::vector<float> out(rows.size() * s.shape().dim);
  const bool touch = !rng_.one_in(3);
  const Reading reading(s.bounds, rows);
  if (attempt(s, "lookup", [&] { s.table->lookup(ids.data(), ids.size(), touch, out.data()); })) {
    reading.check(out.data(), s.shape().dim, "lookup", &tally_);
  }
}

void Worker::lookup_batch(Subject& s) {
  std::shared_ptr<Batch> batch;
  if (rng_.one_in(2)) {
    batch = s.shared_batch(&rng_);
  } else {
    const std::vector<int64_t> ids = s.ids_of(rows_to_read(s, some_count(s)));
    batch = std::make_shared<Batch>(s.table->batch(ids.data(), ids.size()));
  }
  std::vector<size_t> rows;
  for (const uint32_t u : batch->inverse()) rows.push_back(s.row_of(batch->unique()[u]));
  std::vector<float> out(rows.size() * s.shape().dim);
  for (size_t times = 1 + rng_.below(2); times > 0; --times) {
    const Reading reading(s.bounds, rows);
    if (attempt(s, "lookup of a batch", [&] { s.table->lookup(*batch, !rng_.one_in(3), out.data()); })) {
      reading.check(out.data(), s.shape().dim, "lookup of a batch", &tally_);
    }
  }
}

void Worker::lookup_bags(Subject& s) {
  const std::vector<size_t> rows = rows_to_read(s, some_count(s));
  const std::vector<int64_t> ids = s.ids_of(rows);
  const size_t dim = s.shape().dim;
  std::vector<int64_t> offsets{0};
  while (rng_.below(8) > 0 && offsets.size() < rows.size()) {
    const auto left = rows.size() - static_cast<size_t>(offsets.back());
    offsets.push_back(offsets.back() + static_cast<int64_t>(rng_.below(std::min<size_t>(left, 9) + 1)));
  }
  std::vector<float> weights(rows.size());
  for (float& weight : weights) weight = static_cast<float>(1 + rng_.below(3));
  const bool is_weighted = rng_.one_in(2);
  if (!is_weighted) std::fill(weights.begin(), weights.end(), 1.0f);
  std::vector<float> out(offsets.size() * dim);
  std::vector<int32_t> lows;
  for (const size_t row : rows) lows.push_back(s.bounds.low(row));
  if (!attempt(s, "lookup_bags", [&] {
        s.table->lookup_bags(ids.data(), ids.size(), offsets.data(), offsets.size(), Pooling::kSum,
                             is_weighted ? weights.data() : nullptr, !rng_.one_in(3), out.data());
      })) {
    return;
  }
  for (size_t bag = 0; bag < offsets.size(); ++bag) {
    double low = 0, high = 0;
    const size_t end = bag + 1 < offsets.size() ? static_cast<size_t>(offsets[bag + 1]) : rows.size();
    for (auto i = static_cast<size_t>(offsets[bag]); i < end; ++i) {
      low += double{weights[i]} * lows[i];
      high += double{weights[i]} * s.bounds.high(rows[i]);
    }
    const double sum = out[bag * dim];
    bool is_right = sum >= low && sum <= high;
    for (size_t j = 0; j < dim; ++j) is_right &= out[bag * dim + j] == out[bag * dim] * static_cast<float>(1 + j % 4);
    ++tally_.rows;
    if (!is_right) {
      tally_.fail("lookup_bags: bag " + std::to_string(bag) + " is " + std::to_string(sum) + ", expected " +
                  std::to_string(low) + " to " + std::to_string(high) + ", or is torn");
    }
  }
}

void Worker::get(Subject& s) {
  const std::vector<size_t> rows = rows_to_read(s, some_count(s));
  const std::vector<int64_t> ids = s.ids_of(rows);
  std::vector<float> out(rows.size() * s.shape().dim);
  const Reading reading(s.bounds, rows);
  if (attempt(s, "get", [&] { s.table->get(ids.data(), ids.size(), 0, out.data()); })) {
    reading.check(out.data(), s.shape().dim, "get", &tally_);
  }
}

void Worker::gather_records(Subject& s) {
  const std::vector<size_t> rows = rows_to_read(s, some_count(s));
  const std::vector<int64_t> ids = s.ids_of(rows);
  const size_t bytes = s.table->payload_bytes(), dim = s.shape().dim;
  std::vector<std::byte> records(rows.size() * bytes);
  const Reading reading(s.bounds, rows);
  if (!attempt(s, "gather_records", [&] { s.table->gather_records(ids.data(), ids.size(), records.data()); })) return;
  std::vector<float> out(rows.size() * dim);
  for (size_t i = 0; i < rows.size(); ++i)
    std::memcpy(out.data() + i * dim, records.data() + i * bytes, dim * sizeof(float));
  reading.check(out.data(), dim, "gather_records", &tally_);
}

void Worker::contains(Subject& s) {
  const std::vector<size_t> rows = rows_to_read(s, some_count(s));
  const std::vector<int64_t> ids = s.ids_of(rows);
  const std::unique_ptr<bool[]> found(new bool[rows.size()]);
  std::vector<int32_t> lows;
  for (const size_t row : rows) lows.push_back(s.bounds.low(row));
  if (!attempt(s, "contains", [&] { s.table->contains(ids.data(), ids.size(), found.get()); })) return;
  for (size_t i = 0; i < rows.size(); ++i) {
    ++tally_.rows;
    if (found[i] ? s.bounds.high(rows[i]) == 0 : lows[i] > 0) {
      tally_.fail("contains: row " + std::to_string(rows[i]) + (found[i] ? " was never written" : " is missing"));
    }
  }
}

void Worker::scan(Subject& s) {
  const size_t step = 1 + rng_.below(200);
  if (attempt(s, "scan", [&] {
        scan_and_check(
            s, s.table.get(), s.bounds, step, "scan",
            [&] {
              if (rng_.one_in(3)) harmless(s);
            },
            &tally_);
      })) {
    ++tally_.calls["scans that came to their end"];
  }
}

// ---- Changing

void Worker::update(Subject& s, std::optional<int64_t> step) {
  const std::map<size_t, int32_t> amounts = rows_to_change(s, some_count(s));
  std::vector<int64_t> ids;
  for (const auto& [row, by] : amounts) ids.insert(ids.end(), static_cast<size_t>(by), s.id_of(row));
  for (size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[rng_.below(i)]);
  std::vector<float> grads(ids.size() * s.shape().dim);
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = -element(1, i % s.shape().dim);
  const auto lr = rng_.one_in(4) ? std::optional<double>(1.0) : std::nullopt;
  change(s, "update", amounts, [&] { s.table->update(ids.data(), ids.size(), grads.data(), lr, step); });
}

void Worker::update_batch(Subject& s) {
  const std::map<size_t, int32_t> amounts = rows_to_change(s, some_count(s));
  std::vector<int64_t> ids;
  for (const auto& [row, by] : amounts) ids.insert(ids.end(), static_cast<size_t>(by), s.id_of(row));
  const Batch batch = s.table->batch(ids.data(), ids.size());
  const size_t dim = s.shape().dim;
  std::vector<float> sums(batch.num_unique() * dim);
  std::vector<size_t> rows;
  for (size_t u = 0; u < batch.num_unique(); ++u) {
    rows.push_back(s.row_of(batch.unique()[u]));
    for (size_t j = 0; j < dim; ++j) sums[u * dim + j] = -element(amounts.at(rows[u]), j);
  }
  if (rng_.one_in(2)) {  // as a training step does
    std::vector<size_t> places;
    for (const uint32_t u : batch.inverse()) places.push_back(rows[u]);
    std::vector<float> out(places.size() * dim);
    const Reading reading(s.bounds, places);
    if (attempt(s, "lookup of a batch", [&] { s.table->lookup(batch, true, out.data()); })) {
      reading.check(out.data(), dim, "lookup of a batch", &tally_);
    }
  }
  change(s, "update of a batch", amounts, [&] { s.table->update(batch, sums.data(), std::nullopt, std::nullopt); });
}

void Worker::set(Subject& s) {
  const std::vector<size_t> rows = own_rows(s);
  std::map<size_t, int32_t> amounts;
  std::vector<int64_t> ids = s.ids_of(rows);
  std::vector<float> values;
  for (const size_t row : rows) {
    amounts[row] = static_cast<int32_t>(1 + rng_.below(3));
    amounts[row] = amounts.contains(s.twin(row)) ? amounts[s.twin(row)] : amounts[row];
    for (size_t j = 0; j < s.shape().dim; ++j) values.push_back(element(s.bounds.low(row) + amounts[row], j));
  }
  change(s, "set", amounts, [&] { s.table->set(ids.data(), ids.size(), 0, values.data()); });
}

void Worker::write_records(Subject& s) {
  const std::vector<size_t> rows = own_rows(s);
  std::map<size_t, int32_t> amounts;
  const std::vector<int64_t> ids = s.ids_of(rows);
  const size_t bytes = s.table->payload_bytes(), dim = s.shape().dim;
  std::vector<std::byte> records(rows.size() * bytes);
  for (size_t i = 0; i < rows.size(); ++i) {
    amounts[rows[i]] = 1;
    for (size_t j = 0; j < dim; ++j) {
      const float value = element(s.bounds.low(rows[i]) + 1, j);
      std::memcpy(records.data() + i * bytes + j * sizeof(float), &value, sizeof(float));
    }
  }
  if (s.shape().on_disk && rng_.one_in(2)) {
    change(s, "append_records", amounts, [&] { s.table->append_records(ids.data(), ids.size(), records.data()); });
  } else {
    change(s, "scatter_records", amounts, [&] { s.table->scatter_records(ids.data(), ids.size(), records.data()); });
  }
}

bool Worker::update_as_one(const std::vector<std::unique_ptr<Subject>>& subjects) {
  const int64_t step = episode_.step.fetch_add(1, kOrder) + 1;
  for (const auto& subject : subjects) update(*subject, step);
  return !is_over_;
}

}  // namespace bunkbed::stress
