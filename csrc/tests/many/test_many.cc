// Calls of several tables: the same rows, sums and counts as single calls, and no change where one part is refused.
#include "many/many.h"

#include <cmath>
#include <functional>

#include "base/workers.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr uint32_t kDim = 24;

// Tables of two sizes, some with so little RAM that rows are evicted.
std::vector<std::unique_ptr<Table>> make_tables(vfs::Vfs& vfs, const Sandbox& sandbox, const std::string& prefix) {
  std::vector<std::unique_ptr<Table>> tables;
  for (int i = 0; i < 6; ++i) {
    const TableSpec spec = whole_numbers(i == 0 ? 20000 : 400, kDim);
    const std::string name = prefix + std::to_string(i);
    const bool is_in_ram = i % 2 == 0;
    tables.push_back(
        Table::create(vfs, is_in_ram ? "" : sandbox / name, name, spec, is_in_ram ? 0 : minimum_ram(spec, 0, true)));
  }
  return tables;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void check_same_counts(Table* a, Table* b) {
  const TableStats x = a->stats(), y = b->stats();
  CHECK_EQ(x.lookups, y.lookups);
  CHECK_EQ(x.updates, y.updates);
  CHECK_EQ(x.ids, y.ids);
  CHECK_EQ(x.store.unique_rows, y.store.unique_rows);
  CHECK_EQ(x.store.hits, y.store.hits);
  CHECK_EQ(x.store.misses, y.store.misses);
  CHECK_EQ(x.store.first_touches, y.store.first_touches);
  CHECK_EQ(x.store.evictions, y.store.evictions);
  CHECK_EQ(x.stored_rows, y.stored_rows);
}

// Steps of all tables in one call, and of a second set of tables one by one. `scale`: ids of a part.
void check_like_single_calls(size_t threads, size_t scale) {
  const size_t before = num_threads();
  set_num_threads(threads);
  const Sandbox sandbox;
  FaultVfs vfs;
  const auto many = make_tables(vfs, sandbox, "many"), single = make_tables(vfs, sandbox, "single");
  Sampler sampler(5);
  for (int step = 0; step < 12; ++step) {
    // The last part names the first part's table again. Its batch is summed with the first part's below.
    const size_t n = many.size() + 1;
    std::vector<std::vector<int64_t>> ids(n);
    std::vector<std::vector<float>> out(n), expected(n);
    std::vector<Batch> batches(n);
    std::vector<LookupPart> lookups;
    for (size_t i = 0; i < n; ++i) {
      Table* const table = many[i % many.size()].get();
      ids[i].resize(i == 0 ? 8 * scale : sampler.bits() % scale);
      for (int64_t& id : ids[i])
        id = static_cast<int64_t>(sampler.bits() % static_cast<uint64_t>(table->spec().num_rows));
      out[i].resize(ids[i].size() * kDim);
      expected[i] = out[i];
      const bool trains = (static_cast<size_t>(step) + i) % 4 != 0;
      lookups.push_back(
          {table, ids[i].data(), ids[i].size(), trains, std::nullopt, out[i].data(), trains ? &batches[i] : nullptr});
    }
    lookup_many(lookups);
    for (size_t i = 0; i < n; ++i) {
      Table* const table = single[i % many.size()].get();
      const LookupPart& part = lookups[i];
      if (part.batch == nullptr) {
        table->lookup(part.ids, part.n, part.touch, expected[i].data());
      } else {
        table->lookup(table->batch(part.ids, part.n), part.touch, expected[i].data());
      }
      CHECK(out[i] == expected[i]);
    }
    std::vector<std::vector<float>> grads(many.size()), sums(many.size());
    std::vector<Batch> whole(many.size());
    std::vector<SumPart> sum_parts;
    std::vector<UpdatePart> updates;
    for (size_t i = 0; i < many.size(); ++i) {
      grads[i].resize(ids[i].size() * kDim);
      for (float& grad : grads[i]) grad = static_cast<float>(static_cast<int>(sampler.bits() % 5) - 2);
      whole[i] = many[i]->batch(ids[i].data(), ids[i].size());
      sums[i].resize(whole[i].num_unique() * kDim);
      sum_parts.push_back({&whole[i], {nullptr, 0, false, nullptr, grads[i].data(), kDim}, 1, sums[i].data(), {}});
      updates.push_back({many[i].get(), &whole[i], sums[i].data(), 0.5, std::nullopt});
    }
    sum_many(&sum_parts);
    update_many(updates);
    for (size_t i = 0; i < many.size(); ++i) {
      const Batch batch = single[i]->batch(ids[i].data(), ids[i].size());
      std::vector<float> own(batch.num_unique() * kDim);
      CHECK(sum_parts[i].squares.words() == sum_gradients(batch, grads[i].data(), kDim, own.data()).words());
      CHECK(sums[i] == own);
      single[i]->update(batch, own.data(), 0.5, std::nullopt);
    }
  }
  uint64_t evictions = 0;
  for (size_t i = 0; i < many.size(); ++i) {
    check_same_counts(many[i].get(), single[i].get());
    evictions += many[i]->stats().store.evictions;
    std::vector<int64_t> all(static_cast<size_t>(many[i]->spec().num_rows));
    for (size_t id = 0; id < all.size(); ++id) all[id] = static_cast<int64_t>(id);
    std::vector<float> a(all.size() * kDim), b(all.size() * kDim);
    many[i]->get(all.data(), all.size(), 0, a.data());
    single[i]->get(all.data(), all.size(), 0, b.data());
    CHECK(a == b);
  }
  CHECK(evictions > 0);
  set_num_threads(before);
}

}  // namespace

