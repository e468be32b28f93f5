// The whole engine with the smallest budgets: random operations compared with a map, and a test for each known way to
// lose a row.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "tests/check.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

void random_operations(const TableSpec& spec, uint64_t seed, int rounds, size_t batch, uint64_t range) {
  const Sandbox sandbox;
  const std::string path = sandbox / "t";
  FaultVfs vfs;  // for speed: it makes no syncs
  const size_t ram = minimum_ram(spec, 0, true);
  auto table = Table::create(vfs, path, "t", spec, ram);
  Sampler sampler(seed);
  Rows rows, committed, kept;
  bool has_kept = false;
  uint64_t evictions = 0;
  const auto random_ids = [&](size_t n) {
    std::vector<int64_t> ids(n);
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % range);
    return ids;
  };
  for (int round = 0; round < rounds; ++round) {
    const std::string when = "round " + std::to_string(round);
    const uint64_t what = sampler.bits() % 32;
    if (what < 14) {
      const auto ids = random_ids(1 + sampler.bits() % batch);
      std::vector<float> grads(ids.size());
      for (float& grad : grads) grad = static_cast<float>(static_cast<int>(sampler.bits() % 3) - 1);
      update(table.get(), ids, grads);
      apply(&rows, ids, grads);
    } else if (what < 22) {
      const auto ids = random_ids(1 + sampler.bits() % batch);
      std::vector<float> values(ids.size() * spec.dim);
      if (what % 2 == 0) table->stage(ids.data(), ids.size());
      table->lookup(ids.data(), ids.size(), what % 3 != 0, values.data());
      check_values(rows, ids, values, spec.dim, when);
    } else if (what < 24) {
      auto ids = random_ids(5);
      std::vector<float> values(ids.size() * spec.dim);
      for (size_t i = 0; i < ids.size(); ++i) {
        rows[ids[i]] = static_cast<float>(i);
        for (size_t d = 0; d < spec.dim; ++d) values[i * spec.dim + d] = element(static_cast<float>(i), d);
      }
      table->set(ids.data(), ids.size(), 0, values.data());
    } else if (what < 27) {
      const bool keep = sampler.bits() % 3 == 0;
      table->commit("{\"round\":" + std::to_string(round) + "}", keep ? "kept" : "");
      committed = rows;
      if (keep) kept = rows, has_kept = true;
    } else if (what == 27) {
      table->compact();
    } else if (what == 28 && has_kept) {
      evictions += table->stats().store.evictions;
      table->rewind("kept", std::nullopt);
      rows = committed = kept;
    } else if (what == 29 && has_kept) {
      table->drop("kept");
      has_kept = false;
    } else if (what == 30) {
      evictions += table->stats().store.evictions;
      table.reset();  // without a commit
      table = open_table(vfs, path, minimum_ram(spec, committed.size(), true));
      rows = committed;
      check_table_is(table.get(), rows, when + ", reopened");
    } else if (what == 31) {
      check_table_is(table.get(), rows, when, sampler.bits() % 2 == 0);
      table->set_ram(ram * 2 + sampler.bits() % ram);
    }
    const TableStats stats = table->stats();
    CHECK(stats.ram_budget_bytes == 0 || stats.ram_bytes <= stats.ram_budget_bytes);
    CHECK_EQ(stats.store.hits + stats.store.misses + stats.store.first_touches, stats.store.unique_rows);
  }
  evictions += table->stats().store.evictions;
  CHECK(evictions > 50);
  table->commit(std::nullopt, "last");
  table.reset();
  const auto reader = open_table(vfs, path, minimum_ram(spec, rows.size(), true), false);
  check_table_is(reader.get(), rows, "reader");
}

void flip(const std::string& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const auto byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(at);
  file.put(byte);
}

}  // namespace

