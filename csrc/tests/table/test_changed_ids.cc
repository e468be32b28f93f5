// Another thread changes ids, offsets and gradients during the call: any rows or an error, but no access out of bounds.
#include <atomic>
#include <thread>

#include "base/workers.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

// The change itself is a race, which a thread sanitizer would report.
#if !defined(__SANITIZE_THREAD__)

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr int64_t kRows = 3000;
constexpr int64_t kBad[] = {-1, kRows, int64_t{1} << 40, INT64_MIN, INT64_MAX};

// Repeatedly sets one value of an array to a bad value for a moment.
class Meddler {
 public:
  Meddler(int64_t* values, size_t n)
      : thread_([this, values, n] {
          Sampler sampler(7);
          while (!stop_.load()) {
            int64_t* const value = values + sampler.bits() % n;
            const int64_t good = *value;
            __atomic_store_n(value, kBad[sampler.bits() % std::size(kBad)], __ATOMIC_RELAXED);
            for (uint64_t i = sampler.bits() % 200; i > 0; --i) __atomic_signal_fence(__ATOMIC_SEQ_CST);
            __atomic_store_n(value, good, __ATOMIC_RELAXED);
          }
        }) {}
  ~Meddler() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void meddle(int64_t num_rows, size_t n, int rounds) {
  const Sandbox sandbox;
  const TableSpec spec = whole_numbers(num_rows, 4);
  FaultVfs vfs;
  int made = 0;
  const auto make = [&] {
    return Table::create(vfs, sandbox / std::to_string(made++), "t", spec, 2 * minimum_ram(spec, kRows, true));
  };
  auto table = make();
  Sampler sampler(3);
  std::vector<int64_t> ids(n), offsets(n / 4);
  for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % kRows);
  for (size_t bag = 0; bag < offsets.size(); ++bag) offsets[bag] = static_cast<int64_t>(4 * bag);
  std::vector<float> values(n * spec.dim), grads(n * spec.dim, 1.0f);
  const auto found = std::make_unique<bool[]>(n);
  table->update(ids.data(), n, grads.data(), {}, {});
  int done = 0, refused = 0;
  {
    const Meddler with_ids(ids.data(), n);
    const Meddler with_offsets(offsets.data() + 1, offsets.size() - 1);
    for (int round = 0; round < rounds; ++round) {
      for (int call = 0; call < 9; ++call) {
        try {
          if (call == 0) table->lookup(ids.data(), n, round % 2 == 0, values.data());
          if (call == 1) table->update(ids.data(), n, grads.data(), {}, {});
          if (call == 2) {
            table->lookup_bags(ids.data(), n, offsets.data(), offsets.size(), Pooling::kMean, nullptr, true,
                               values.data());
          }
          if (call == 3) table->get(ids.data(), n, 0, values.data());
          if (call == 4) table->set(ids.data(), n, 0, grads.data());
          if (call == 5) table->contains(ids.data(), n, found.get());
          if (call == 6) table->stage(ids.data(), n);
          if (call == 7) {
            const Batch batch = table->batch(ids.data(), n);
            table->lookup(batch, true, values.data());
          }
          if (call == 8) table->expect(ids.data(), n, 4);
          ++done;
        } catch (const Error& error) {
          CHECK(error.kind() == ErrorKind::kIndex || error.kind() == ErrorKind::kInvalid ||
                error.kind() == ErrorKind::kBroken);
          ++refused;
          if (error.kind() == ErrorKind::kBroken) table = make();  // a change larger than its memory failed half-way
        }
      }
    }
  }
  CHECK(done > 0);
  CHECK(refused > 0);
  if (num_rows < 0) return;  // every id is valid
  std::vector<int64_t> all(kRows);
  for (int64_t row = 0; row < kRows; ++row) all[static_cast<size_t>(row)] = row;
  std::vector<float> rows(all.size() * spec.dim);
  table->lookup(all.data(), all.size(), false, rows.data());
  for (const float value : rows)
    CHECK(value == 1.0f || (value <= 0.0f && value == static_cast<float>(static_cast<int>(value))));
}

}  // namespace

TEST(changed_ids_of_a_flat_directory) { meddle(kRows, 2000, 300); }
TEST(changed_ids_of_a_hashed_directory) { meddle(-1, 2000, 300); }
TEST(changed_ids_of_a_batch_that_is_deduped_in_parts) {
  const size_t threads = num_threads();
  set_num_threads(4);
  meddle(kRows, 40'000, 20);
  set_num_threads(threads);
}

#endif