TEST(many_like_single_calls_on_the_caller) { check_like_single_calls(1, 40); }
TEST(many_like_single_calls_of_little_work) { check_like_single_calls(3, 20); }
TEST(many_like_single_calls_on_threads) { check_like_single_calls(3, 3000); }

TEST(many_pools_bags) {
  auto table = Table::create(vfs::posix(), "", "t", whole_numbers(10, 2), 0);
  update(table.get(), {1, 2}, {1.0f, 10.0f});
  const std::vector<int64_t> ids = {1, 2, 2}, offsets = {0, 1};
  const std::vector<float> weights = {2.0f, 1.0f, 3.0f}, grads = {1.0f, 2.0f, 3.0f, 4.0f};
  std::vector<float> out(4), sums(4);
  Batch batch;
  lookup_many({{table.get(), ids.data(), 3, true, PartBags{offsets.data(), 2, Pooling::kSum, weights.data()},
                out.data(), &batch}});
  CHECK(out == (std::vector<float>{-2.0f, -4.0f, -40.0f, -80.0f}));
  std::vector<SumPart> parts = {
      {&batch, {offsets.data(), 2, false, weights.data(), grads.data(), 2}, 1, sums.data(), {}}};
  sum_many(&parts);
  CHECK(sums == (std::vector<float>{2.0f, 4.0f, 12.0f, 16.0f}));
  CHECK_EQ(parts[0].squares.rounded(), 4.0 + 16.0 + 144.0 + 256.0);
}

TEST(many_sums_of_columns) {
  auto table = Table::create(vfs::posix(), "", "t", whole_numbers(10, 2), 0);
  const std::vector<int64_t> ids = {4, 7, 4};
  const std::vector<float> grads = {0, 0, 1, 2, 0, 0, 0, 0, 3, 4, 0, 0, 0, 0, 5, 6};  // the second of three columns
  const Batch batch = table->batch(ids.data(), ids.size());
  std::vector<float> sums(4);
  std::vector<SumPart> parts = {{&batch, {nullptr, 0, false, nullptr, grads.data() + 2, 2}, 3, sums.data(), {}}};
  sum_many(&parts);
  CHECK(sums == (std::vector<float>{6.0f, 8.0f, 3.0f, 4.0f}));
}

TEST(many_check_every_table_first) {
  const Sandbox sandbox;
  FaultVfs vfs;
  const auto tables = make_tables(vfs, sandbox, "t");
  Table* const first = tables[1].get();
  Table* const last = tables[3].get();
  const std::vector<int64_t> good = {1, 2}, bad = {5, 400};
  std::vector<float> out(2 * kDim), sums(2 * kDim, 1.0f);
  Batch a, b;
  const auto look_up = [&](const std::vector<int64_t>& ids, bool makes_batch) {
    lookup_many({{first, good.data(), 2, true, std::nullopt, out.data(), &a},
                 {last, ids.data(), 2, true, std::nullopt, out.data(), makes_batch ? &b : nullptr}});
  };
  for (const bool makes_batch : {false, true}) {
    CHECK_EQ(error_of([&] { look_up(bad, makes_batch); }),
             std::string("table 't3': id 400 at position 1 is outside [0, 400)"));
  }
  CHECK_EQ(first->stats().lookups, 0u);
  const Batch batch = first->batch(good.data(), 2);
  const auto update_both = [&](std::optional<double> lr, std::optional<int64_t> step) {
    update_many({{first, &batch, sums.data(), std::nullopt, std::nullopt}, {last, &batch, sums.data(), lr, step}});
  };
  CHECK(error_of([&] { update_both(std::nan(""), std::nullopt); }).find("table 't3': lr must be finite") == 0);
  CHECK(error_of([&] { update_both(1.0, 0); }).find("table 't3': step must be in") == 0);
  last->close();
  CHECK_EQ(error_of([&] { update_both(1.0, std::nullopt); }), std::string("table 't3' is closed; open it again"));
  CHECK_EQ(error_of([&] { look_up(good, true); }), std::string("table 't3' is closed; open it again"));
  CHECK_EQ(first->step(), 0);
  CHECK_EQ(first->stats().stored_rows, 0u);
  CHECK_EQ(first->stats().lookups, 0u);
}
