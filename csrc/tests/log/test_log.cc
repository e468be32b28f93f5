#include <array>
#include <cerrno>
#include <cstring>
#include <map>

#include "base/fault.h"
#include "base/workers.h"
#include "directory/replay.h"
#include "log/log.h"
#include "tests/check.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

constexpr size_t kPayload = 100;

std::vector<std::byte> payload_of(int64_t id, uint64_t version) {
  Sampler sampler(static_cast<uint64_t>(id) * 1000003 + version);
  std::vector<std::byte> bytes(kPayload);
  for (std::byte& b : bytes) b = static_cast<std::byte>(sampler.bits());
  return bytes;
}

LogMemory small_memory() {
  LogMemory memory;
  memory.chunk_bytes = 16384;
  memory.num_chunks = 3;
  memory.read_slice_bytes = 16384;
  memory.num_read_slices = 4;
  return memory;
}

struct Written {
  int64_t id;
  uint64_t version;
  uint64_t position;
};

std::unique_ptr<Log> new_log(vfs::Vfs& vfs, const std::string& path) {
  auto log = std::make_unique<Log>(vfs, path, Uuid{1, 2, 3}, kPayload, 2000, small_memory());
  log->begin_epoch(1, 1, 1);
  return log;
}

// The steps of a commit.
void end_epoch(Log* log) {
  const uint64_t epoch = log->epoch();
  log->begin_next_epoch(0);
  log->finish_ending();
  while (!log->buffers().is_written(epoch)) log->buffers().wait_for_write(log->buffers().writes_ended() - 1);
  const Log::Unsynced unsynced = log->unsynced(epoch);
  CHECK(!unsynced.files.empty());
  log->sync(unsynced);
  log->mark_synced(unsynced);
  CHECK(log->unsynced(epoch).files.empty());
}

void check_readable(Log* log, const std::vector<Written>& records) {
  std::vector<ReadRequest> requests;
  std::vector<std::byte> out(records.size() * kPayload);
  for (size_t i = 0; i < records.size(); ++i) {
    const std::byte* pending = log->pending(records[i].position);
    std::byte* place = out.data() + i * kPayload;
    if (pending != nullptr) {
      std::memcpy(place, pending, kPayload);
    } else {
      requests.push_back({records[i].position, records[i].id, place});
    }
  }
  log->reads().read(log->reads().plan(requests), kPayload, nullptr);
  for (size_t i = 0; i < records.size(); ++i) {
    const auto expected = payload_of(records[i].id, records[i].version);
    CHECK(std::memcmp(out.data() + i * kPayload, expected.data(), kPayload) == 0);
  }
}

std::vector<SegmentEntry> entries_of(const Log& log) {
  std::vector<SegmentEntry> entries;
  for (const auto& [id, segment] : log.segments()) entries.push_back({segment->id, segment->epoch, segment->bytes});
  return entries;
}

}  // namespace

TEST(log_records_are_readable_while_they_are_written) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  const auto log = new_log(vfs::posix(), sandbox / "t");
  Sampler sampler(1);
  std::vector<Written> all;
  for (uint64_t version = 1; version <= 6000; ++version) {
    const auto id = static_cast<int64_t>(sampler.bits() % 500);
    all.push_back({id, version, log->append(id, payload_of(id, version).data())});
    if (version % 97 == 0) {
      std::vector<Written> some;
      for (int i = 0; i < 40; ++i)
        some.push_back(all[all.size() - 1 - sampler.bits() % std::min<size_t>(all.size(), 300)]);
      check_readable(log.get(), some);
    }
  }
  CHECK(log->segments().size() > 2);
  log->drain();
  check_readable(log.get(), all);
  // Neighbouring records share reads.
  CHECK(log->stats().reads * 4 < log->stats().read_records());
}

namespace {

// A log of 2,000 records of 112 bytes, all on disk.
struct FullLog {
  explicit FullLog(vfs::Vfs& vfs) {
    vfs.make_directories(sandbox / "t");
    LogMemory memory = small_memory();
    memory.read_slice_bytes = 512;
    memory.num_read_slices = 1024;  // reads of at most 64 KiB
    log = std::make_unique<Log>(vfs, sandbox / "t", Uuid{1, 2, 3}, kPayload, 4000, memory);
    log->begin_epoch(1, 1, 1);
    for (int64_t id = 0; id < 2000; ++id) all.push_back({id, 1, log->append(id, payload_of(id, 1).data())});
    log->drain();
  }
  std::vector<Written> every(size_t step) const {
    std::vector<Written> some;
    for (size_t i = 0; i < all.size(); i += step) some.push_back(all[i]);
    return some;
  }

