// The checks that calls make first. Each error names the first bad value and its position.
#include "state/table_state.h"

#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "format/record.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/parts.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr int64_t kLast = std::numeric_limits<int64_t>::max();

// Without a store: the checks of arguments need none.
struct Bare {
  explicit Bare(int64_t num_rows, DType dtype = DType::kFloat32)
      : state(vfs::posix(), "/nowhere/t", "t", whole_numbers(num_rows, 4, dtype), {}) {}
  void check_ids(const std::vector<int64_t>& ids) { state.check_ids(ids.data(), ids.size()); }
  void assign(const std::vector<int64_t>& ids) { state.assign_checked(&batch, ids.data(), ids.size()); }
  void assign(const std::vector<int64_t>& ids, const std::vector<uint32_t>& members) {
    state.assign_checked(&batch, ids.data(), members.size(), members.data());
  }
  TableState state;
  Batch batch;
};

std::string refusal(int64_t id, size_t position, const std::string& end) {
  return "table 't': id " + std::to_string(id) + " at position " + std::to_string(position) + " is outside [0, " + end +
         ")";
}

}  // namespace

TEST(table_state_refuses_the_first_bad_id_at_each_place) {
  Bare closed(100), open(-1);
  closed.check_ids({});
  closed.check_ids({0, 99, 5, 5});
  open.check_ids({0, kLast});
  for (size_t n : {1, 2, 3, 8, 33, 70}) {
    for (size_t at = 0; at < n; ++at) {
      for (const int64_t bad : {int64_t{-1}, int64_t{100}, kLast, -kLast - 1}) {
        std::vector<int64_t> ids(n, 7);
        ids[at] = bad;
        ids.back() = at + 1 < n ? -5 : bad;  // another one behind it
        CHECK_THROWS(closed.check_ids(ids), ErrorKind::kIndex, refusal(bad, at, "100"));
        CHECK_THROWS(closed.assign(ids), ErrorKind::kIndex, refusal(bad, at, "100"));
        ids.back() = ids[at];
        if (bad >= 0) {
          open.check_ids(ids);
        } else {
          CHECK_THROWS(open.check_ids(ids), ErrorKind::kIndex, refusal(bad, at, "2**63"));
        }
      }
    }
  }
}

TEST(table_state_of_no_rows_refuses_every_id) {
  Bare empty(0);
  empty.check_ids({});
  empty.assign({});
  CHECK_THROWS(empty.check_ids({0}), ErrorKind::kIndex, refusal(0, 0, "0"));
}

