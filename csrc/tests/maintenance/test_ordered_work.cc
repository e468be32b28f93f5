// A few threads do work, and the caller takes the results in order.
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "maintenance/ordered_work.h"
#include "tests/check.h"

using namespace bunkbed;

TEST(ordered_work_is_taken_up_in_order) {
  for (const size_t threads : {size_t{1}, size_t{2}, size_t{7}}) {
    std::atomic<bool> stop{false};
    std::vector<size_t> made(50), taken;
    const auto work = [&](size_t i) {
      std::this_thread::sleep_for(std::chrono::microseconds((50 - i) * 20));
      made[i] = i * i;
    };
    size_t calls = 0;
    work_in_order(made.size(), threads, &stop, work, [&](size_t i) { taken.push_back(made[i]); }, [&] { ++calls; });
    CHECK_EQ(taken.size(), made.size());
    for (size_t i = 0; i < taken.size(); ++i) CHECK_EQ(taken[i], i * i);
    CHECK(calls >= made.size());
  }
  std::atomic<bool> stop{false};
  work_in_order(0, 3, &stop, [](size_t) {}, [](size_t) {}, [] {});
}

TEST(ordered_work_ends_with_what_the_lowest_item_throws) {
  std::atomic<bool> stop{false};
  std::atomic<size_t> started{0};
  size_t taken = 0;
  std::string what;
  try {
    work_in_order(
        1000, 3, &stop,
        [&](size_t i) {
          ++started;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          if (i >= 20) throw std::runtime_error(std::to_string(i));
        },
        [&](size_t) { ++taken; }, [] {});
  } catch (const std::runtime_error& error) {
    what = error.what();
  }
  CHECK_EQ(what, std::string("20"));
  CHECK_EQ(taken, size_t{20});
  CHECK(stop.load());
  CHECK(started.load() < 1000);
}

TEST(ordered_work_ends_when_the_caller_throws) {
  std::atomic<bool> stop{false};
  bool was_thrown = false;
  try {
    const auto until_stopped = [&](size_t) {
      while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    work_in_order(10, 2, &stop, until_stopped, [](size_t) {}, [] { throw std::runtime_error("enough"); });
  } catch (const std::runtime_error&) {
    was_thrown = true;
  }
  CHECK(was_thrown);
}
