// A log, a directory, a cache and a compactor, put together by hand. A row's record names the row and how often it was
// written, so that every record says whether it is the newest of its row.
#pragma once

#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache.h"
#include "directory/directory.h"
#include "log/log.h"
#include "store/compactor.h"
#include "store/disk_budget.h"
#include "store/memory_plan.h"
#include "tests/check.h"
#include "tests/sandbox.h"

namespace bunkbed::test {

class LogParts {
 public:
  static constexpr size_t kPayload = 56;    // records of 64 bytes on disk
  static constexpr uint64_t kSlots = 2048;  // in a segment of 128 KiB
  static constexpr size_t kFrames = 1u << 14;

  // The plan is the smallest by default, with reads of whole blocks, which every file allows.
  explicit LogParts(uint64_t slots = kSlots, size_t ram_bytes = 1)
      : plan(plan_memory(ram_bytes, kPayload, slots, vfs::kBlockBytes, true)),
        log(vfs, path, Uuid{1}, kPayload, slots, plan.log) {
    log.begin_epoch(1, 1, 1);
  }

  // Appends the row's next record. The one before is dead from then on.
  void append(int64_t row) {
    const Entry before = directory->find(row);
    CHECK(!is_frame(before));
    directory->reserve(directory->new_rows(&row, 1));
    ++written[row];
    const uint64_t position = log.append(row, record_of(row).data());
    if (is_position(before)) --log.segment_of(position_of(before)).live;
    directory->set(row, entry_of_position(position));
  }
  void append(int64_t from, int64_t to, int64_t every = 1) {
    for (int64_t row = from; row < to; row += every) append(row);
  }

  // Changes the row in a frame, as an update does. The change is not in the log before write_back().
  void make_dirty(int64_t row) {
    const Entry before = directory->find(row);
    const uint32_t frame = is_frame(before) ? frame_of(before) : hold(row);
    FrameInfo& info = cache.info(frame);
    ++written[row];
    std::memcpy(cache.record(frame), record_of(row).data(), kPayload);
    if (cache.is_dirty(frame)) return;
    cache.set_dirty(frame, true);
    ++unwritten.dirty;
    if (info.position != kNoPosition) --log.segment_of(info.position).live;
    info.position = kNoPosition;
  }
  // A frame for a row that has none, clean where the row is stored.
  uint32_t hold(int64_t row) {
    const Entry before = directory->find(row);
    uint32_t frame;
    CHECK(cache.allocate(&frame));
    cache.admit(frame, row);
    cache.info(frame).pinned = 0;
    if (is_position(before)) cache.info(frame).position = position_of(before);
    directory->reserve(directory->new_rows(&row, 1));
    directory->set(row, entry_of_frame(frame));
    return frame;
  }
  // Appends the record of a dirty row. `evict`: its frame is free afterwards.
  void write_back(int64_t row, bool evict) {
    const uint32_t frame = frame_of(directory->find(row));
    FrameInfo& info = cache.info(frame);
    if (cache.is_dirty(frame)) {
      info.position = log.append(row, cache.record(frame));
      cache.set_dirty(frame, false);
      --unwritten.dirty;
    }
    if (!evict) return;
    directory->set(row, entry_of_position(info.position));
    cache.release(frame);
  }
  void write_back_all() {
    for (const auto& [row, times] : written) {
      if (is_frame(directory->find(row))) write_back(row, false);
    }
  }

  // Every row's newest record is where the directory says.
  void check_rows() {
    std::vector<std::array<std::byte, kPayload>> found(written.size());
    std::vector<ReadRequest> requests;
    size_t i = 0;
    for (const auto& [row, times] : written) {
      const Entry entry = directory->find(row);
      std::byte* const record = found[i++].data();
      if (is_frame(entry)) {
        std::memcpy(record, cache.record(frame_of(entry)), kPayload);
      } else if (const std::byte* const pending = log.pending(position_of(entry))) {
        std::memcpy(record, pending, kPayload);
      } else {
        requests.push_back({position_of(entry), row, record});
      }
    }
    log.reads().read(log.reads().plan(std::move(requests)), kPayload, nullptr);
    i = 0;
    for (const auto& [row, times] : written) {
      if (found[i++] != record_of(row)) fail(__FILE__, __LINE__, "row " + std::to_string(row) + " is lost");
    }
  }

  uint64_t bytes_of_files() const {
    uint64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path)) bytes += entry.file_size();
    return bytes;
  }

  const Sandbox sandbox;
  const std::string path = made(sandbox / "t");
  FaultVfs vfs;
  const MemoryPlan plan;
  Log log;
  const std::unique_ptr<Directory> directory = make_hashed_directory();
  Cache cache{kPayload, kFrames};
  Compactor compactor{directory.get(), &cache, &log};
  UnwrittenRows unwritten;
  std::map<int64_t, uint64_t> written;  // row -> how often

 private:
  static std::string made(const std::string& path) {
    vfs::posix().make_directories(path);
    return path;
  }
  std::array<std::byte, kPayload> record_of(int64_t row) const {
    std::array<std::byte, kPayload> record{};
    std::memcpy(record.data(), &row, sizeof(row));
    std::memcpy(record.data() + kPayload - sizeof(uint64_t), &written.at(row), sizeof(uint64_t));
    return record;
  }
};

}  // namespace bunkbed::test