TEST(table_random_operations_flat) { random_operations(whole_numbers(900, 24), 1, 250, 120, 900); }
TEST(table_random_operations_hashed) { random_operations(whole_numbers(-1, 24), 2, 250, 120, 5000); }
// Of these ranges of rows some become flat and the others stay hashed.
TEST(table_random_operations_bounded) { random_operations(whole_numbers(60'000, 24), 6, 250, 120, 5000); }
TEST(table_random_operations_sixteen_bits) {
  random_operations(whole_numbers(900, 33, DType::kBFloat16), 3, 200, 120, 900);
  random_operations(whole_numbers(900, 33, DType::kFloat16), 4, 200, 120, 900);
}
TEST(table_random_operations_large_records) { random_operations(whole_numbers(100, 3001), 5, 120, 40, 100); }

TEST(table_records_above_half_a_mebibyte) {
  const TableSpec spec = whole_numbers(30, 150001);
  const Sandbox sandbox;
  const size_t ram = minimum_ram(spec, 0, true);
  auto table = Table::create(vfs::posix(), sandbox / "t", "t", spec, ram);
  Rows rows;
  for (int step = 0; step < 3; ++step) {
    std::vector<int64_t> ids;
    std::vector<float> grads;
    for (int64_t id = step; id < 30; id += 2) {
      ids.push_back(id);
      grads.push_back(static_cast<float>(id + step));
    }
    update(table.get(), ids, grads);
    apply(&rows, ids, grads);
  }
  table->commit(std::nullopt, "");
  table.reset();
  table = open_table(vfs::posix(), sandbox / "t", ram);
  std::vector<int64_t> ids = {0, 1, 2, 29};
  std::vector<float> values(ids.size() * spec.dim);
  table->lookup(ids.data(), ids.size(), true, values.data());
  check_values(rows, ids, values, spec.dim, "reopened");
}

// New rows make a hashed directory grow and the cache shrink during an update.
TEST(table_directory_grows_at_the_smallest_budget) {
  const TableSpec spec = whole_numbers(-1, 8);
  FaultVfs vfs;
  const Sandbox sandbox;
  const size_t ram = minimum_ram(spec, 0, true);
  const auto table = Table::create(vfs, sandbox / "t", "t", spec, ram + (ram >> 2));
  Rows rows;
  int64_t next = 0;
  try {
    for (int step = 0; step < 60; ++step) {
      std::vector<int64_t> ids;
      for (int i = 0; i < 400; ++i) ids.push_back(next++ * 7919);
      const std::vector<float> grads(ids.size(), 1.0f);
      update(table.get(), ids, grads);
      apply(&rows, ids, grads);
      const TableStats stats = table->stats();
      CHECK(stats.ram_bytes <= stats.ram_budget_bytes);
    }
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kMemory);
    CHECK(std::string(error.what()).find("nothing was changed") != std::string::npos);
  }
  CHECK(rows.size() >= 4096);
  check_table_is(table.get(), rows, "after growing");
}

// A change of more ids than the scratch memory takes is made in parts. Each part's rows may have room in the directory
// where those of all parts together do not.
TEST(table_change_in_parts_without_room_for_all_changes_nothing) {
  for (const int64_t num_rows : {int64_t{-1}, int64_t{4'000'000}}) {
    for (const bool is_step : {true, false}) {
      const Sandbox sandbox;
      FaultVfs vfs;
      const TableSpec spec = whole_numbers(num_rows, 4);
      auto table = Table::create(vfs, sandbox / "t", "t", spec, size_t{4} << 20);
      constexpr size_t kNew = 60'000;
      bool is_full = false;
      for (int64_t first = 0; !is_full && first < 3'900'000; first += int64_t{kNew} * 7) {
        std::vector<int64_t> ids;
        for (size_t i = 0; i < kNew; ++i) ids.push_back(first + static_cast<int64_t>(i) * 7);
        const std::vector<float> ones(kNew * spec.dim, 1.0f);
        const uint64_t stored = table->stats().stored_rows;
        const int64_t step = table->step();
        try {
          if (is_step) {
            table->update(ids.data(), ids.size(), ones.data(), {}, {});
          } else {
            table->set(ids.data(), ids.size(), 0, ones.data());
          }
          CHECK_EQ(table->stats().stored_rows, stored + kNew);
        } catch (const Error& error) {
          CHECK(error.kind() == ErrorKind::kMemory);
          CHECK(std::string(error.what()).find(std::to_string(kNew) + " new rows") != std::string::npos);
          CHECK_EQ(table->stats().stored_rows, stored);
          CHECK_EQ(table->step(), step);
          is_full = true;
        }
      }
      CHECK(is_full);
    }
  }
}

TEST(table_scan_meets_every_row_while_others_look_up_and_commit) {
  const TableSpec spec = whole_numbers(3000, 64);
  FaultVfs vfs;
  const Sandbox sandbox;
  const auto table = Table::create(vfs, sandbox / "t", "t", spec, minimum_ram(spec, 0, true));
  Rows rows;
  Sampler sampler(9);
  for (int step = 0; step < 60; ++step) {
    std::vector<int64_t> ids(250);
    for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % 3000);
    const std::vector<float> grads(ids.size(), 1.0f);
    update(table.get(), ids, grads);
    apply(&rows, ids, grads);
    if (step % 20 == 7) table->commit("{\"s\":" + std::to_string(step) + "}", "");
  }
  Scan scan(table.get(), {0});
  std::map<int64_t, int> seen;
  std::vector<int64_t> some(50), others(200);
  std::vector<float> values(50 * spec.dim), more(200 * spec.dim);
  float* const out[] = {values.data()};
  for (int round = 0; const size_t n = scan.next(50, some.data(), out); ++round) {
    for (size_t i = 0; i < n; ++i) ++seen[some[i]];
    for (int64_t& id : others) id = static_cast<int64_t>(sampler.bits() % 3000);
    table->lookup(others.data(), others.size(), true, more.data());
    if (round % 10 == 3) table->commit("{\"r\":" + std::to_string(round) + "}", "");
  }
  CHECK_EQ(seen.size(), rows.size());
  for (const auto& [id, times] : seen) CHECK_EQ(times, 1);
}

// One record is damaged: lookups of its row fail, and training and commits go on.
TEST(table_one_damaged_record_blocks_nothing_else) {
  const TableSpec spec = whole_numbers(64, 1100);
  const Sandbox sandbox;
  FaultVfs vfs;
  const size_t ram = minimum_ram(spec, 0, true);
  auto table = Table::create(vfs, sandbox / "t", "t", spec, ram);
  Rows rows;
  std::vector<int64_t> all;
  for (int64_t id = 0; id < 64; ++id) all.push_back(id);
  update(table.get(), all, std::vector<float>(64, 1.0f));
  apply(&rows, all, std::vector<float>(64, 1.0f));
  table->commit(std::nullopt, "");
  table.reset();
  // The record of slot 1 of the first segment: chunk begins at 4096 and the stride is 4408.
  flip((sandbox / "t") + "/" + segment_name(1), 4408 + 100);
  table = open_table(vfs, sandbox / "t", ram);
  int64_t damaged = -1;
  std::vector<float> values(spec.dim);
  for (const int64_t id : all) {
    try {
      table->get(&id, 1, 0, values.data());
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kCorruption);
      CHECK_EQ(damaged, int64_t{-1});
      damaged = id;
    }
  }
  CHECK(damaged >= 0);
  std::vector<int64_t> sound;
  for (const int64_t id : all) {
    if (id != damaged && id % 4 != 0) sound.push_back(id);
  }
  for (int step = 0; step < 30; ++step) {
    const std::vector<float> grads(sound.size(), 1.0f);
    update(table.get(), sound, grads);
    apply(&rows, sound, grads);
    table->commit("{\"s\":" + std::to_string(step) + "}", "");
  }
  CHECK(table->stats().compactions > 0);
  std::vector<float> out(sound.size() * spec.dim);
  table->lookup(sound.data(), sound.size(), true, out.data());
  check_values(rows, sound, out, spec.dim, "next to damage");
  CHECK_THROWS(table->get(&damaged, 1, 0, values.data()), ErrorKind::kCorruption, "fails its checksum");
}