  const Sandbox sandbox;
  std::unique_ptr<Log> log;
  std::vector<Written> all;
};

}  // namespace

TEST(log_reads_share_where_the_gap_costs_less_than_a_read) {
  FullLog full(vfs::posix());
  Log* const log = full.log.get();
  const LogStats& stats = log->stats();
  const auto read = [&](size_t step) {
    const LogStats before = stats;
    check_readable(log, full.every(step));
    CHECK_EQ(stats.read_records() - before.read_records(), full.every(step).size());
    return std::array{stats.reads - before.reads, stats.single_records - before.single_records,
                      stats.merged_records - before.merged_records, stats.swept_records - before.swept_records};
  };
  log->reads().set_gap(0);
  const uint64_t unit = log->segment_of(full.all[0].position).file->read_alignment();
  CHECK(unit <= 4096);  // hence neighbours 112 records apart share no block
  CHECK(read(112) == (std::array<uint64_t, 4>{18, 18, 0, 0}));
  log->reads().set_gap(16384);  // 146 records: all within one read of 64 KiB, and the rest of the 224 kB
  const auto merged = read(112);
  CHECK_EQ(merged[0], 4u);
  CHECK_EQ(merged[1], 0u);
  CHECK(merged[2] > 0 && merged[3] > 0);
  CHECK_EQ(merged[2] + merged[3], 18u);
  CHECK(read(300) == (std::array<uint64_t, 4>{7, 7, 0, 0}));  // gaps of 33 kB
  // The plan is never dearer than a sweep: every record, in reads that follow each other.
  const uint64_t bytes = stats.read_bytes;
  CHECK_EQ(read(1)[0], 4u);
  CHECK(stats.read_bytes - bytes <= 2000 * 112 + 5 * 4096 + 4 * 4096);
}

// The bytes between two records may be unreadable: the records are then read alone.
TEST(log_reads_records_around_a_gap_that_cannot_be_read) {
  for (const char* io : {"threads", "auto"}) {
    vfs::set_io(io);
    FaultVfs vfs;
    FullLog full(vfs);
    full.log->reads().set_gap(16384);
    vfs.fail_at(1, EIO, false);
    check_readable(full.log.get(), full.every(100));
    CHECK_EQ(vfs.struck(), 1u);
    vfs.fail_at(1, EIO, true);  // a record itself
    CHECK_THROWS(check_readable(full.log.get(), full.every(100)), ErrorKind::kSystem, "");
    vfs.heal();
    check_readable(full.log.get(), full.all);
  }
  vfs::set_io("auto");
}

TEST(log_rebuild_takes_the_highest_version) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  auto log = new_log(vfs::posix(), sandbox / "t");
  std::map<int64_t, Written> newest;
  Sampler sampler(2);
  for (uint64_t version = 1; version <= 5000; ++version) {
    const auto id = static_cast<int64_t>(sampler.bits() % 700);
    newest[id] = {id, version, log->append(id, payload_of(id, version).data())};
    if (version == 2500) log->rotate();
  }
  // Old records appended late, as a compaction that lost a race would: their versions must not win.
  for (int64_t id = 0; id < 100; ++id) log->append(id, payload_of(id, 1).data(), 1);
  log->drain();
  end_epoch(log.get());
  const auto entries = entries_of(*log);
  const uint64_t versions_end = log->next_version();
  log.reset();
  for (const size_t scratch : {size_t{1} << 24, size_t{4096}}) {  // in one pass, and in many
    Log again(vfs::posix(), sandbox / "t", Uuid{1, 2, 3}, kPayload, 2000, small_memory());
    again.adopt(entries);
    const auto directory = make_hashed_directory();
    const auto rebuild = [&](Directory* into, int64_t num_rows, uint64_t end) {
      (void)Replay{&again, into, num_rows, end, scratch}.run_all();
    };
    rebuild(directory.get(), 1000, versions_end);
    CHECK_EQ(directory->stored_rows(), newest.size());
    std::vector<Written> all;
    uint64_t live = 0;
    for (const auto& [id, record] : newest) {
      CHECK_EQ(directory->find(id), entry_of_position(record.position));
      all.push_back(record);
    }
    for (const auto& [id, segment] : again.segments()) live += segment->live;
    CHECK_EQ(live, newest.size());
    check_readable(&again, all);
    CHECK_THROWS(rebuild(make_hashed_directory().get(), 1000, 100), ErrorKind::kCorruption,
                 "which this commit cannot have");
    CHECK_THROWS(rebuild(make_hashed_directory().get(), 10, versions_end), ErrorKind::kCorruption,
                 "which this commit cannot have");
  }
}

