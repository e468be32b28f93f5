#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/workers.h"
#include "tests/check.h"

using namespace bunkbed;

TEST(workers_every_block_runs_once) {
  const size_t before = num_threads();
  for (const size_t threads : {1, 2, 5}) {
    set_num_threads(threads);
    for (const size_t n : {0, 1, 2, 99, 1000}) {
      for (const size_t grain : {1, 3, 2000}) {
        std::vector<int> seen(n, 0);
        parallel_for(n, grain, [&](size_t from, size_t to) {
          for (size_t i = from; i < to; ++i) ++seen[i];
        });
        for (const int times : seen) CHECK_EQ(times, 1);
      }
    }
  }
  set_num_threads(before);
}

TEST(workers_first_exception_reaches_the_caller) {
  const size_t before = num_threads();
  set_num_threads(4);
  for (int round = 0; round < 50; ++round) {
    bool caught = false;
    try {
      parallel_for(100, 1, [&](size_t from, size_t) {
        if (from == static_cast<size_t>(round)) throw std::runtime_error("block");
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    CHECK(caught);
  }
  set_num_threads(before);
}

TEST(workers_many_callers_at_once) {
  const size_t before = num_threads();
  set_num_threads(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&wrong, caller] {
      for (int round = 0; round < 100; ++round) {
        std::vector<size_t> squares(50 + static_cast<size_t>(caller));
        parallel_for(squares.size(), 4, [&](size_t from, size_t to) {
          for (size_t i = from; i < to; ++i) squares[i] = i * i;
        });
        for (size_t i = 0; i < squares.size(); ++i) wrong += squares[i] != i * i;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  set_num_threads(before);
  CHECK_EQ(wrong.load(), 0);
}

TEST(workers_items_all_run_and_the_first_error_is_thrown) {
  const size_t before = num_threads();
  for (const size_t threads : {1, 3}) {
    set_num_threads(threads);
    for (const size_t grain : {1, 1000}) {
      std::vector<std::atomic<int>> seen(40);
      std::vector<size_t> work(seen.size(), 1);
      work[7] = 500;  // more than the share of a thread
      std::string thrown;
      try {
        parallel_items(work, grain, [&](size_t item) {
          ++seen[item];
          if (item % 10 == 7) throw std::runtime_error("item " + std::to_string(item));
        });
      } catch (const std::runtime_error& error) {
        thrown = error.what();
      }
      CHECK_EQ(thrown, std::string("item 7"));
      for (const auto& times : seen) CHECK_EQ(times.load(), 1);
    }
  }
  set_num_threads(before);
  parallel_items({}, 1, [](size_t) {});
}

TEST(workers_loops_of_an_item_share_threads_only_if_it_is_large) {
  const size_t before = num_threads();
  set_num_threads(4);
  const auto loops_of = [](const std::vector<size_t>& work) {
    const size_t offered = loops_shared();
    parallel_items(work, 10, [](size_t) { parallel_for(100, 1, [](size_t, size_t) {}); });
    return loops_shared() - offered;
  };
  CHECK_EQ(loops_of({20, 20, 20, 20, 20, 20}), size_t{1});  // that over the items
  CHECK_EQ(loops_of({1, 1, 1}), size_t{3});                 // too little work to share: as single calls
  CHECK_EQ(loops_of({200, 20, 20, 20}), size_t{2});         // the loop of the large item, and that over the others
  set_num_threads(before);
}