// A run's table after its process died: the files of the dead session do no harm.
TEST(table_of_a_run_goes_on_after_a_crash) {
  TableSpec spec = whole_numbers(64, 1100);
  spec.belongs_to_run = true;
  const Sandbox sandbox;
  FaultVfs vfs;
  const size_t ram = minimum_ram(spec, 0, true);
  auto table = Table::create(vfs, sandbox / "t", "t", spec, ram);
  Rows rows;
  std::vector<int64_t> all;
  for (int64_t id = 0; id < 64; ++id) all.push_back(id);
  const std::vector<float> ones(64, 1.0f);
  update(table.get(), all, ones);
  apply(&rows, all, ones);
  const uint64_t epoch = table->commit(std::nullopt, "");
  table->set_pinned_epochs({epoch}, {});
  for (int step = 0; step < 5; ++step) update(table.get(), all, ones);
  table->commit(std::nullopt, "");  // durable, but the run did not name it
  for (int step = 0; step < 5; ++step) update(table.get(), all, ones);
  vfs.fail_at(1, EIO, true);  // dead
  table.reset();
  vfs.heal();
  OpenOptions options;
  options.ram_bytes = ram;
  options.epoch = epoch;
  options.through_run = true;
  for (int session = 0; session < 3; ++session) {
    table = Table::open(vfs, sandbox / "t", "t", options);
    check_table_is(table.get(), rows, "session " + std::to_string(session));
    for (int step = 0; step < 5; ++step) update(table.get(), all, ones);
    if (session == 1) table->commit(std::nullopt, "");
    vfs.fail_at(1, EIO, true);
    table.reset();
    vfs.heal();
  }
}

