// Replay against a model, over every form of a directory, by one thread and by several, in one pass and in many.
#include "directory/replay.h"

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "base/workers.h"
#include "log/log.h"
#include "tests/check.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr size_t kPayload = 8;
constexpr int64_t kRows = 300'000;

std::unique_ptr<Directory> make_directory(int form) {
  return form == 0 ? make_flat_directory(kRows) : form == 1 ? make_hashed_directory() : make_bounded_directory(kRows);
}

LogMemory memory() {
  LogMemory memory;
  memory.chunk_bytes = 1u << 17;
  memory.num_chunks = 3;
  memory.read_slice_bytes = 16384;
  memory.num_read_slices = 4;
  return memory;
}

std::unique_ptr<Log> new_log(const std::string& path) {
  return std::make_unique<Log>(vfs::posix(), path, Uuid{1}, kPayload, 20'000, memory());
}

struct Newest {
  uint64_t version;
  Entry entry;
};
using Model = std::map<int64_t, Newest>;

// A log with records, tombstones and counts of random rows, low ids more often.
struct Written {
  std::vector<SegmentEntry> first, rest;  // before and after the first epoch ended
  Model after_first, after_all;
  uint64_t entries_of_rest = 0;
  uint64_t versions_end = 0;
};

std::vector<SegmentEntry> entries_of(const Log& log) {
  std::vector<SegmentEntry> entries;
  for (const auto& [id, segment] : log.segments()) entries.push_back({segment->id, segment->epoch, segment->bytes});
  return entries;
}

std::vector<Segment*> adopt(Log* log, const std::vector<SegmentEntry>& entries) {
  log->adopt(entries);
  std::vector<Segment*> segments;
  for (const SegmentEntry& entry : entries) segments.push_back(log->find_segment(entry.segment));
  return segments;
}

Written write(const std::string& path) {
  Written written;
  Sampler sampler(7);
  const auto log = new_log(path);
  log->begin_epoch(1, 1, 1);
  Model model;
  std::vector<std::byte> payload(kPayload);
  const auto id_of_any = [&] {
    const int64_t bound = sampler.bits() % 2 == 0 ? kRows / 50 : kRows;
    return static_cast<int64_t>(sampler.bits() % static_cast<uint64_t>(bound));
  };
  const auto take = [&](int64_t id, uint64_t version, Entry entry) {
    const auto [at, is_new] = model.try_emplace(id, Newest{version, entry});
    if (!is_new && at->second.version < version) at->second = {version, entry};
  };
  const auto append = [&](size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const int64_t id = id_of_any();
      const uint64_t version = log->next_version();
      take(id, version, entry_of_position(log->append(id, payload.data())));
    }
  };
  const auto append_others = [&](size_t n, bool are_counts) {
    std::vector<int64_t> ids;
    std::vector<uint64_t> counts;
    for (size_t i = 0; i < n; ++i) ids.push_back(id_of_any());
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    if (are_counts) {
      std::erase_if(ids, [&](int64_t id) { return model.contains(id) && is_stored(model.at(id).entry); });
    }
    for (const int64_t id : ids) counts.push_back(entry_of_count(1 + static_cast<uint32_t>(id % 100), id));
    const uint64_t version = log->next_version();
    log->append_others(ids.data(), nullptr, are_counts ? counts.data() : nullptr, ids.size());
    for (size_t i = 0; i < ids.size(); ++i) take(ids[i], version + i, are_counts ? counts[i] : kAbsent);
    return ids.size();
  };
  append(100'000);
  append_others(5'000, false);
  log->drain();
  written.first = entries_of(*log);
  written.after_first = model;
  log->rotate();
  append(120'000);
  written.entries_of_rest = 120'000 + append_others(20'000, false) + append_others(20'000, true);
  for (int64_t id = 0; id < kRows / 10; ++id) {
    const auto found = model.find(id);
    if (found == model.end() || !is_stored(found->second.entry)) continue;
    // The current record, moved by compaction. Of two with this version in the rest, the first stays.
    const auto before = written.after_first.find(id);
    const bool is_of_first = before != written.after_first.end() && before->second.version == found->second.version;
    const Entry moved = entry_of_position(log->append(id, payload.data(), found->second.version));
    if (is_of_first) found->second.entry = moved;
    // A compaction that lost a race: an older record, behind the newer one.
    if (!is_of_first) (void)log->append(id, payload.data(), 1);
    written.entries_of_rest += is_of_first ? 1 : 2;
  }
  append(10'000);
  written.entries_of_rest += 10'000;
  log->drain();
  for (const SegmentEntry& entry : entries_of(*log)) {
    const auto is_same = [&](const SegmentEntry& known) { return known.segment == entry.segment; };
    if (std::none_of(written.first.begin(), written.first.end(), is_same)) written.rest.push_back(entry);
  }
  written.after_all = model;
  written.versions_end = log->next_version();
  return written;
}

// The positions of the records of rows that are in frames.
using Frames = std::map<uint32_t, uint64_t>;

void check_equal(const Log& log, const Directory& directory, const Model& model, const Frames& frames = {}) {
  std::map<uint64_t, uint64_t> live;
  size_t stored = 0, counted = 0;
  for (const auto& [id, newest] : model) {
    CHECK_EQ(directory.find(id), newest.entry);
    stored += is_stored(newest.entry);
    counted += is_count(newest.entry);
    if (!is_stored(newest.entry)) continue;
    const bool is_in_frame = is_frame(newest.entry);
    const uint64_t position = is_in_frame ? frames.at(frame_of(newest.entry)) : position_of(newest.entry);
    ++live[position / log.slots_per_segment()];
  }
  CHECK_EQ(directory.stored_rows(), stored);
  CHECK_EQ(directory.counted_rows(), counted);
  for (const auto& [id, segment] : log.segments()) CHECK_EQ(segment->live, live[id]);
}

}  // namespace

TEST(replay_on_threads_in_passes_gives_every_directory_the_newest_entries) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  const Written written = write(sandbox / "t");
  const size_t threads_before = num_threads();
  for (const size_t threads : {size_t{1}, size_t{4}}) {
    set_num_threads(threads);
    for (const size_t scratch : {size_t{1} << 30, size_t{1} << 20}) {
      for (const int form : {0, 1, 2}) {
        const auto log = new_log(sandbox / "t");
        log->adopt(written.first);
        const auto directory = make_directory(form);
        const uint64_t version = directory->version();
        const Replay replay{log.get(), directory.get(), kRows, written.versions_end, scratch};
        (void)replay.run_all();
        check_equal(*log, *directory, written.after_first);
        CHECK(directory->version() != version);
        const std::vector<Segment*> rest = adopt(log.get(), written.rest);
        const Replay::Result result = replay.run(rest);
        CHECK_EQ(result.entries, written.entries_of_rest);
        CHECK_EQ(result.lost, uint64_t{0});
        check_equal(*log, *directory, written.after_all);
        uint64_t tombstones = 0, counts = 0, oldest = ~uint64_t{0};
        for (const Segment* segment : rest) {
          tombstones += segment->tombstones;
          counts += segment->counts;
          oldest = std::min(oldest, segment->oldest_tombstone);
        }
        CHECK(tombstones > 10'000 && counts > 8'000);
        CHECK(oldest > 220'000 && oldest < 230'000);  // behind 220,000 records and the first tombstones
      }
    }
  }
  set_num_threads(threads_before);
}

// One range of a bounded directory has more rows than a bucket is made for.
TEST(replay_of_rows_that_are_all_in_one_bucket) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  constexpr int64_t kInOneRange = 60'000;
  const std::vector<std::byte> payload(kPayload);
  std::vector<SegmentEntry> entries;
  uint64_t versions_end;
  {
    const auto log = new_log(sandbox / "t");
    log->begin_epoch(1, 1, 1);
    for (int64_t id = 0; id < kInOneRange; ++id) (void)log->append(id, payload.data());
    log->drain();
    entries = entries_of(*log);
    versions_end = log->next_version();
  }
  const auto log = new_log(sandbox / "t");
  log->adopt(entries);
  const auto directory = make_bounded_directory(1 << 24);
  (void)Replay{log.get(), directory.get(), 1 << 24, versions_end, size_t{1} << 30}.run_all();
  CHECK_EQ(directory->stored_rows(), size_t{kInOneRange});
  for (int64_t id = 0; id < kInOneRange; ++id) CHECK(is_position(directory->find(id)));
}

TEST(replay_of_nothing_takes_no_memory) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  const auto log = new_log(sandbox / "t");
  const auto directory = make_hashed_directory();
  const size_t bytes = directory->bytes();
  CHECK_EQ((Replay{log.get(), directory.get(), -1, 1, 1024}.run_all().entries), uint64_t{0});
  CHECK_EQ(directory->bytes(), bytes);
}

