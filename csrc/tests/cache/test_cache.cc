#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "cache/cache.h"
#include "tests/check.h"
#include "tests/sample.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

uint32_t take(Cache* cache, int64_t row) {
  uint32_t frame;
  while (!cache->allocate(&frame)) {
    CHECK(cache->victim(&frame));
    CHECK(!cache->info(frame).pinned);
    CHECK(cache->info(frame).row >= 0);
    cache->release(frame);
  }
  CHECK_EQ(cache->info(frame).row, int64_t{-1});
  cache->admit(frame, row);
  cache->info(frame).pinned = 0;
  return frame;
}

// Steps of skewed rows with a cache of 300 frames. Every row of a step is loaded, as in a table.
class Steps {
 public:
  static constexpr uint32_t kFrames = 300;
  static constexpr uint32_t kRows = 4000;

  Steps() : cache(16, kFrames), frame_of_(kRows, kNone) {
    double sum = 0;
    for (uint32_t rank = 1; rank <= kRows; ++rank) cumulative_.push_back(sum += 1.0 / rank);
  }

  // Returns the number of misses. The hottest row is `shift`.
  uint32_t step(uint32_t draws, uint32_t shift = 0) {
    std::set<uint32_t> rows;
    for (uint32_t i = 0; i < draws; ++i) {
      const double at = static_cast<double>(sampler_.bits() >> 11) * 0x1p-53 * cumulative_.back();
      const auto rank = std::upper_bound(cumulative_.begin(), cumulative_.end(), at) - cumulative_.begin();
      rows.insert((static_cast<uint32_t>(rank) + shift) % kRows);
    }
    return step(rows);
  }

  uint32_t step(const std::set<uint32_t>& rows) {
    std::vector<uint32_t> pinned;
    uint32_t misses = 0;
    for (const uint32_t row : rows) {
      if (frame_of_[row] == kNone) continue;
      CHECK(cache.touch(frame_of_[row]));
      CHECK(!cache.touch(frame_of_[row]));
      cache.info(frame_of_[row]).pinned = 1;
      pinned.push_back(frame_of_[row]);
    }
    for (const uint32_t row : rows) {
      if (frame_of_[row] != kNone) continue;
      ++misses;
      uint32_t frame;
      while (!cache.allocate(&frame)) {
        CHECK(cache.victim(&frame));
        ++victims;
        frame_of_[static_cast<size_t>(cache.info(frame).row)] = kNone;
        cache.release(frame);
      }
      cache.admit(frame, row);
      CHECK(!cache.touch(frame));
      frame_of_[row] = frame;
      pinned.push_back(frame);
    }
    for (const uint32_t frame : pinned) cache.info(frame).pinned = 0;
    cache.begin_step();
    return misses;
  }

  // The misses per step of a cache that always has the most probable rows.
  double best(uint32_t draws) const {
    double misses = 0;
    for (uint32_t rank = kFrames + 1; rank <= kRows; ++rank) {
      misses += 1 - std::pow(1 - 1.0 / rank / cumulative_.back(), draws);
    }
    return misses;
  }

  Cache cache;
  uint64_t victims = 0;

 private:
  static constexpr uint32_t kNone = ~0u;
  std::vector<uint32_t> frame_of_;
  std::vector<double> cumulative_;
  Sampler sampler_{11};
};

}  // namespace

TEST(cache_frames_are_distinct_and_counted) {
  Cache cache(100, 64);
  cache.set_capacity(20);
  std::set<uint32_t> frames;
  for (int64_t row = 0; row < 20; ++row) frames.insert(take(&cache, row));
  CHECK_EQ(frames.size(), size_t{20});
  CHECK_EQ(cache.resident(), size_t{20});
  uint32_t frame;
  CHECK(!cache.allocate(&frame));
  CHECK_EQ(cache.resident_bytes(), 20 * Cache::frame_cost(100));
}

TEST(cache_victim_is_the_least_wanted_and_never_pinned) {
  Cache cache(16, 8);
  for (int64_t row = 0; row < 8; ++row) {
    const uint32_t frame = take(&cache, row);
    cache.set_count(frame, row == 5 ? 0 : 3);
  }
  uint32_t frame;
  CHECK(cache.victim(&frame));
  CHECK_EQ(cache.info(frame).row, int64_t{5});
  for (uint32_t i = 0; i < 8; ++i) cache.info(i).pinned = i != 2;
  CHECK(cache.victim(&frame));
  CHECK_EQ(frame, 2u);
  cache.info(2).pinned = 1;
  CHECK(!cache.victim(&frame));
  // Even the frame that is wanted soonest is found when it alone is free.
  cache.info(7).pinned = 0;
  cache.set_count(7, Cache::kMaxCount);
  CHECK(cache.victim(&frame));
  CHECK_EQ(frame, 7u);
}

