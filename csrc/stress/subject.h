// A table under stress: the values it may hold, and the calls that are made while no other thread is at work.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "batch/batch.h"
#include "stress/oracle.h"
#include "scan/scan.h"
#include "table/table.h"

namespace bunkbed::stress {

struct Shape {
  size_t pairs = 300;
  uint32_t dim = 4;
  bool is_open = false;  // any id, not [0, num_rows)
  bool on_disk = true;
  bool is_scratch = false;
  bool has_limit = false;  // of its files
  bool in_run = false;
};

class Subject {
 public:
  Subject(std::string name, std::string path, const Shape& shape, uint64_t seed);

  const std::string& name() const { return name_; }
  const std::string& path() const { return path_; }
  const Shape& shape() const { return shape_; }
  size_t rows() const { return 2 * shape_.pairs; }
  size_t twin(size_t row) const { return (row + shape_.pairs) % rows(); }
  int64_t id_of(size_t row) const;
  std::vector<int64_t> ids_of(const std::vector<size_t>& rows) const;
  // Returns rows() for an id that is not the subject's.
  size_t row_of(int64_t id) const;
  // In an episode only set(), scatter_records() and append_records() of one thread change an owned row, and update() of
  // any the others.
  bool is_owned(size_t row) const { return row % shape_.pairs % 8 == 7; }
  size_t owner(size_t row, size_t threads) const { return row % shape_.pairs / 8 % threads; }
  size_t some_ram(Rng* rng) const;
  void set_some_ram(Rng* rng);
  bool is_durable() const { return shape_.on_disk && !shape_.is_scratch; }

  // Changes only while no other thread is at work.
  std::shared_ptr<Table> table;
  Bounds bounds;
  Bounds floor;  // low: counts that are durable at least

  // Two threads may use one batch of one table.
  std::shared_ptr<Batch> shared_batch(Rng* rng);

  // ---- While no other thread is at work.
  void create(Tally* tally);
  void open(Tally* tally);  // at its last commit
  void close();
  // After closing without a commit and opening: checks that each row is between the durable and the requested count,
  // and takes the count that it finds.
  void settle(Tally* tally);
  // Checks every row exactly, by lookup, get, contains and scan.
  void verify(const std::string& when, Tally* tally);
  uint64_t commit(const std::string& keep);
  void rewind(Rng* rng, Tally* tally);
  void set_some(Rng* rng);
  // Checks its files without the open table: problems, and the limit on their bytes.
  void check_files(Tally* tally);
  std::string some_kept(Rng* rng) const;
  const std::vector<int32_t>& kept(const std::string& name) const { return kept_.at(name); }
  uint64_t pinned_epoch = 0;  // of a run

 private:
  TableSpec spec() const;
  void limit_files(Tally* tally);
  std::vector<size_t> all_rows() const;

  const std::string name_, path_;
  const Shape shape_;
  Rng rng_;
  uint64_t disk_bytes_ = 0;
  std::atomic<size_t> most_ram_{0};  // since it was opened
  std::unordered_map<int64_t, size_t> rows_by_id_;
  std::map<std::string, std::vector<int32_t>> kept_;  // commits that were kept while no other thread was at work
  std::mutex batches_mutex_;                          // guards batches_
  std::vector<std::shared_ptr<Batch>> batches_;
};

// Scans and checks all rows; throws when a change ends the scan. Runs `between` after each step. Else returns true.
template <typename Between>
bool scan_and_check(Subject& subject, Table* table, const Bounds& lows, size_t step, const std::string& call,
                    const Between& between, Tally* tally) {
  const size_t dim = subject.shape().dim;
  const std::vector<int32_t> before = lows.lows();
  std::vector<int32_t> seen(subject.rows(), -1);
  std::vector<int64_t> ids(step);
  std::vector<float> values(step * dim);
  float* const out[] = {values.data()};
  Scan scan(table, {0});
  while (const size_t n = scan.next(step, ids.data(), out)) {
    for (size_t i = 0; i < n; ++i) {
      const size_t row = subject.row_of(ids[i]);
      const std::string where = call + ": id " + std::to_string(ids[i]);
      if (row == subject.rows()) {
        tally->fail(where + " was never written");
        continue;
      }
      if (seen[row] >= 0) tally->fail(where + " was given twice");
      const std::vector<size_t> one{row};
      const Reading reading(lows, one, {before[row]});
      seen[row] = std::max(0, reading.check(values.data() + i * dim, dim, call, tally, &subject.bounds)[0]);
      const int32_t other = seen[subject.twin(row)];
      if (other >= 0 && other != seen[row]) {
        tally->fail(where + " holds " + std::to_string(seen[row]) + ", and the row that changes with it " +
                    std::to_string(other));
      }
    }
    between();
  }
  size_t missing = 0;
  for (size_t row = 0; row < subject.rows(); ++row) {
    if (seen[row] < 0 && before[row] > 0) ++missing;
  }
  if (missing > 0) tally->fail(call + ": " + std::to_string(missing) + " stored rows are missing");
  return true;
}

}  // namespace bunkbed::stress
