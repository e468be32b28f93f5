// The change feed: a consumer that applies it has the commit's rows, whatever the writer did between.
#include "base/fault.h"
#include "feed/changes.h"
#include "tests/jobs/life.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

// A consumer with a cursor of its own.
struct Consumer {
  std::string name;
  Rows rows;
  Cursor cursor;
  uint64_t puts = 0, deletions = 0;

  // Applies the changes since the last call. `expected`: the rows of the newest commit.
  void consume(Life* life, const Rows& expected, size_t ram_bytes, size_t at_once) {
    const std::string path = life->sandbox / "t";
    Changes changes(life->vfs, path, "t", cursor, std::nullopt, ram_bytes);
    const size_t dim = Life::kDim;
    std::vector<int64_t> ids(at_once), deleted(at_once);
    std::vector<float> weights(at_once * dim);
    const Rows before = rows;
    std::set<int64_t> seen;
    for (;;) {
      const Changes::Found found = changes.next(at_once, ids.data(), weights.data(), deleted.data());
      if (found.rows + found.deleted == 0) break;
      for (size_t i = 0; i < found.rows; ++i) {
        CHECK(seen.insert(ids[i]).second);
        rows[ids[i]] = weights[i * dim];
        for (size_t d = 0; d < dim; ++d) CHECK_EQ(weights[i * dim + d], element(rows[ids[i]], d));
      }
      for (size_t i = 0; i < found.deleted; ++i) {
        CHECK(seen.insert(deleted[i]).second);
        rows.erase(deleted[i]);
      }
      puts += found.rows;
      deletions += found.deleted;
    }
    CHECK(rows == expected);
    // Every row that differs was named; others may be, because an update may leave a row's value as it was.
    for (const auto& [id, value] : expected) {
      const auto found = before.find(id);
      if (found == before.end() || found->second != value) CHECK(seen.contains(id));
    }
    cursor = changes.cursor();
    save(life);
  }

  void save(Life* life) const {
    const std::string path = life->sandbox / ("t/cursor-" + name);
    const Bytes bytes = encode_cursor(life->table->uuid(), cursor);
    life->vfs.remove(path);
    life->vfs.create_small(path)->write(bytes.data(), bytes.size(), 0);
  }
};

struct Followed {
  uint64_t puts = 0, deletions = 0, undone = 0, purges = 0;
};

Followed follow_a_life(uint64_t seed, int64_t num_rows, int calls) {
  const NoCompactionSlack no_slack;
  const SmallIndexSnapshots small_snapshots;
  Life life(seed, num_rows, 64 << 20, 0);
  life.commit(false);
  Consumer often, rarely;
  often.name = "often";
  rarely.name = "rarely";
  Followed followed;
  const auto consume = [&](Consumer* consumer) {
    const size_t ram = life.sampler.bits() % 2 == 0 ? 1 << 20 : 0;
    try {
      consumer->consume(&life, life.committed, ram, 1 + life.sampler.bits() % 700);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInvalid || std::string(error.what()).find("was undone") == std::string::npos)
        throw;
      ++followed.undone;
      consumer->cursor = {};
      consumer->rows.clear();
      consumer->consume(&life, life.committed, ram, 100);
    }
  };
  for (int call = 0; call < calls; ++call) {
    const uint64_t choice = life.sampler.bits() % 100;
    if (choice < (call / 60 % 2 == 1 ? 10 : 40)) {
      life.train(300);
    } else if (choice < 70) {
      life.remove(300);
    } else if (choice < 82) {
      life.commit(choice % 2 == 0);
    } else if (choice < 92) {
      consume(&often);
    } else if (choice < 94) {
      consume(&rarely);
    } else if (choice < 96) {
      life.reopen();
    } else if (choice < 98) {
      life.table->compact();
    } else {
      life.table->commit(std::nullopt, "kept");
      const Rows kept = life.committed = life.rows;
      if (choice == 98) consume(&often);
      life.train(300);
      life.remove(400);
      life.commit(false);
      if (choice == 99) consume(&often);
      life.table->rewind("kept", std::nullopt);
      life.table->drop("kept");
      life.rows = life.committed = kept;
    }
  }
  life.commit(false);
  consume(&often);
  consume(&rarely);
  followed.puts = often.puts + rarely.puts;
  followed.deletions = often.deletions + rarely.deletions;
  followed.purges = newest_commit(life.sandbox / "t").deletions_from > 1;
  return followed;
}

}  // namespace