// A forked child that destroys its parent's table must not touch the parent's files.
TEST(table_in_a_forked_child_touches_nothing) {
  const TableSpec spec = whole_numbers(64, 1100);
  const Sandbox sandbox;
  FaultVfs vfs;
  auto table = Table::create(vfs, sandbox / "t", "t", spec, minimum_ram(spec, 0, true));
  Rows rows;
  std::vector<int64_t> all;
  for (int64_t id = 0; id < 64; ++id) all.push_back(id);
  const std::vector<float> ones(64, 1.0f);
  update(table.get(), all, ones);
  apply(&rows, all, ones);
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      table->close();
    } catch (const Error& error) {
      status = error.kind() == ErrorKind::kClosed ? 0 : 1;
    }
    std::vector<float> values(spec.dim);
    try {
      table->lookup(all.data(), 1, true, values.data());
      status = 1;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kClosed) status = 1;
    }
    table.reset();
    ::_exit(status);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  table->commit(std::nullopt, "");
  table.reset();
  table = open_table(vfs, sandbox / "t", minimum_ram(spec, 64, true));
  check_table_is(table.get(), rows, "after a child has gone");
}

// Rewinding to a damaged snapshot fails and leaves the newest commit unchanged.
TEST(table_rewind_to_a_damaged_snapshot_loses_nothing) {
  const TableSpec spec = whole_numbers(64, 1100);
  const Sandbox sandbox;
  FaultVfs vfs;
  const size_t ram = minimum_ram(spec, 64, true);
  auto table = Table::create(vfs, sandbox / "t", "t", spec, ram);
  std::vector<int64_t> all;
  for (int64_t id = 0; id < 64; ++id) all.push_back(id);
  const std::vector<float> ones(64, 1.0f);
  Rows rows;
  update(table.get(), all, ones);
  apply(&rows, all, ones);
  table->commit(std::nullopt, "old");
  for (int step = 0; step < 6; ++step) {
    update(table.get(), all, ones);
    apply(&rows, all, ones);
  }
  const uint64_t newest = table->commit(std::nullopt, "");
  std::filesystem::resize_file((sandbox / "t") + "/" + segment_name(1), 8192);
  CHECK_THROWS(table->rewind("old", std::nullopt), ErrorKind::kCorruption, "bytes long");
  table.reset();
  table = open_table(vfs, sandbox / "t", ram);
  CHECK_EQ(table->epoch(), newest);
  check_table_is(table.get(), rows, "after a refused rewind");
}

TEST(table_odd_sizes_are_refused_or_right) {
  FaultVfs vfs;
  const Sandbox sandbox;
  TableSpec wide = whole_numbers(10, 1u << 30);
  wide.optimizer.kind = OptimizerKind::kRowwiseAdagrad;
  CHECK_THROWS((void)Table::create(vfs, "", "t", wide, 0), ErrorKind::kInvalid, "1 GiB");
  // 5 bytes per row of so many rows is 2^64 + 4: the directory size must not wrap around.
  const int64_t many = 3689348814741910324;
  const auto table = Table::create(vfs, sandbox / "t", "t", whole_numbers(many, 4), 64u << 20);
  update(table.get(), {many - 1, 0, many / 2}, {1, 2, 3});
  Rows rows;
  apply(&rows, {many - 1, 0, many / 2}, {1, 2, 3});
  check_table_is(table.get(), rows, "many rows");
  CHECK_THROWS(update(table.get(), {many}, {1}), ErrorKind::kIndex, "is outside");
  CHECK_THROWS(update(table.get(), {-1}, {1}), ErrorKind::kIndex, "is outside");
}

// Several threads, one call at a time inside; the build with ThreadSanitizer checks for races.
TEST(table_calls_from_several_threads) {
  const TableSpec spec = whole_numbers(600, 32);
  FaultVfs vfs;
  const Sandbox sandbox;
  const auto table = Table::create(vfs, sandbox / "t", "t", spec, minimum_ram(spec, 0, true));
  constexpr int kThreads = 4;
  constexpr int kSteps = 40;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Sampler sampler(static_cast<uint64_t>(t));
      // Each thread owns every fourth row, so it knows their values.
      Rows rows;
      std::vector<float> values(64 * spec.dim);
      for (int step = 0; step < kSteps; ++step) {
        std::vector<int64_t> ids(64);
        for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % 150) * kThreads + t;
        table->stage(ids.data(), ids.size());
        const std::vector<float> grads(ids.size(), 1.0f);
        update(table.get(), ids, grads);
        apply(&rows, ids, grads);
        table->lookup(ids.data(), ids.size(), step % 2 == 0, values.data());
        try {
          check_values(rows, ids, values, spec.dim, "thread");
        } catch (const Failure&) {
          ++wrong;
        }
        if (step % 10 == t) table->commit("{\"t\":" + std::to_string(t * 1000 + step) + "}", "");
        (void)table->stats();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(table->step(), int64_t{kThreads * kSteps});
}
