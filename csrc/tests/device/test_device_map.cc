// Compares the map of a device cache with a plain model, and runs executors that follow its plans.
#include "device/device_map.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/sample.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

using Plan = DeviceMap::Plan;

Batch batch_of(const std::vector<int64_t>& ids) {
  Batch batch;
  batch.assign(ids.data(), ids.size());
  return batch;
}

int64_t frame_of_row(const DeviceMap& map, int64_t row) {
  int64_t frame = -2;
  map.find(&row, 1, &frame);
  return frame;
}

// Zipf by inverse transform of a continuous power law: an approximation that suffices for a cache.
class Zipf {
 public:
  Zipf(uint64_t seed, int64_t rows, double exponent) : sampler_(seed), rows_(rows), exponent_(exponent) {}
  int64_t operator()() {
    const double u = static_cast<double>(sampler_.bits() >> 11) * 0x1p-53;
    const double end = std::pow(static_cast<double>(rows_), 1.0 - exponent_);
    const double rank = std::pow(1.0 + u * (end - 1.0), 1.0 / (1.0 - exponent_));
    return std::min<int64_t>(rows_ - 1, static_cast<int64_t>(rank) - 1);
  }
  std::vector<int64_t> ids(size_t n) {
    std::vector<int64_t> found(n);
    for (int64_t& id : found) id = (*this)();
    return found;
  }

 private:
  Sampler sampler_;
  int64_t rows_;
  double exponent_;
};

// Executes plans as the map requires, with a value per row in the table and per frame on the device.
struct Model {
  struct Frame {
    int64_t row = -1;
    int pins = 0;
    bool is_dirty = false;
    int value = 0;
  };
  explicit Model(size_t frames) : frames(frames) {}
  std::vector<Frame> frames;
  std::map<int64_t, size_t> place;  // row -> frame
  std::map<int64_t, int> table, truth;
  struct Record {
    int64_t row;
    int value;
  };
  std::deque<Record> leaving;  // copied from the device, not in the table yet

  size_t num_pinned() const {
    return static_cast<size_t>(std::count_if(frames.begin(), frames.end(), [](const Frame& f) { return f.pins > 0; }));
  }
  bool is_held(int64_t row) const {
    const auto found = place.find(row);
    return (found != place.end() && frames[found->second].is_dirty) ||
           std::any_of(leaving.begin(), leaving.end(), [row](const Record& r) { return r.row == row; });
  }

  bool fits(const Batch& batch) const {
    size_t others = num_pinned();
    for (const int64_t row : batch.unique()) {
      const auto found = place.find(row);
      others -= found != place.end() && frames[found->second].pins > 0;
    }
    return others + batch.num_unique() <= frames.size();
  }

  // Checks a plan and executes it.
  void follow(const Batch& batch, const Plan& plan) {
    const Plan::Arrays& arrays = *plan.arrays();
    const auto n = batch.num_unique();
    CHECK_EQ(arrays.frames.size(), n);
    std::vector<int64_t> missing;
    for (size_t i = 0; i < n; ++i) {
      const auto found = place.find(batch.unique()[i]);
      if (found == place.end()) {
        missing.push_back(batch.unique()[i]);
      } else {
        CHECK_EQ(arrays.frames[i], static_cast<int64_t>(found->second));
      }
    }
    CHECK(std::vector<int64_t>(arrays.load_rows.begin(), arrays.load_rows.end()) == missing);
    CHECK_EQ(std::set<int64_t>(arrays.frames.begin(), arrays.frames.end()).size(), n);

    const std::set<int64_t> wanted(batch.unique().begin(), batch.unique().end());
    std::map<int64_t, int64_t> evicted;
    for (size_t i = 0; i < arrays.evict_rows.size(); ++i) evicted[arrays.evict_frames[i]] = arrays.evict_rows[i];
    CHECK_EQ(evicted.size(), arrays.evict_rows.size());
    for (size_t i = 0; i < missing.size(); ++i) {
      const auto number = static_cast<size_t>(arrays.load_frames[i]);
      CHECK(number < frames.size());
      Frame& frame = frames[number];
      if (frame.row >= 0) {
        CHECK_EQ(frame.pins, 0);
        CHECK(wanted.count(frame.row) == 0);
        CHECK_EQ(evicted.count(arrays.load_frames[i]), size_t{frame.is_dirty});
        if (frame.is_dirty) {
          CHECK_EQ(evicted[arrays.load_frames[i]], frame.row);
          leaving.push_back({frame.row, frame.value});
        }
        place.erase(frame.row);
      }
      evicted.erase(arrays.load_frames[i]);
      frame = {missing[i], 0, false, 0};
      place[missing[i]] = number;
    }
    CHECK(evicted.empty());
    std::vector<int64_t> positions(batch.size());
    plan.positions(positions.data());
    for (size_t i = 0; i < batch.size(); ++i) CHECK_EQ(positions[i], arrays.frames[batch.inverse()[i]]);
    for (const int64_t frame : arrays.frames) ++frames[static_cast<size_t>(frame)].pins;
  }