// Small batches are deduped by one thread, large ones in parts. The position is that of the id in the caller's array.
TEST(table_state_names_the_first_bad_id_of_a_batch) {
  for (const size_t n : {size_t{10}, size_t{200'000}}) {
    Bare table(1000);
    std::vector<int64_t> ids(n);
    for (size_t i = 0; i < n; ++i) ids[i] = static_cast<int64_t>(i % 997);
    table.assign(ids);
    CHECK_EQ(table.batch.checked_end(), uint64_t{1000});
    ids[n / 2] = ids[n - 1] = 2000;  // the same bad id twice, and a smaller one later
    ids[n / 2 + 1] = -3;
    CHECK_THROWS(table.assign(ids), ErrorKind::kIndex, refusal(2000, n / 2, "1000"));
    CHECK_EQ(table.batch.checked_end(), uint64_t{0});
    ids[n / 2] = 1;
    CHECK_THROWS(table.assign(ids), ErrorKind::kIndex, refusal(-3, n / 2 + 1, "1000"));
  }
}

TEST(table_state_checks_the_members_of_a_batch_alone) {
  Bare table(100);
  const std::vector<int64_t> ids{5, -1, 6, 200, 5, 300, 6};
  table.assign(ids, {0, 2, 4, 6});
  CHECK_EQ(table.batch.num_unique(), size_t{2});
  CHECK_THROWS(table.assign(ids, {0, 2, 5, 3}), ErrorKind::kIndex, refusal(300, 5, "100"));
  CHECK_THROWS(table.assign(ids, {6, 3}), ErrorKind::kIndex, refusal(200, 3, "100"));
  CHECK_THROWS(table.assign(ids, {1}), ErrorKind::kIndex, refusal(-1, 1, "100"));
}

// A batch remembers the number of rows that it was checked for. A table of another size checks it again.
TEST(table_state_checks_a_batch_of_another_table_again) {
  Bare large(1000), small(50), other(1000), open(-1);
  large.assign({7, 700, 3});
  const Batch& batch = large.batch;
  large.state.check_batch(batch);
  other.state.check_batch(batch);
  open.state.check_batch(batch);
  CHECK_THROWS(small.state.check_batch(batch), ErrorKind::kIndex, refusal(700, 1, "50"));
  CHECK_EQ(batch.checked_end(), uint64_t{1000});  // a check alone changes nothing
  large.assign({7, 3});
  small.state.check_batch(batch);
  CHECK_EQ(batch.checked_end(), uint64_t{1000});
  // Batch::assign() alone checks nothing.
  Batch unchecked;
  const int64_t ids[] = {5, -9};
  unchecked.assign(ids, 2);
  for (Bare* const table : {&large, &small}) {
    CHECK_THROWS(table->state.check_batch(unchecked), ErrorKind::kIndex, "id -9 at position 1");
  }
  CHECK_THROWS(open.state.check_batch(unchecked), ErrorKind::kIndex, refusal(-9, 1, "2**63"));
  // A checked batch is not checked a second time.
  unchecked.set_checked(1000);
  large.state.check_batch(unchecked);
  CHECK_THROWS(small.state.check_batch(unchecked), ErrorKind::kIndex, "id -9 at position 1");
  unchecked.assign(ids, 2);
  CHECK_THROWS(large.state.check_batch(unchecked), ErrorKind::kIndex, "id -9 at position 1");
}

// All places of an id are in one part, and the parts together are the batch.
TEST(table_state_splits_a_batch_into_parts) {
  Sampler sampler(1);
  for (const size_t parts : {size_t{1}, size_t{2}, size_t{3}, size_t{7}}) {
    for (const size_t n : {size_t{0}, size_t{1}, size_t{500}, size_t{30'000}}) {
      Bare table(2000);
      std::vector<int64_t> ids(n);
      for (int64_t& id : ids) id = static_cast<int64_t>(sampler.bits() % 2000);
      std::map<int64_t, size_t> part_of;
      std::vector<int> times(n, 0);
      for (size_t part = 0; part < parts; ++part) {
        table.state.assign_part(&table.batch, ids.data(), n, part, parts);
        CHECK_EQ(table.batch.checked_end(), uint64_t{2000});
        if (n > 20'000) CHECK(table.batch.size() > n / parts / 2);  // about as many in each
        for (size_t u = 0; u < table.batch.num_unique(); ++u) {
          CHECK(part_of.emplace(table.batch.unique()[u], part).second);
          for (uint32_t o = table.batch.offsets()[u]; o < table.batch.offsets()[u + 1]; ++o) {
            const uint32_t place = table.batch.order()[o];
            CHECK_EQ(ids[place], table.batch.unique()[u]);
            ++times[place];
          }
        }
      }
      for (const int count : times) CHECK_EQ(count, 1);
    }
  }
}

TEST(table_state_names_a_bad_id_in_its_part) {
  Bare table(100);
  std::vector<int64_t> ids(1000, 1);
  ids[333] = 4000;
  for (const size_t parts : {size_t{1}, size_t{4}}) {
    size_t refused = 0;
    for (size_t part = 0; part < parts; ++part) {
      try {
        table.state.assign_part(&table.batch, ids.data(), ids.size(), part, parts);
      } catch (const Error& error) {
        ++refused;
        CHECK(std::string(error.what()).find(refusal(4000, 333, "100")) != std::string::npos);
      }
    }
    CHECK_EQ(refused, size_t{1});
  }
}

TEST(table_state_refuses_values_that_are_not_finite) {
  Bare table(100);
  const std::vector<int64_t> ids{8, 9, 10, 11, 12};
  std::vector<float> values(ids.size() * 3, 1.0f);
  const auto check = [&] { table.state.check_finite(ids.data(), ids.size(), values.data(), 3, "gradient"); };
  check();
  values[4] = std::numeric_limits<float>::max();
  values[5] = -std::numeric_limits<float>::denorm_min();
  check();
  const std::vector<std::pair<std::string, float>> all{
      {"inf", INFINITY}, {"-inf", -INFINITY}, {"nan", NAN}, {"nan", -NAN}};
  for (const auto& [shown, bad] : all) {
    for (size_t at = 0; at < values.size(); ++at) {
      std::vector<float> before = values;
      values[at] = bad;
      if (at + 1 < values.size()) values.back() = NAN;
      const std::string place = "table 't': gradient at position " + std::to_string(at / 3) + " (id " +
                                std::to_string(ids[at / 3]) + "), element " + std::to_string(at % 3) + ", is " + shown +
                                "; nothing was changed";
      CHECK_THROWS(check(), ErrorKind::kInvalid, place);
      values = before;
    }
  }
  table.state.check_finite(ids.data(), 0, nullptr, 3, "gradient");
}

// The least float32 that rounds to infinity in 16 bits, and the value before it.
TEST(table_state_refuses_values_that_their_type_cannot_hold) {
  struct Limit {
    DType dtype;
    float exceeds;
    const char* shown;
  };
  const float largest = std::numeric_limits<float>::max();
  const std::vector<Limit> limits{{DType::kFloat16, 65520.0f, "65520, beyond what float16 holds"},
                                  {DType::kBFloat16, std::bit_cast<float>(0x7f7f8000u), "beyond what bfloat16 holds"}};
  const std::vector<int64_t> ids{8, 9};
  for (const auto& [dtype, exceeds, shown] : limits) {
    const float fits = std::nextafter(exceeds, 0.0f);
    Bare table(100, dtype);
    const Field field = fields_of(table.state.spec).at(0);
    CHECK_EQ(field.length, 4u);
    std::vector<float> values(8, fits);
    const auto check = [&] { table.state.check_fits(ids.data(), ids.size(), values.data(), field); };
    check();
    values[6] = -fits;
    check();
    for (const float bad : {exceeds, -exceeds, largest}) {
      values[6] = bad;
      values[7] = bad;
      CHECK_THROWS(check(), ErrorKind::kInvalid, "table 't': value at position 1 (id 9), element 2, is ");
      CHECK_THROWS(check(), ErrorKind::kInvalid, bad == exceeds ? shown : "; nothing was changed");
    }
    // write_field() would store the refused value as infinity.
    std::vector<std::byte> record(field_bytes(field));
    for (const float value : {fits, exceeds}) {
      const std::vector<float> wide(4, value);
      std::vector<float> back(4);
      write_field(field, wide.data(), record.data());
      read_field(field, record.data(), back.data());
      CHECK_EQ(std::isinf(back[0]), value == exceeds);
    }
  }
  Bare table(100);
  const std::vector<float> values(8, largest);
  table.state.check_fits(ids.data(), ids.size(), values.data(), fields_of(table.state.spec).at(0));
}

TEST(table_state_takes_as_many_ids_as_places_have_numbers) {
  Bare table(100);
  constexpr size_t kMost = ~uint32_t{0};
  table.state.require_places(0);
  table.state.require_places(kMost);
  CHECK_THROWS(table.state.require_places(kMost + 1), ErrorKind::kInvalid,
               "table 't': one call takes at most 2**32 - 1 ids, got 4294967296; split it");
}

TEST(table_state_says_why_it_refuses_use) {
  Bare table(100);
  TableState& state = table.state;
  state.require_usable();
  state.require_writable();
  state.require_durable("snapshots");
  state.read_only_reason = "a sync failed";
  state.require_usable();
  CHECK_THROWS(state.require_writable(), ErrorKind::kReadOnly, "table 't' is read-only until reopened: a sync failed");
  state.options.writable = false;
  CHECK_THROWS(state.require_writable(), ErrorKind::kReadOnly, "is open for reading; open it with mode=\"w\"");
  state.broken = "half an update";
  for (int writes = 0; writes < 2; ++writes) {
    CHECK_THROWS(writes == 1 ? state.require_writable() : state.require_usable(), ErrorKind::kBroken,
                 "table 't' refuses use until it is reopened at its last commit: half an update");
  }
  state.is_closed = true;
  CHECK_THROWS(state.require_usable(), ErrorKind::kClosed, "table 't' is closed; open it again");
  CHECK_THROWS(state.require_writable(), ErrorKind::kClosed, "table 't' is closed");
  state.spec.is_scratch = true;
  CHECK_THROWS(state.require_durable("snapshots"), ErrorKind::kInvalid,
               "table 't' is a scratch table, of which nothing is kept: it has no snapshots");
}

TEST(table_state_makes_errors_with_its_name_and_path) {
  Bare table(100);
  const Error disk = table.state.out_of_disk("7 rows are too many", 12345);
  CHECK(disk.kind() == ErrorKind::kSystem);
  CHECK_EQ(disk.error_number(), ENOSPC);
  CHECK_EQ(disk.path(), std::string("/nowhere/t"));
  CHECK_EQ(std::string(disk.what()), std::string("table 't': 7 rows are too many; disk=12345 would do"));
}

TEST(table_state_knows_how_many_rows_it_may_have) {
  CHECK_EQ(Bare(100).state.ids_end(), uint64_t{100});
  CHECK_EQ(Bare(100).state.max_rows(), uint64_t{100});
  CHECK_EQ(Bare(-1).state.ids_end(), uint64_t{1} << 63);
  CHECK_EQ(Bare(-1).state.max_rows(), ~uint64_t{0});
}

// A piece of a call fits the scratch. Each call has at least one piece.
TEST(table_state_cuts_calls_into_pieces_that_fit_the_scratch) {
  const TableSpec spec = whole_numbers(-1, 4);
  size_t before = 0;
  for (const size_t ram : {minimum_ram(spec, 0, false), size_t{1} << 20, size_t{64} << 20, size_t{0}}) {
    Parts table(spec, ram);
    const size_t piece = table.state.piece_ids();
    CHECK(piece >= 64 && piece > before);
    CHECK(piece * 96 <= table.state.store->plan().scratch_bytes);
    CHECK_EQ(table.state.num_pieces(0), size_t{1});
    CHECK_EQ(table.state.num_pieces(1), size_t{1});
    CHECK_EQ(table.state.num_pieces(piece), size_t{1});
    CHECK_EQ(table.state.num_pieces(piece + 1), size_t{2});
    CHECK_EQ(table.state.num_pieces(5 * piece), size_t{5});
    before = piece;
  }
}

TEST(table_state_knows_whether_rows_may_leave_ram) {
  const Sandbox sandbox;
  FaultVfs vfs;
  TableSpec spec = whole_numbers(20'000, 16);
  const auto check = [&](const std::string& name, size_t ram, bool may_evict, bool has_files) {
    const auto table = new_parts(vfs, sandbox / name, spec, Parts::with_ram(ram));
    CHECK_EQ(table->state.may_evict(), may_evict);
    CHECK_EQ(table->state.has_files(), has_files);
  };
  check("little", minimum_ram(spec, 0, true), true, true);
  check("all", wanted_ram(spec, true), false, true);
  spec.num_rows = -1;
  check("open", size_t{256} << 20, true, true);
  const Parts in_ram(spec, size_t{1} << 20);
  CHECK(!in_ram.state.may_evict() && !in_ram.state.has_files());
  const Parts unbounded(spec);
  CHECK(!unbounded.state.may_evict());
}

TEST(table_state_counts_changes) {
  Bare table(100);
  CHECK(!table.state.is_changed);
  table.state.mark_changed();
  table.state.mark_changed();
  CHECK(table.state.is_changed);
  CHECK_EQ(table.state.changes, uint64_t{2});
}

// Weights, padding, then the slots. For a lookup, the weights alone.
TEST(table_state_writes_the_record_of_a_row_that_was_never_stored) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    TableSpec spec = whole_numbers(100, 3, dtype);
    spec.init = {InitKind::kUniform, -2.0, 2.0, 42};
    spec.optimizer.kind = OptimizerKind::kAdagrad;
    spec.optimizer.initial_accumulator = 0.5;
    Parts table(spec);
    const TableState& state = table.state;
    const size_t bytes = state.payload_bytes;
    CHECK(bytes > state.weight_bytes);
    Parts wide([&] {
      TableSpec same = spec;
      same.dtype = DType::kFloat32;
      return same;
    }());
    std::map<float, int> seen;
    for (const int64_t row : {int64_t{0}, int64_t{1}, int64_t{99}}) {
      std::vector<std::byte> whole(bytes, std::byte{0xaa}), weights(bytes, std::byte{0xaa});
      state.initial_record(row, bytes, whole.data());
      state.initial_record(row, state.weight_bytes, weights.data());
      CHECK(std::memcmp(whole.data(), weights.data(), state.weight_bytes) == 0);
      for (size_t at = state.weight_bytes; at < bytes; ++at) CHECK(weights[at] == std::byte{0xaa});
      for (size_t at = 3 * dtype_bytes(dtype); at < state.weight_bytes; ++at) CHECK(whole[at] == std::byte{0});
      std::vector<float> slots(3), values(3), expected(3);
      read_field(state.fields.at(1), whole.data(), slots.data());
      for (const float slot : slots) CHECK_EQ(slot, 0.5f);
      // The values of the float32 table, rounded to the type.
      std::vector<std::byte> record(wide.state.payload_bytes), rounded(bytes);
      wide.state.initial_record(row, wide.state.weight_bytes, record.data());
      read_field(wide.state.fields.at(0), record.data(), expected.data());
      write_field(state.fields.at(0), expected.data(), rounded.data());
      read_field(state.fields.at(0), rounded.data(), expected.data());
      read_field(state.fields.at(0), whole.data(), values.data());
      CHECK(values == expected);
      for (const float value : values) {
        CHECK(value >= -2.0f && value <= 2.0f);
        ++seen[value];
      }
    }
    CHECK(seen.size() > 6);
  }
}
