// The values that a table may hold while threads change it. A row's weights are a count, from zero on: with plain SGD,
// lr 1 and gradients of -(1 + column % 4) an update of a row adds 1. A row with only some columns changed is detected.
//
// Each row has two numbers: `high` is raised before the call of a change, `low` after its return. A read that takes
// `low` before its call and `high` after it must find a count between them. Rows r and r + pairs change in the same
// calls by the same amount: they are equal in the result of one call and in one commit.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace bunkbed::stress {

// Relaxed where the processor's own order is enough: an acquire would be a happens-before edge that hides races of the
// core from TSan. On x86-64 each read-modify-write, and each lock of the core's mutex, is a full barrier.
#if defined(__x86_64__)
inline constexpr auto kOrder = std::memory_order_relaxed;
#else
inline constexpr auto kOrder = std::memory_order_seq_cst;
#endif

class Bounds {
 public:
  explicit Bounds(size_t rows)
      : size_(rows), low_(new std::atomic<int32_t>[rows]), high_(new std::atomic<int32_t>[rows]) {
    for (size_t row = 0; row < rows; ++row) put(row, 0);
  }
  size_t size() const { return size_; }
  int32_t low(size_t row) const { return low_[row].load(kOrder); }
  int32_t high(size_t row) const { return high_[row].load(kOrder); }
  void begin(size_t row, int32_t by) { high_[row].fetch_add(by, kOrder); }
  void end(size_t row, int32_t by) { low_[row].fetch_add(by, kOrder); }
  // The call failed and changed nothing.
  void cancel(size_t row, int32_t by) { high_[row].fetch_sub(by, kOrder); }
  // A later read must find at least `count`.
  void raise_low(size_t row, int32_t count) {
    int32_t now = low_[row].load(kOrder);
    while (now < count && !low_[row].compare_exchange_weak(now, count, kOrder)) {
    }
  }
  // Only while no other thread is at work.
  void put(size_t row, int32_t count) {
    low_[row].store(count, kOrder);
    high_[row].store(count, kOrder);
  }
  std::vector<int32_t> lows() const {
    std::vector<int32_t> all(size_);
    for (size_t row = 0; row < size_; ++row) all[row] = low(row);
    return all;
  }

 private:
  const size_t size_;
  std::unique_ptr<std::atomic<int32_t>[]> low_, high_;
};

inline float element(int32_t count, size_t column) {
  return static_cast<float>(count) * static_cast<float>(1 + column % 4);
}

// The calls and findings of one thread.
struct Tally {
  std::map<std::string, uint64_t> calls;
  std::map<std::string, uint64_t> refused;  // calls by reason: an allowed failure that changed nothing
  uint64_t rows = 0;                        // rows whose values were compared
  uint64_t num_wrong = 0;
  std::vector<std::string> wrong;  // the first few

  void fail(const std::string& what) {
    ++num_wrong;
    if (wrong.size() < 8) wrong.push_back(what);
  }
  void add(const Tally& other) {
    for (const auto& [name, count] : other.calls) calls[name] += count;
    for (const auto& [name, count] : other.refused) refused[name] += count;
    rows += other.rows;
    num_wrong += other.num_wrong;
    for (const std::string& what : other.wrong) {
      if (wrong.size() < 8) wrong.push_back(what);
    }
  }
};

// SplitMix64 (Steele et al., 2014).
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  size_t below(size_t n) { return static_cast<size_t>(bits() % n); }
  bool one_in(size_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

// Compares the rows that one call returned, all of one moment. `lows` were taken before the call.
class Reading {
 public:
  Reading(const Bounds& bounds, const std::vector<size_t>& rows) : bounds_(bounds), rows_(rows) {
    for (const size_t row : rows) lows_.push_back(bounds.low(row));
  }
  Reading(const Bounds& bounds, const std::vector<size_t>& rows, std::vector<int32_t> lows)
      : bounds_(bounds), rows_(rows), lows_(std::move(lows)) {}
  // values: float32[rows.size(), dim]. Returns the counts that were found, -1 for a torn row.
  std::vector<int32_t> check(const float* values, size_t dim, const std::string& call, Tally* tally,
                             const Bounds* highs = nullptr) const;

 private:
  const Bounds& bounds_;
  const std::vector<size_t>& rows_;
  std::vector<int32_t> lows_;
};

}  // namespace bunkbed::stress