// With an index snapshot there is no replay, so compaction or a scan is the first to read the ids of a chunk.
TEST(log_shows_no_id_that_its_table_cannot_have) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  auto log = new_log(vfs::posix(), sandbox / "t");
  for (const int64_t id : {3, 9}) (void)log->append(id, payload_of(id, 1).data());
  log->drain();
  Segment& segment = *log->segments().begin()->second;
  Span span;
  std::vector<int64_t> ids;
  std::vector<uint64_t> versions;
  const auto read = [&] {
    log->reader().read_index(segment, log->reader().chunks(segment).front(), &span, &ids, &versions);
  };
  log->reader().set_ids_end(10);
  read();
  CHECK_EQ(ids.size(), 2u);
  log->reader().set_ids_end(9);
  CHECK_THROWS(read(), ErrorKind::kCorruption, "holds id 9, which this table cannot have");
}

// Replays later segments over the directory of an earlier epoch. While a commit is written, records of its epoch and of
// the next epoch are appended concurrently. So the newer record of a row, or a moved one, may come first.
TEST(log_replay_takes_the_highest_version_of_later_epochs) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  auto log = new_log(vfs::posix(), sandbox / "t");
  std::map<int64_t, Written> newest;
  const auto append = [&](int64_t id) {
    const uint64_t version = log->next_version();
    newest[id] = {id, version, log->append(id, payload_of(id, version).data())};
  };
  for (int64_t id = 0; id < 300; ++id) append(id);
  end_epoch(log.get());
  const auto earlier = entries_of(*log);
  const std::map<int64_t, Written> before = newest;
  // Epoch 2 ends with 100 records that were still to be appended, with reserved versions. Epoch 3 has newer records of
  // 50 of these rows, in a segment with a lower number. Compaction moves 20 of the other rows, two times.
  const uint64_t aside = log->next_version();
  log->begin_next_epoch(100);
  for (int64_t id = 50; id < 100; ++id) append(id);
  for (int64_t id = 100; id < 120; ++id)
    newest[id].position = log->append(id, payload_of(id, before.at(id).version).data(), before.at(id).version);
  for (int64_t id = 0; id < 100; ++id) {
    const uint64_t version = aside + static_cast<uint64_t>(id);
    const uint64_t position = log->append_ending(id, payload_of(id, version).data());
    if (id < 50) newest[id] = {id, version, position};
  }
  log->finish_ending();
  // Within one epoch: a record that is older than the one before it.
  append(110);
  (void)log->append(110, payload_of(110, before.at(110).version).data(), before.at(110).version);
  log->drain();
  const auto entries = entries_of(*log);
  const uint64_t versions_end = log->next_version();
  log.reset();
  for (const bool broken : {false, true}) {
    for (const size_t scratch : {size_t{1} << 24, size_t{1024}}) {
      Log again(vfs::posix(), sandbox / "t", Uuid{1, 2, 3}, kPayload, 2000, small_memory());
      again.adopt(earlier);
      const auto directory = make_flat_directory(1000);
      CHECK_EQ((Replay{&again, directory.get(), 1000, versions_end, scratch}.run_all().entries), uint64_t{300});
      std::vector<SegmentEntry> later;
      for (const SegmentEntry& entry : entries) {
        if (again.find_segment(entry.segment) == nullptr) later.push_back(entry);
      }
      again.adopt(later);
      std::vector<Segment*> segments;
      for (const SegmentEntry& entry : later) segments.push_back(again.find_segment(entry.segment));
      CHECK_EQ(segments.size(), size_t{2});
      CHECK(segments[0]->epoch == 3 && segments[1]->epoch == 2);
      set_fault(broken ? "replay_last_record" : nullptr);
      CHECK_EQ((Replay{&again, directory.get(), 1000, versions_end, scratch}.run(segments).entries), uint64_t{172});
      set_fault(nullptr);
      CHECK_EQ(directory->stored_rows(), size_t{300});
      size_t wrong = 0;
      uint64_t live = 0;
      for (const auto& [id, record] : newest) wrong += directory->find(id) != entry_of_position(record.position);
      for (const auto& [id, segment] : again.segments()) live += segment->live;
      CHECK_EQ(live, uint64_t{300});
      CHECK_EQ(wrong, broken ? size_t{51} : size_t{0});
      if (broken) continue;
      std::vector<Written> all;
      for (const auto& [id, record] : newest) all.push_back(record);
      check_readable(&again, all);
    }
  }
}