  // Before loads an executor writes back all evicted records.
  void write_back(DeviceMap* map) {
    while (!leaving.empty()) {
      const Record record = leaving.front();
      table[record.row] = record.value;
      leaving.pop_front();
      map->arrived(&record.row, 1);
    }
  }

  void check_same(const DeviceMap& map, int64_t num_rows) const {
    std::vector<int64_t> rows, found;
    for (int64_t row = 0; row < num_rows; ++row) rows.push_back(row);
    found.resize(rows.size());
    map.find(rows.data(), rows.size(), found.data());
    size_t first_held = rows.size(), first_not_held = rows.size();
    for (size_t i = rows.size(); i-- > 0;) {
      const auto at = place.find(rows[i]);
      CHECK_EQ(found[i], at == place.end() ? -1 : static_cast<int64_t>(at->second));
      (is_held(rows[i]) ? first_held : first_not_held) = i;
    }
    CHECK_EQ(map.first_held(rows.data(), rows.size()), first_held);
    CHECK_EQ(map.first_not_held(rows.data(), rows.size()), first_not_held);
    const DeviceMap::Dirty dirty = map.dirty();
    size_t at = 0;
    for (size_t frame = 0; frame < frames.size(); ++frame) {
      if (!frames[frame].is_dirty) continue;
      CHECK(at < dirty.rows.size());
      CHECK_EQ(dirty.frames[at], static_cast<int64_t>(frame));
      CHECK_EQ(dirty.rows[at++], frames[frame].row);
    }
    CHECK_EQ(at, dirty.rows.size());
    CHECK_EQ(map.num_held(), at + leaving.size());
    const DeviceStats stats = map.stats();
    CHECK_EQ(stats.resident, place.size());
    CHECK_EQ(stats.pinned, num_pinned());
    CHECK_EQ(map.num_in_use(), num_pinned());
  }
};

struct Live {
  Batch batch;
  std::unique_ptr<Plan> plan;
};

constexpr int kWarm = 250, kSteps = 350;

// Misses of the warm steps of a Zipf stream, with the next `ahead` batches expected.
uint64_t misses(size_t ahead, size_t frames, int64_t rows) {
  const auto map = DeviceMap::make("t", frames);
  Zipf zipf(7, rows, 1.05);
  std::deque<std::pair<Batch, uint32_t>> coming;
  const auto read_on = [&] {
    coming.emplace_back(batch_of(zipf.ids(2000)), 0);
    if (ahead > 0) coming.back().second = map->expect(coming.back().first);
  };
  for (size_t i = 0; i < ahead; ++i) read_on();
  uint64_t warm = 0;
  for (int step = 0; step < kSteps; ++step) {
    read_on();
    const auto plan = map->plan(coming.front().first, coming.front().second);
    CHECK(plan != nullptr);
    plan->done();
    coming.pop_front();
    if (step == kWarm) warm = map->stats().misses;
  }
  return map->stats().misses - warm;
}

}  // namespace

