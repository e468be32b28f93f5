// A device cache for tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "device/device_cache.h"

namespace bunkbed::test {

// A device cache of which a test says what it holds.
struct SomeRows final : DeviceCache {
  std::set<int64_t> held, in_use;
  std::vector<int64_t> dropped, written;  // rows of give_up() and of arrived()
  size_t most = 10;
  int all_dropped = 0;

  size_t num_held() const override { return held.size(); }
  size_t max_held() const override { return most; }
  size_t num_in_use() const override { return in_use.size(); }
  size_t first_held(const int64_t* rows, size_t n) const override { return first(rows, n, held, true); }
  size_t first_not_held(const int64_t* rows, size_t n) const override { return first(rows, n, held, false); }
  size_t give_up(const int64_t* rows, size_t n) override {
    const size_t busy = std::min(first(rows, n, held, true), first(rows, n, in_use, true));
    if (busy == n) dropped.insert(dropped.end(), rows, rows + n);
    return busy;
  }
  size_t give_up_all() override {
    all_dropped += held.empty() && in_use.empty();
    return held.size() + in_use.size();
  }
  void arrived(const int64_t* rows, size_t n) override { written.insert(written.end(), rows, rows + n); }

 private:
  static size_t first(const int64_t* rows, size_t n, const std::set<int64_t>& of, bool is_in) {
    return static_cast<size_t>(std::find_if(rows, rows + n, [&](int64_t row) { return of.contains(row) == is_in; }) -
                               rows);
  }
};

}  // namespace bunkbed::test