// The directory of an index snapshot may point at segments that later commits emptied: the records that took their
// place are in later segments.
TEST(replay_counts_the_replaced_records_of_segments_that_are_gone) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  const Written written = write(sandbox / "t");
  const auto log = new_log(sandbox / "t");
  log->adopt(written.rest);
  const auto directory = make_flat_directory(kRows);
  uint64_t replaced = 0;
  for (const auto& [id, newest] : written.after_first) {
    if (!is_stored(newest.entry)) continue;
    directory->set(id, newest.entry);
    replaced += written.after_all.at(id).entry != newest.entry;
  }
  CHECK(replaced > 10'000);
  const Replay replay{log.get(), directory.get(), kRows, written.versions_end, size_t{1} << 30};
  CHECK_EQ(replay.run_all().lost, replaced);
}

// A reader moves to a newer commit: rows may be in frames, and the directory has room only where it was asked for.
TEST(replay_over_a_directory_in_use_asks_for_room_and_gives_up_what_it_replaces) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  const Written written = write(sandbox / "t");
  for (const int form : {0, 1, 2}) {
    const auto log = new_log(sandbox / "t");
    log->adopt(written.first);
    const auto directory = make_directory(form);
    (void)Replay{log.get(), directory.get(), kRows, written.versions_end, size_t{1} << 30}.run_all();
    Model expected = written.after_first;
    Frames frames;
    for (int64_t id = 0; id < 1'000; ++id) {
      const Entry entry = directory->find(id);
      if (!is_stored(entry)) continue;
      const auto frame = static_cast<uint32_t>(id);
      frames[frame] = position_of(entry);
      directory->set(id, expected.at(id).entry = entry_of_frame(frame));
    }
    for (const auto& [id, newest] : written.after_all) {
      const auto before = written.after_first.find(id);
      if (before != written.after_first.end() && before->second.entry == newest.entry) continue;
      expected[id] = {newest.version, is_count(newest.entry) ? kAbsent : newest.entry};  // a reader keeps no counts
    }
    const uint64_t last_of_first = written.first.back().segment;
    const std::vector<Segment*> rest = adopt(log.get(), written.rest);
    std::vector<char> has_room(kRows, 0);
    size_t given_up = 0;
    const Replay::InUse in_use{[&](const int64_t* ids, size_t n) {
                                 directory->reserve(directory->new_rows(ids, n));
                                 for (size_t i = 0; i < n; ++i) has_room[static_cast<size_t>(ids[i])] = 1;
                               },
                               [&](Entry before) {
                                 const uint64_t position =
                                     is_frame(before) ? frames.at(frame_of(before)) : position_of(before);
                                 --log->segment_of(position).live;
                                 given_up += is_frame(before);
                               }};
    const Replay replay{log.get(),       directory.get(),     kRows,  written.versions_end,
                        size_t{1} << 30, {.are_kept = false}, &in_use};
    (void)replay.run(rest);
    check_equal(*log, *directory, expected, frames);
    CHECK(given_up > 100);
    for (const auto& [id, newest] : expected) {
      const bool is_replayed =
          is_position(newest.entry) && log->segment_of(position_of(newest.entry)).id > last_of_first;
      if (is_replayed) CHECK(has_room[static_cast<size_t>(id)]);
    }
  }
}