TEST(changes_make_a_consumer_equal) {
  Followed all;
  for (const int64_t num_rows : {int64_t{-1}, Life::kIds}) {
    for (const uint64_t seed : {1, 2, 3}) {
      const Followed followed = follow_a_life(seed, num_rows, 500);
      all.puts += followed.puts;
      all.deletions += followed.deletions;
      all.undone += followed.undone;
      all.purges += followed.purges;
    }
  }
  CHECK(all.puts > 10000);
  CHECK(all.deletions > 5000);
  CHECK(all.undone > 2);
  CHECK(all.purges > 2);
}

TEST(changes_find_seeded_bugs) {
  for (const char* bug : {"lost_tombstone", "move_outranks"}) {
    set_fault(bug);
    bool is_found = false;
    for (uint64_t seed = 1; seed <= 3 && !is_found; ++seed) {
      try {
        follow_a_life(seed, -1, 300);
      } catch (const std::exception&) {
        is_found = true;
      }
    }
    set_fault(nullptr);
    if (!is_found) fail(__FILE__, __LINE__, std::string("not found: ") + bug);
  }
}

TEST(changes_refuse_what_they_cannot_know) {
  const NoCompactionSlack no_slack;
  Life life(1, -1, 64 << 20, 0);
  life.train(300);
  life.commit(false);
  const uint64_t first = newest_commit(life.sandbox / "t").epoch;
  const auto since = [&](uint64_t epoch) {
    Changes(life.vfs, life.sandbox / "t", "t", {epoch, 0}, std::nullopt, 1 << 20);
  };
  since(first);
  CHECK_THROWS(since(first + 1), ErrorKind::kInvalid, "in the future; the newest one is " + std::to_string(first));
  for (int i = 0; i < 3; ++i) {
    life.train(300);
    life.commit(false);
  }
  CHECK_THROWS(since(first), ErrorKind::kInvalid, "is gone");
  since(first + 2);
  // A consumer without a cursor in the table's directory: the writer does not know what it needs.
  const Cursor old{first + 3, newest_commit(life.sandbox / "t").next_version};
  for (int i = 0; i < 60 && newest_commit(life.sandbox / "t").deletions_from <= old.next_version; ++i) {
    life.train(300);
    life.commit(false);
    life.remove(2000);
    life.commit(false);
  }
  CHECK_THROWS(Changes(life.vfs, life.sandbox / "t", "t", old, std::nullopt, 1 << 20), ErrorKind::kInvalid,
               "no longer known");
}

TEST(changes_refuse_a_damaged_cursor) {
  const Uuid uuid{1}, other{2};
  CHECK(decode_cursor(encode_cursor(uuid, {7, 99, true}), uuid, "c").is_new);
  const Bytes bytes = encode_cursor(uuid, {7, 99});
  const Cursor cursor = decode_cursor(bytes, uuid, "c");
  CHECK_EQ(cursor.epoch, uint64_t{7});
  CHECK_EQ(cursor.next_version, uint64_t{99});
  CHECK_THROWS(decode_cursor(bytes, other, "c"), ErrorKind::kCorruption, "another table");
  for (size_t i = 0; i < bytes.size(); ++i) {
    Bytes damaged = bytes;
    damaged[i] ^= std::byte{1};
    CHECK_THROWS(decode_cursor(damaged, uuid, "c"), ErrorKind::kCorruption, "damaged");
  }
  CHECK_THROWS(decode_cursor(std::span(bytes).first(20), uuid, "c"), ErrorKind::kCorruption, "damaged");
}