TEST(cache_gives_up_unwanted_frames_first_then_the_furthest) {
  Cache cache(16, 100);
  // No batch wants rows 0 to 9. Batch 1 + row % 10 wants each other row.
  for (int64_t row = 0; row < 100; ++row) {
    const uint32_t frame = take(&cache, row);
    cache.set_count(frame, Cache::kMaxCount);
    if (row >= 10) cache.set_next_use(frame, static_cast<uint32_t>(1 + row % 10));
  }
  const auto give_up = [&cache](uint32_t keep_until) {
    uint32_t frame;
    if (!cache.victim(&frame, keep_until)) return int64_t{-1};
    const int64_t row = cache.info(frame).row;
    cache.release(frame);
    return row;
  };
  for (int i = 0; i < 5; ++i) CHECK(give_up(kNoUse) < 10);  // even if they are hot
  // The last few unwanted rows are not searched for among so many: rows of batch 10 are evicted.
  for (int i = 0; i < 9; ++i) CHECK_EQ(give_up(kNoUse) % 10, int64_t{9});
}

TEST(cache_staging_takes_nothing_from_nearer_batches) {
  Cache cache(16, 40);
  for (int64_t row = 0; row < 40; ++row) cache.set_next_use(take(&cache, row), static_cast<uint32_t>(1 + row % 10));
  const auto give_up = [&cache](uint32_t keep_until) {
    uint32_t frame;
    if (!cache.victim(&frame, keep_until)) return int64_t{-1};
    const int64_t row = cache.info(frame).row;
    cache.release(frame);
    return row;
  };
  for (uint32_t batch = 10; batch > 7; --batch) {
    for (int i = 0; i < 4; ++i) CHECK_EQ(static_cast<uint32_t>(1 + give_up(7) % 10), batch);
  }
  CHECK_EQ(give_up(7), int64_t{-1});
  cache.set_next_use(15, 8);  // row 15, wanted by batch 6, is now wanted later
  CHECK_EQ(give_up(7), int64_t{15});
  cache.info(6).pinned = cache.info(16).pinned = 1;
  for (int i = 0; i < 2; ++i) CHECK_EQ(give_up(kNoUse) % 10, int64_t{6});
  CHECK_EQ(give_up(kNoUse) % 10, int64_t{5});  // the two pinned rows of batch 7 stay
  cache.set_first_batch(100);                  // no batch wants a row any more
  CHECK(!cache.is_wanted(0));
  for (size_t left = cache.resident() - 2; left > 0; --left) CHECK(give_up(kNoUse) >= 0);
  CHECK_EQ(give_up(kNoUse), int64_t{-1});
}

TEST(cache_gives_up_no_frame_that_shrinking_took_away) {
  Cache cache(16, 2000);  // metadata of several pages: whole pages are freed, and read as zeros afterwards
  for (int64_t row = 0; row < 2000; ++row) cache.set_next_use(take(&cache, row), 5);
  for (uint32_t frame = 1500; frame < 1510; ++frame) cache.set_next_use(frame, kNoUse);  // the last unwanted rows
  for (uint32_t frame = 30; frame < 2000; ++frame) cache.release(frame);
  cache.set_capacity(30);
  cache.trim();
  std::set<uint32_t> given_up;
  uint32_t frame;
  while (cache.victim(&frame)) {
    CHECK(frame < 30);
    CHECK(given_up.insert(frame).second);
    cache.release(frame);
  }
  CHECK_EQ(given_up.size(), size_t{30});
}

TEST(cache_shrinks_and_grows) {
  Sampler sampler(4);
  Cache cache(5000, 200);
  size_t capacity = 200;
  int64_t next = 0;
  for (int round = 0; round < 300; ++round) {
    for (uint64_t i = sampler.bits() % 60; i > 0; --i) {
      const uint32_t frame = take(&cache, next++);
      std::memset(cache.record(frame), 1, 5000);
      CHECK(frame < capacity);
    }
    capacity = 1 + sampler.bits() % 200;
    if (capacity < cache.capacity()) {
      for (uint32_t frame = static_cast<uint32_t>(capacity); frame < cache.high_water(); ++frame) {
        if (cache.info(frame).row >= 0) cache.release(frame);
      }
    }
    cache.set_capacity(capacity);
    cache.trim();
    CHECK(cache.resident() <= capacity);
    // Every free frame can be used: none was lost from the list.
    while (cache.resident() < capacity) {
      const size_t before = cache.resident();
      const uint32_t frame = take(&cache, next++);
      CHECK(frame < capacity);
      CHECK_EQ(cache.resident(), before + 1);
    }
  }
  cache.clear();
  CHECK_EQ(cache.resident(), size_t{0});
  CHECK(take(&cache, 1) == 0);
}