TEST(device_map_follows_a_plain_model) {
  uint64_t all_refused = 0, all_too_large = 0, all_dirty = 0, all_evicted = 0;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Sampler sampler(seed);
    const size_t num_frames = 8 + sampler.bits() % 90;
    const auto num_rows = static_cast<int64_t>(num_frames * (1 + sampler.bits() % 4));
    const auto map = DeviceMap::make("t", num_frames);
    Model model(num_frames);
    std::deque<Live> live;
    std::deque<std::pair<std::unique_ptr<Batch>, uint32_t>> coming;
    const auto some_batch = [&] {
      std::vector<int64_t> ids(1 + sampler.bits() % (num_frames + num_frames / 2));
      const auto spread = static_cast<uint64_t>(num_rows) / (1 + sampler.bits() % 3);
      for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % spread);
      return std::make_unique<Batch>(batch_of(ids));
    };
    uint64_t refused = 0, too_large = 0;
    for (int round = 0; round < 1500; ++round) {
      switch (sampler.bits() % 8) {
        case 0:
        case 1: {
          auto batch = some_batch();
          const uint32_t number = map->expect(*batch);
          CHECK_EQ(number == DeviceMap::kWindowFull, map->stats().window_batches == 32 && coming.size() == 32);
          if (number != DeviceMap::kWindowFull) coming.emplace_back(std::move(batch), number);
          if (coming.size() < 32) break;
          map->forget(coming[5].second);
          coming.erase(coming.begin() + 5);
          map->forget(coming.front().second);
          coming.pop_front();
          break;
        }
        case 2:
        case 3:
        case 4: {
          std::unique_ptr<Batch> batch;
          uint32_t number = 0;
          if (!coming.empty() && sampler.bits() % 4 != 0) {
            batch = std::move(coming.front().first);
            number = coming.front().second;
            coming.pop_front();
          } else {
            batch = some_batch();
          }
          if (batch->num_unique() > num_frames) {
            CHECK_THROWS(map->plan(*batch, number), ErrorKind::kInvalid,
                         "table 't': a batch of " + std::to_string(batch->num_unique()) +
                             " rows does not fit its device cache of " + std::to_string(num_frames) + " frames");
            map->forget(number);
            ++too_large;
            break;
          }
          const bool fits = model.fits(*batch);
          live.push_back({std::move(*batch), nullptr});
          live.back().plan = map->plan(live.back().batch, number);
          CHECK_EQ(live.back().plan != nullptr, fits);
          if (!fits) {
            ++refused;
            model.check_same(*map, num_rows);
            live.pop_back();
            map->forget(number);
            break;
          }
          Live& now = live.back();
          model.follow(now.batch, *now.plan);
          model.check_same(*map, num_rows);
          if (sampler.bits() % 3 != 0) model.write_back(map.get());
          // Loads of a row that is still being written back wait for it.
          const auto& arrays = *now.plan->arrays();
          if (map->first_held(arrays.load_rows.data(), arrays.load_rows.size()) < arrays.load_rows.size()) {
            model.write_back(map.get());
          }
          for (size_t i = 0; i < arrays.load_rows.size(); ++i) {
            model.frames[static_cast<size_t>(arrays.load_frames[i])].value = model.table[arrays.load_rows[i]];
          }
          now.plan->done();
          // No lookup returns an old value.
          for (size_t i = 0; i < arrays.frames.size(); ++i) {
            CHECK_EQ(model.frames[static_cast<size_t>(arrays.frames[i])].value, model.truth[now.batch.unique()[i]]);
          }
          if (sampler.bits() % 4 == 0) break;  // evaluation
          now.plan->mark_dirty();
          for (const int64_t frame : arrays.frames) {
            Model::Frame& changed = model.frames[static_cast<size_t>(frame)];
            changed.is_dirty = true;
            model.truth[changed.row] = ++changed.value;
          }
          break;
        }
        case 5:
        case 6: {
          if (live.empty()) break;
          const size_t which = sampler.bits() % live.size();
          for (const int64_t frame : live[which].plan->arrays()->frames)
            --model.frames[static_cast<size_t>(frame)].pins;
          live[which].plan->release();
          if (sampler.bits() % 2 == 0) live[which].plan->release();  // changes nothing
          CHECK_THROWS(live[which].plan->mark_dirty(), ErrorKind::kInvalid, "released plan");
          live.erase(live.begin() + static_cast<ptrdiff_t>(which));
          break;
        }
        default: {
          if (sampler.bits() % 8 != 0) break;
          // A commit: held rows are written back.
          model.write_back(map.get());
          const DeviceMap::Dirty dirty = map->dirty();
          for (size_t i = 0; i < dirty.rows.size(); ++i) {
            Model::Frame& frame = model.frames[static_cast<size_t>(dirty.frames[i])];
            model.table[dirty.rows[i]] = frame.value;
            frame.is_dirty = false;
          }
          map->mark_clean(dirty.frames.data(), dirty.frames.size());
          CHECK_EQ(map->num_held(), size_t{0});
          CHECK(model.table == model.truth);
        }
      }
      model.check_same(*map, num_rows);
    }
    all_refused += refused;
    all_too_large += too_large;
    all_dirty += map->stats().write_backs;
    all_evicted += map->stats().evictions;
  }
  CHECK(all_dirty > 1000 && all_evicted > all_dirty + 1000);
  CHECK(all_refused > 100 && all_too_large > 100);
}

