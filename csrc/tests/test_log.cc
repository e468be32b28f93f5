#include <cstring>
#include <map>

#include "check.h"
#include "log.h"
#include "rebuild.h"
#include "sandbox.h"
#include "sample.h"

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

// As a commit does.
void end_epoch(Log* log) {
  const uint64_t epoch = log->epoch();
  log->begin_next_epoch(0);
  log->finish_ending();
  while (!log->is_written(epoch)) log->wait_for_write(log->writes_ended() - 1);
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
  log->read(requests, kPayload, nullptr);
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
      for (int i = 0; i < 40; ++i) some.push_back(all[all.size() - 1 - sampler.bits() % std::min<size_t>(all.size(), 300)]);
      check_readable(log.get(), some);
    }
  }
  CHECK(log->segments().size() > 2);
  log->drain();
  check_readable(log.get(), all);
  // Neighbours share reads.
  CHECK(log->stats().reads * 4 < log->stats().read_records);
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
    rebuild_directory(&again, directory.get(), 1000, versions_end, scratch);
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
    CHECK_THROWS(rebuild_directory(&again, make_hashed_directory().get(), 1000, 100, scratch), ErrorKind::kCorruption,
                 "which this commit cannot have");
    CHECK_THROWS(rebuild_directory(&again, make_hashed_directory().get(), 10, versions_end, scratch), ErrorKind::kCorruption,
                 "which this commit cannot have");
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
    for (const ChunkTrailer& chunk : log->chunks(*segment)) records += chunk.count;
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