// Records appended together give the same bytes in the files as records appended one by one, on any thread.
TEST(log_ending_records_appended_by_all_threads) {
  const Sandbox sandbox;
  LogMemory memory = small_memory();
  memory.chunk_bytes = 1u << 20;
  const size_t threads = num_threads();
  set_num_threads(4);
  constexpr size_t kRecords = 30'000;  // several chunks and two segments
  std::vector<std::byte> payloads;
  std::vector<Log::Source> sources(kRecords);
  for (size_t i = 0; i < kRecords; ++i) {
    const auto payload = payload_of(static_cast<int64_t>(7 * i), 1);
    payloads.insert(payloads.end(), payload.begin(), payload.end());
  }
  for (size_t i = 0; i < kRecords; ++i) sources[i] = {static_cast<int64_t>(7 * i), payloads.data() + i * kPayload};
  std::vector<uint64_t> positions[2];
  std::vector<SegmentEntry> entries[2];
  for (const size_t together : {0, 1}) {
    const std::string path = sandbox / (together ? "together" : "single");
    vfs::posix().make_directories(path);
    Log log(vfs::posix(), path, Uuid{1, 2, 3}, kPayload, 20'000, memory);
    log.begin_epoch(1, 1, 1);
    log.begin_next_epoch(kRecords);
    positions[together].resize(kRecords);
    size_t calls = 0;
    for (size_t i = 0; i < kRecords; ++calls) {
      if (together) {
        const size_t taken =
            log.append_ending(&sources[i], std::min(kRecords - i, 1 + calls * 977 % 6000), &positions[1][i]);
        CHECK(taken > 0);
        i += taken;
      } else {
        positions[0][i] = log.append_ending(sources[i].id, sources[i].payload);
        ++i;
      }
    }
    CHECK_EQ(log.stats().written_records, uint64_t{kRecords});
    CHECK_THROWS(log.append_ending(sources.data(), 1, positions[together].data()), ErrorKind::kBroken,
                 "more records for a commit");
    log.finish_ending();
    while (!log.buffers().is_written(1)) log.buffers().wait_for_write(log.buffers().writes_ended() - 1);
    entries[together] = entries_of(log);
    uint64_t live = 0;
    for (const auto& [id, segment] : log.segments()) live += segment->live;
    CHECK_EQ(live, uint64_t{kRecords});
  }
  set_num_threads(threads);
  CHECK(positions[0] == positions[1]);
  CHECK_EQ(entries[0].size(), entries[1].size());
  CHECK(entries[0].size() > 1);
  for (const SegmentEntry& entry : entries[0]) {
    vfs::Buffer bytes[2] = {vfs::Buffer(entry.bytes), vfs::Buffer(entry.bytes)};
    for (const size_t together : {0, 1}) {
      const auto file =
          vfs::posix().open(sandbox / (together ? "together/" : "single/") + segment_name(entry.segment), true);
      CHECK_EQ(file->size(), entry.bytes);
      file->read(bytes[together].data(), entry.bytes, 0);
    }
    CHECK(std::memcmp(bytes[0].data(), bytes[1].data(), entry.bytes) == 0);
  }
}

TEST(log_failed_writes_are_kept_and_tried_again) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  FaultVfs vfs;
  const auto log = new_log(vfs, sandbox / "t");
  std::vector<Written> all;
  uint64_t version = 1;
  const auto append = [&](int64_t id) {
    const uint64_t position = log->append(id, payload_of(id, version).data());
    all.push_back({id, version++, position});
  };
  for (int64_t id = 0; id < 50; ++id) append(id);
  vfs.fail_all(Op::kWrite, ENOSPC);
  int failures = 0;
  for (int64_t id = 0; id < 1000; ++id) {
    try {
      append(id);
    } catch (const Error& error) {
      ++failures;
      CHECK_EQ(error.error_number(), ENOSPC);
    }
    if (id % 100 == 0) check_readable(log.get(), all);
  }
  CHECK(failures > 100);
  CHECK_THROWS(log->drain(), ErrorKind::kSystem, "injected");
  vfs.heal();
  for (int64_t id = 0; id < 300; ++id) append(id);
  log->drain();
  check_readable(log.get(), all);
  end_epoch(log.get());
  for (const auto& [id, segment] : log->segments()) {
    uint64_t records = 0;
    for (const ChunkTrailer& chunk : log->reader().chunks(*segment)) records += chunk.count;
    CHECK_EQ(records, segment->records);
  }
}

TEST(log_leaves_files_of_others_alone) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "t");
  vfs::posix().create_small((sandbox / "t") + "/" + segment_name(1))->write("mine", 4, 0);
  const auto log = new_log(vfs::posix(), sandbox / "t");
  const uint64_t position = log->append(5, payload_of(5, 1).data());
  log->drain();
  check_readable(log.get(), {{5, 1, position}});
  CHECK_EQ(vfs::posix().open((sandbox / "t") + "/" + segment_name(1), false)->size(), uint64_t{4});
}
