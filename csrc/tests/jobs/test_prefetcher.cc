// Staging reads during lookups and updates: records move and values never change, with other threads at work.
#include <atomic>
#include <thread>
#include <vector>

#include "base/workers.h"
#include "table/table.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/sandbox.h"

namespace bunkbed {
namespace {

TableSpec spec_of(int64_t num_rows) {
  TableSpec spec;
  spec.num_rows = num_rows;
  spec.dim = 16;
  spec.optimizer.kind = OptimizerKind::kSgd;
  spec.optimizer.lr = 1.0;
  return spec;
}

std::string fresh_folder(const char* name) {
  const std::string path = std::string("/tmp/bunkbed-") + name + "-" + std::to_string(::getpid());
  std::system(("rm -rf " + path).c_str());
  return path;
}

enum class Ahead { kStage, kWindow, kMisledWindow };

// Each update adds 1 to its rows (lr 1, gradient -1): a row's value is the number of times it was updated.
void staged_training(int64_t num_rows, const char* name, Ahead ahead) {
  const std::string path = fresh_folder(name);
  {
    auto table = Table::create(vfs::posix(), path, "t", spec_of(num_rows), 480u << 10);
    std::vector<float> expected(4000, 0.0f);
    uint64_t random = 1;
    const auto next = [&random] { return random = random * 6364136223846793005ull + 1442695040888963407ull; };
    std::vector<std::vector<int64_t>> batches(120);
    for (auto& batch : batches) {
      for (int i = 0; i < 300; ++i) batch.push_back(static_cast<int64_t>((next() >> 33) % 4000));
      std::sort(batch.begin(), batch.end());
      batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
    }
    std::vector<float> out(300 * 16);
    const std::vector<float> grads(300 * 16, -1.0f);
    std::vector<uint32_t> numbers;
    for (size_t b = 0; b < batches.size(); ++b) {
      if (ahead == Ahead::kStage) {
        if (b + 1 < batches.size()) table->stage(batches[b + 1].data(), batches[b + 1].size());
      } else {
        while (numbers.size() < std::min(batches.size(), b + 9)) {
          const auto& coming = batches[numbers.size()];
          const uint32_t number = table->expect(coming.data(), coming.size(), 0);
          if (number == Table::kWindowFull) break;
          numbers.push_back(number);
        }
        const auto number_of = [&](size_t i) { return i < numbers.size() ? numbers[i] : kNoUse; };
        table->advance(b > 0 ? number_of(b - 1) : kNoUse, number_of(b), b % 5 == 0 ? 0 : b % 5);
        if (ahead == Ahead::kMisledWindow) {
          // Batches that end early, never come or were never expected do not change values.
          const auto wrong = static_cast<uint32_t>(next() >> 57);
          if (b % 3 == 0) table->forget(wrong);
          if (b % 4 == 0) table->advance(wrong, wrong + 1, 3);
        }
      }
      const auto& ids = batches[b];
      table->lookup(ids.data(), ids.size(), true, out.data());
      for (size_t i = 0; i < ids.size(); ++i) CHECK_EQ(out[i * 16 + b % 16], expected[static_cast<size_t>(ids[i])]);
      table->update(ids.data(), ids.size(), grads.data(), std::nullopt, std::nullopt);
      for (const int64_t id : ids) ++expected[static_cast<size_t>(id)];
      if (b % 17 == 16) table->commit(std::nullopt, "");
      if (b % 40 == 39) table->set_ram(b % 80 == 39 ? 460u << 10 : 600u << 10);
    }
    const TableStats stats = table->stats();
    CHECK_EQ(stats.store.hits + stats.store.misses + stats.store.first_touches, stats.store.unique_rows);
    CHECK(stats.store.evictions > 0);
    CHECK(stats.staged_rows > 1000);
    std::vector<int64_t> all(4000);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    std::vector<float> rows(4000 * 16);
    table->stage(all.data(), all.size());
    table->lookup(all.data(), all.size(), false, rows.data());
    for (size_t i = 0; i < all.size(); ++i) CHECK_EQ(rows[i * 16], expected[i]);
    table->stage(batches[0].data(), batches[0].size());  // being read while the table closes
  }
  std::system(("rm -rf " + path).c_str());
}

}  // namespace

TEST(table_staging_flat) { staged_training(4000, "staging-flat", Ahead::kStage); }
TEST(table_staging_hashed) { staged_training(-1, "staging-hashed", Ahead::kStage); }
TEST(table_window_flat) { staged_training(4000, "window-flat", Ahead::kWindow); }
TEST(table_window_hashed) { staged_training(-1, "window-hashed", Ahead::kWindow); }
TEST(table_window_misled_flat) { staged_training(4000, "misled-flat", Ahead::kMisledWindow); }
TEST(table_window_misled_hashed) { staged_training(-1, "misled-hashed", Ahead::kMisledWindow); }

// A row that was staged and then looked up counts as one unique row and one miss.
// Compaction goes on during lookups and updates. An exclusive call waits for its slice.
TEST(table_staging_compacts_beside) {
  const std::string path = fresh_folder("staging-compacts");
  {
    auto table = Table::create(vfs::posix(), path, "t", spec_of(4000), 480u << 10);
    std::vector<float> expected(4000, 0.0f);
    std::vector<float> out(300 * 16);
    const std::vector<float> grads(300 * 16, -1.0f);
    std::vector<int64_t> ids(300), next(300);
    const auto batch_at = [](size_t b, std::vector<int64_t>* batch) {
      for (size_t i = 0; i < batch->size(); ++i) (*batch)[i] = static_cast<int64_t>((b * 300 + i) * 7 % 4000);
    };
    batch_at(0, &next);
    for (size_t b = 0; b < 600; ++b) {
      ids = next;
      batch_at(b + 1, &next);
      table->stage(next.data(), next.size());
      table->lookup(ids.data(), ids.size(), true, out.data());
      for (size_t i = 0; i < ids.size(); ++i) CHECK_EQ(out[i * 16 + 7], expected[ids[i]]);
      table->update(ids.data(), ids.size(), grads.data(), std::nullopt, std::nullopt);
      for (const int64_t id : ids) expected[id] += 1.0f;
      if (b % 97 == 96) table->commit(std::nullopt, "");
    }
    const TableStats stats = table->stats();
    CHECK(stats.compactions >= 3);
    CHECK(stats.disk_bytes < 8 * stats.live_bytes + (4u << 20));
    CHECK_EQ(stats.stored_rows, 4000u);
    table->commit(std::nullopt, "");
    table->close();
    OpenOptions options;
    options.ram_bytes = 480u << 10;
    table = Table::open(vfs::posix(), path, "t", options);
    for (int64_t row = 0; row < 4000; row += 300) {
      std::vector<int64_t> rows;
      for (int64_t r = row; r < std::min<int64_t>(4000, row + 300); ++r) rows.push_back(r);
      table->lookup(rows.data(), rows.size(), false, out.data());
      for (size_t i = 0; i < rows.size(); ++i) CHECK_EQ(out[i * 16], expected[rows[i]]);
    }
  }
  std::system(("rm -rf " + path).c_str());
}

TEST(table_staging_counts_a_row_once) {
  const std::string path = fresh_folder("staging-counts");
  {
    std::vector<int64_t> all(4000);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    const std::vector<float> grads(4000 * 16, -1.0f);
    auto table = Table::create(vfs::posix(), path, "t", spec_of(4000), 480u << 10);
    table->update(all.data(), all.size(), grads.data(), std::nullopt, std::nullopt);
    table->commit(std::nullopt, "");
    table.reset();
    OpenOptions options;
    options.ram_bytes = 480u << 10;
    table = Table::open(vfs::posix(), path, "t", options);
    std::vector<float> out(100 * 16);
    table->stage(all.data(), 100);
    table->lookup(all.data(), 100, true, out.data());
    const StoreStats stats = table->stats().store;
    CHECK_EQ(stats.unique_rows, 100u);
    CHECK_EQ(stats.misses, 100u);
    CHECK_EQ(stats.hits, 0u);
  }
  std::system(("rm -rf " + path).c_str());
}

// Rows of 4 KiB in a cache of a few dozen frames. A batch larger than the cache is staged in part, not refused.
TEST(table_staging_more_than_the_cache) {
  const std::string path = fresh_folder("staging-large");
  {
    TableSpec spec = spec_of(400);
    spec.dim = 1024;
    std::vector<int64_t> all(400);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    const std::vector<float> grads(400 * 1024, -1.0f);
    const size_t ram = minimum_ram(spec, 400, true) + (100u << 10);
    auto table = Table::create(vfs::posix(), path, "t", spec, ram);
    table->update(all.data(), all.size(), grads.data(), std::nullopt, std::nullopt);
    CHECK(table->stats().frame_capacity < all.size());
    table->commit(std::nullopt, "");
    std::vector<float> out(400 * 1024);
    for (int round = 0; round < 3; ++round) {
      table->stage(all.data(), all.size());
      table->lookup(all.data(), all.size(), true, out.data());
      for (size_t i = 0; i < all.size(); ++i) CHECK_EQ(out[i * 1024 + i], static_cast<float>(round + 1));
      table->update(all.data(), all.size(), grads.data(), std::nullopt, std::nullopt);
    }
  }
  std::system(("rm -rf " + path).c_str());
}

TEST(table_staging_from_another_thread) {
  const std::string path = fresh_folder("staging-threads");
  {
    auto table = Table::create(vfs::posix(), path, "t", spec_of(4000), 400u << 10);
    std::vector<int64_t> all(4000);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    const std::vector<float> grads(4000 * 16, -1.0f);
    table->update(all.data(), all.size(), grads.data(), std::nullopt, std::nullopt);
    table->commit(std::nullopt, "");
    std::atomic<bool> stop{false};
    std::thread stager([&] {
      for (size_t at = 0; !stop; at = (at + 311) % 3600) table->stage(all.data() + at, 400);
    });
    std::vector<float> out(500 * 16);
    for (int step = 1; step <= 60; ++step) {
      const size_t at = static_cast<size_t>(step * 97 % 3500);
      table->lookup(all.data() + at, 500, step % 3 != 0, out.data());
      for (size_t i = 0; i < 500; ++i) CHECK_EQ(out[i * 16], static_cast<float>(step));
      table->update(all.data(), all.size(), grads.data(), std::nullopt, std::nullopt);
      if (step % 20 == 0) table->commit(std::nullopt, "");
    }
    stop = true;
    stager.join();
  }
  std::system(("rm -rf " + path).c_str());
}

}  // namespace bunkbed