TEST(device_map_gives_up_copies_that_change_below) {
  const auto map = DeviceMap::make("t", 8);
  const Batch batch = batch_of({1, 2, 3, 4});
  auto plan = map->plan(batch, 0);
  const std::vector<int64_t> rows{9, 2, 9, 3, 2};
  CHECK_EQ(map->give_up(rows.data(), rows.size()), size_t{1});  // pinned
  CHECK_EQ(map->stats().resident, size_t{4});
  const int64_t frame = frame_of_row(*map, 3);
  map->mark_dirty(&frame, 1);
  plan->release();
  CHECK_EQ(map->give_up(rows.data(), rows.size()), size_t{3});  // dirty
  CHECK_EQ(map->stats().resident, size_t{4});
  map->mark_clean(&frame, 1);
  CHECK_EQ(map->give_up(rows.data(), rows.size()), rows.size());
  CHECK_EQ(map->stats().resident, size_t{2});
  CHECK_EQ(frame_of_row(*map, 2), int64_t{-1});
  CHECK_EQ(frame_of_row(*map, 3), int64_t{-1});
  CHECK_EQ(frame_of_row(*map, 1), plan->arrays()->frames[0]);
}

TEST(device_map_names_frames_that_hold_nothing) {
  const auto map = DeviceMap::make("t", 4);
  const Batch batch = batch_of({1, 2});
  const auto plan = map->plan(batch, 0);
  for (const int64_t bad : {int64_t{-1}, int64_t{2}, int64_t{1} << 40}) {
    const std::vector<int64_t> frames{plan->arrays()->frames[0], bad};
    CHECK_THROWS(map->mark_dirty(frames.data(), 2), ErrorKind::kInvalid,
                 "frame " + std::to_string(bad) + " at position 1 of its device cache holds no row");
    CHECK_THROWS(map->mark_clean(frames.data(), 2), ErrorKind::kInvalid, "holds no row");
  }
  CHECK_EQ(map->num_held(), size_t{0});
  CHECK_THROWS(DeviceMap::make("t", 0), ErrorKind::kInvalid, "1 to 2**32 - 2 frames, got 0");
}

TEST(device_map_forgets_all_but_not_under_a_plan) {
  const auto map = DeviceMap::make("t", 4);
  const Batch batch = batch_of({1, 2, 3}), other = batch_of({4, 5, 6});
  auto plan = map->plan(batch, 0);
  plan->mark_dirty();
  CHECK_THROWS(map->forget_all(), ErrorKind::kBroken, "1 plans of its device cache still hold frames");
  plan->release();
  map->plan(other, 0)->done();
  CHECK(map->stats().leaving > 0);
  map->forget_all();
  CHECK_EQ(map->num_held(), size_t{0});
  CHECK_EQ(map->stats().resident, size_t{0});
  CHECK_EQ(frame_of_row(*map, 4), int64_t{-1});
  // While a plan is in use, nothing is removed: other rows would get its frames.
  auto late = map->plan(batch, 0);
  const size_t in_use = map->num_in_use();
  CHECK_EQ(map->give_up_all(), in_use);
  CHECK_EQ(map->num_in_use(), in_use);
  late->done();
  late->mark_dirty();
  late->release();
  CHECK_EQ(map->give_up_all(), map->num_held());  // the same while rows are held
  const auto dirty = map->dirty();
  map->mark_clean(dirty.frames.data(), dirty.frames.size());
  CHECK_EQ(map->give_up_all(), size_t{0});
  CHECK_EQ(map->stats().resident, size_t{0});
  const auto next = map->plan(other, 0);
  CHECK_EQ(map->num_in_use(), size_t{3});
}

