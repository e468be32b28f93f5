// A table whose values are known exactly: Zeros, plain SGD with lr 1 and whole-number gradients, so that a row is minus
// the sum of its gradients, in every dtype (as long as the numbers stay small).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "batch/gradients.h"
#include "scan/scan.h"
#include "table/table.h"
#include "tests/check.h"

namespace bunkbed::test {

using Rows = std::map<int64_t, float>;  // id -> value of element 0

inline TableSpec whole_numbers(int64_t num_rows, uint32_t dim, DType dtype = DType::kFloat32) {
  TableSpec spec;
  spec.num_rows = num_rows;
  spec.dim = dim;
  spec.dtype = dtype;
  spec.optimizer.kind = OptimizerKind::kSgd;
  spec.optimizer.lr = 1.0;
  return spec;
}

// Element d of a row whose element 0 is `value`: all elements differ, so that a shifted copy is detected.
inline float element(float value, size_t d) { return value * static_cast<float>(1 + d % 3); }

inline void update(Table* table, const std::vector<int64_t>& ids, const std::vector<float>& grads) {
  const size_t dim = table->spec().dim;
  std::vector<float> wide(ids.size() * dim);
  for (size_t i = 0; i < ids.size(); ++i) {
    for (size_t d = 0; d < dim; ++d) wide[i * dim + d] = element(grads[i], d);
  }
  table->update(ids.data(), ids.size(), wide.data(), std::nullopt, std::nullopt);
}

// The same through a batch of the ids.
inline void update(Table* table, const Batch& batch, const std::vector<float>& grads) {
  const size_t dim = table->spec().dim;
  std::vector<float> wide(grads.size() * dim), sums(batch.num_unique() * dim);
  for (size_t i = 0; i < grads.size(); ++i) {
    for (size_t d = 0; d < dim; ++d) wide[i * dim + d] = element(grads[i], d);
  }
  sum_gradients(batch, wide.data(), dim, sums.data());
  table->update(batch, sums.data(), std::nullopt, std::nullopt);
}

inline void apply(Rows* rows, const std::vector<int64_t>& ids, const std::vector<float>& grads) {
  for (size_t i = 0; i < ids.size(); ++i) (*rows)[ids[i]] -= grads[i];
}

inline void check_values(const Rows& expected, const std::vector<int64_t>& ids, const std::vector<float>& values,
                         size_t dim, const std::string& when) {
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto found = expected.find(ids[i]);
    const float value = found == expected.end() ? 0.0f : found->second;
    for (size_t d = 0; d < dim; ++d) {
      if (values[i * dim + d] == element(value, d)) continue;
      std::ostringstream text;
      text << when << ": row " << ids[i] << " element " << d << " is " << values[i * dim + d] << ", expected "
           << element(value, d);
      fail(__FILE__, __LINE__, text.str());
    }
  }
}

// Checks every row of `expected`, some rows that were not trained, and the whole scan.
inline void check_table_is(Table* table, const Rows& expected, const std::string& when, bool scan = true) {
  const size_t dim = table->spec().dim;
  std::vector<int64_t> ids;
  for (const auto& [id, value] : expected) ids.push_back(id);
  const int64_t end = table->spec().num_rows < 0 ? int64_t{1} << 40 : table->spec().num_rows;
  for (int64_t id = 0; id < std::min<int64_t>(end, 20); ++id) ids.push_back(id);
  std::vector<float> values(ids.size() * dim);
  table->get(ids.data(), ids.size(), 0, values.data());
  check_values(expected, ids, values, dim, when + ", get");
  table->lookup(ids.data(), ids.size(), true, values.data());
  check_values(expected, ids, values, dim, when + ", lookup");
  CHECK_EQ(table->stats().stored_rows, expected.size());
  if (!scan) return;
  Scan walk(table, {0});
  std::map<int64_t, int> seen;
  std::vector<int64_t> some(7);
  std::vector<float> rows(some.size() * dim);
  float* const out[] = {rows.data()};
  while (const size_t n = walk.next(some.size(), some.data(), out)) {
    check_values(expected, {some.begin(), some.begin() + static_cast<ptrdiff_t>(n)}, rows, dim, when + ", scan");
    for (size_t i = 0; i < n; ++i) ++seen[some[i]];
  }
  CHECK_EQ(seen.size(), expected.size());
  for (const auto& [id, times] : seen) CHECK_EQ(times, 1);
}

inline std::unique_ptr<Table> open_table(vfs::Vfs& vfs, const std::string& path, size_t ram_bytes,
                                         bool writable = true) {
  OpenOptions options;
  options.ram_bytes = ram_bytes;
  options.writable = writable;
  return Table::open(vfs, path, "t", options);
}

}  // namespace bunkbed::test