TEST(cache_stays_near_the_best_static_one_and_the_hand_walks_little) {
  Steps steps;
  for (int i = 0; i < 3000; ++i) steps.step(60);
  uint64_t misses = 0;
  for (int i = 0; i < 3000; ++i) misses += steps.step(60);
  CHECK(static_cast<double>(misses) / 3000 < 1.08 * steps.best(60));
  CHECK(steps.cache.frames_passed() < 32 * steps.victims);
}

TEST(cache_follows_hot_rows_that_move) {
  Steps steps;
  for (int i = 0; i < 2000; ++i) steps.step(60);
  for (int i = 0; i < 300; ++i) steps.step(60, 2000);
  uint64_t misses = 0;
  for (int i = 0; i < 300; ++i) misses += steps.step(60, 2000);
  CHECK(static_cast<double>(misses) / 300 < 1.2 * steps.best(60));
}

TEST(cache_keeps_its_rows_through_a_pass_over_the_table) {
  Steps steps;
  for (int i = 0; i < 2000; ++i) steps.step(60);
  for (uint32_t row = 0; row < Steps::kRows; row += 100) {
    std::set<uint32_t> rows;
    for (uint32_t i = 0; i < 100; ++i) rows.insert(row + i);
    steps.step(rows);
  }
  uint64_t misses = 0;
  for (int i = 0; i < 5; ++i) misses += steps.step(60);
  CHECK(static_cast<double>(misses) / 5 < 1.4 * steps.best(60));
}

TEST(cache_remembers_for_a_while_what_it_gave_up) {
  Cache cache(16, 64);
  const auto evict = [&] {
    uint32_t frame;
    CHECK(cache.victim(&frame));
    const int64_t row = cache.info(frame).row;
    cache.release(frame);
    return row;
  };
  for (int64_t row = 0; row < 64; ++row) CHECK_EQ(int{cache.count(take(&cache, row))}, 0);
  const int64_t early = evict();
  CHECK_EQ(int{cache.count(take(&cache, early))}, int{Cache::kReturn});
  cache.set_count(0, 0);
  const int64_t second = evict();
  for (int64_t row = 100; row < 1000; ++row) take(&cache, row);  // each replaces another ghost
  CHECK_EQ(int{cache.count(take(&cache, second))}, 0);
}

TEST(cache_takes_few_rounds_where_every_row_is_hot) {
  Cache cache(16, 1000);
  for (int64_t row = 0; row < 1000; ++row) cache.set_count(take(&cache, row), Cache::kMaxCount);
  uint32_t frame;
  CHECK(cache.victim(&frame));
  CHECK(cache.frames_passed() <= 8 * 1000);
  for (uint32_t i = 0; i < 1000; ++i) cache.info(i).pinned = 1;
  CHECK(!cache.victim(&frame));
  CHECK(cache.frames_passed() <= 10 * 1000);
}

TEST(cache_counts_a_row_once_a_step_however_many_steps_pass) {
  Cache cache(16, 7000);
  for (int64_t row = 0; row < 7000; ++row) take(&cache, row);
  for (uint32_t frame = 0; frame < 7000; ++frame) CHECK(!cache.touch(frame));  // allocated in this step
  for (const uint32_t pause : {1u, 254u, 255u, 256u, 510u}) {
    for (uint32_t i = 0; i < pause; ++i) cache.begin_step();
    for (uint32_t frame = 0; frame < 7000; ++frame) {
      CHECK(cache.touch(frame));
      CHECK(!cache.touch(frame));
    }
  }
}

TEST(cache_counts_a_staged_row_when_it_is_wanted_again) {
  Cache cache(16, 4);
  const uint32_t frame = take(&cache, 7);
  cache.mark_staged(frame);
  cache.begin_step();
  CHECK(!cache.touch(frame));  // counted when it was staged
  CHECK_EQ(int{cache.count(frame)}, 0);
  cache.begin_step();
  CHECK(cache.touch(frame));
  CHECK_EQ(int{cache.count(frame)}, int{Cache::kHit});
  for (int i = 0; i < 10; ++i) {
    cache.begin_step();
    cache.touch(frame);
  }
  CHECK_EQ(int{cache.count(frame)}, int{Cache::kMaxCount});
}