TEST(device_map_outlives_itself_in_its_plans) {
  auto map = DeviceMap::make("t", 4);
  const Batch batch = batch_of({1, 2, 3});
  std::shared_ptr<Plan::Arrays> arrays;
  {
    const auto plan = map->plan(batch, 0);
    map.reset();
    plan->mark_dirty();
    arrays = plan->arrays();
  }
  CHECK_EQ(arrays->load_rows[2], int64_t{3});
}

TEST(device_map_window_ranks_better_than_the_past_alone) {
  // Where the window's rows are more than the frames, and where they are fewer.
  CHECK(misses(16, 3000, 100'000) * 100 < misses(0, 3000, 100'000) * 88);
  CHECK(misses(16, 20'000, 100'000) * 100 < misses(0, 20'000, 100'000) * 95);
}

TEST(device_map_keeps_hot_rows) {
  // Without a window, little more than the best static choice misses.
  const size_t frames = 10'000;
  const int64_t rows = 100'000;
  Zipf zipf(7, rows, 1.05);
  uint64_t best = 0;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = batch_of(zipf.ids(2000));
    if (step <= kWarm) continue;
    for (const int64_t row : batch.unique()) best += row >= static_cast<int64_t>(frames);
  }
  CHECK(misses(0, frames, rows) * 100 < best * 115);
}

TEST(device_map_memory_follows_the_frames_only) {
  size_t before = 0;
  for (const int64_t spread : {int64_t{1}, int64_t{1} << 36}) {
    const auto map = DeviceMap::make("t", 1000);
    Sampler sampler(3);
    for (int step = 0; step < 200; ++step) {
      std::vector<int64_t> ids(300);
      for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % 5000) * spread;
      const Batch batch = batch_of(ids);
      const auto plan = map->plan(batch, 0);
      plan->mark_dirty();
      map->arrived(plan->arrays()->evict_rows.data(), plan->arrays()->evict_rows.size());
    }
    const size_t bytes = map->stats().bytes;
    CHECK(before == 0 || bytes == before);
    CHECK(bytes < 1000 * 100);
    before = bytes;
  }
}

TEST(device_map_takes_several_threads) {
  const auto map = DeviceMap::make("t", 500);
  std::vector<std::thread> threads;
  std::atomic<int> planned{0};
  for (uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&map, &planned, seed] {
      Zipf zipf(seed, 3000, 1.05);
      for (int step = 0; step < 150; ++step) {
        const Batch batch = batch_of(zipf.ids(150));
        const uint32_t number = map->expect(batch);
        std::unique_ptr<Plan> plan = map->plan(batch, number);
        if (plan == nullptr) {
          map->forget(number);
          continue;
        }
        ++planned;
        plan->done();
        // The frame stays this thread's while it is pinned.
        std::vector<int64_t> found(batch.num_unique());
        map->find(batch.unique().data(), found.size(), found.data());
        CHECK(std::equal(found.begin(), found.end(), plan->arrays()->frames.begin()));
        plan->mark_dirty();
        (void)map->dirty();
        (void)map->first_held(batch.unique().data(), batch.num_unique());
        map->arrived(plan->arrays()->evict_rows.data(), plan->arrays()->evict_rows.size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(planned > 100);
  CHECK_EQ(map->num_in_use(), size_t{0});
  const DeviceStats stats = map->stats();
  CHECK_EQ(stats.dirty, map->dirty().rows.size());
  CHECK_EQ(stats.window_batches, size_t{0});
}

TEST(device_map_undoes_a_plan_that_was_not_carried_out) {
  const auto map = DeviceMap::make("t", 3);
  const Batch first = batch_of({1, 2, 3}), second = batch_of({2, 7, 8});
  auto plan = map->plan(first, 0);
  plan->mark_dirty();
  const auto before = plan->arrays();
  plan.reset();
  for (const bool is_explicit : {true, false}) {
    auto failed = map->plan(second, 0);
    CHECK_EQ(failed->arrays()->evict_rows.size(), size_t{2});
    if (is_explicit) failed->undo();
    failed.reset();
    for (size_t i = 0; i < 3; ++i) CHECK_EQ(frame_of_row(*map, first.unique()[i]), before->frames[i]);
    CHECK_EQ(frame_of_row(*map, 7), int64_t{-1});
    CHECK_EQ(map->stats().dirty, size_t{3});
    CHECK_EQ(map->stats().leaving, size_t{0});
    CHECK_EQ(map->num_in_use(), size_t{0});
  }
}
