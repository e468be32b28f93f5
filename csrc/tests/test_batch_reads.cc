// Reads in batches: each is carried out once, lands in memory of its own, and nothing of the source is touched once the
// stream has gone.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "vfs/batch_reads.h"

namespace bunkbed {
namespace {

constexpr size_t kSlice = 512;

// Byte i of the file is i / 16 mod 251; offsets from `bad` on cannot be read.
class FakeFile final : public vfs::File {
 public:
  void read(void* data, size_t n, uint64_t offset) override {
    const int now = ++under_way_;
    for (int most = most_; now > most && !most_.compare_exchange_weak(most, now);) {
    }
    if (offset % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    for (size_t i = 0; i < n; ++i) static_cast<unsigned char*>(data)[i] = byte_at(offset + i);
    --under_way_;
    if (offset >= bad) throw Error(ErrorKind::kSystem, "bad block", EIO, path_);
  }
  void write(const void*, size_t, uint64_t) override {}
  void sync() override {}
  uint64_t size() override { return 1 << 30; }
  uint32_t read_alignment() const override { return 1; }
  const std::string& path() const override { return path_; }
  static unsigned char byte_at(uint64_t offset) { return static_cast<unsigned char>(offset / 16 % 251); }

  uint64_t bad = ~0ull;
  int most() const { return most_; }

 private:
  std::string path_ = "fake";
  std::atomic<int> under_way_{0};
  std::atomic<int> most_{0};
};

// A queue that several threads may feed.
class Queue final : public vfs::ReadSource {
 public:
  explicit Queue(FakeFile& file) : file_(file) {}
  void feed(uint64_t first, uint64_t count) {
    const std::lock_guard guard(mutex_);
    for (uint64_t i = first; i < first + count; ++i) waiting_.push_back(i);
  }
  bool next(vfs::ReadOp* op) noexcept override {
    const std::lock_guard guard(mutex_);
    if (waiting_.empty()) return false;
    const uint64_t tag = waiting_.front();
    waiting_.pop_front();
    *op = {&file_, tag * 13, static_cast<uint32_t>(1 + tag % kSlice), tag};
    return true;
  }
  void done(const vfs::ReadOp& op, const std::byte* data, std::exception_ptr error) noexcept override {
    bool same = true;
    for (uint32_t i = 0; data != nullptr && i < op.bytes; ++i) {
      same &= static_cast<unsigned char>(data[i]) == FakeFile::byte_at(op.offset + i);
    }
    const std::lock_guard guard(mutex_);
    if (seen.size() <= op.tag) seen.resize(op.tag + 1);
    ++seen[op.tag];
    errors += error != nullptr;
    wrong += !same || (data == nullptr) != (error != nullptr);
  }
  void check(uint64_t count) {
    const std::lock_guard guard(mutex_);
    CHECK_EQ(seen.size(), count);
    for (const int times : seen) CHECK_EQ(times, 1);
    CHECK_EQ(wrong, 0);
  }

  uint64_t num_done() {
    const std::lock_guard guard(mutex_);
    uint64_t count = 0;
    for (const int times : seen) count += times != 0;
    return count;
  }

  std::vector<int> seen;
  int errors = 0;
  int wrong = 0;

 private:
  FakeFile& file_;
  std::mutex mutex_;
  std::deque<uint64_t> waiting_;
};

vfs::ReadLane lane_of(size_t num_slices) {
  vfs::ReadLane lane;
  lane.resize(kSlice, num_slices);
  return lane;
}

}  // namespace

TEST(batch_reads_each_is_done_once) {
  for (const size_t slices : {1, 4, 64, 100}) {
    auto lane = lane_of(slices);
    for (const uint64_t count : {0, 1, 2, 63, 700}) {
      FakeFile file;
      Queue queue(file);
      queue.feed(0, count);
      bool ran = false;
      vfs::read_all(queue, count, lane, [&] { ran = true; });
      CHECK(ran);
      queue.check(count);
      CHECK(file.most() <= static_cast<int>(slices));
      if (slices == 64 && count == 700) CHECK(file.most() > 4);
    }
  }
}

TEST(batch_reads_failures_reach_the_source) {
  auto lane = lane_of(8);
  FakeFile file;
  file.bad = 13 * 150;
  Queue queue(file);
  queue.feed(0, 200);
  vfs::read_all(queue, 200, lane, nullptr);
  queue.check(200);
  CHECK_EQ(queue.errors, 50);
}

TEST(batch_reads_are_over_when_meanwhile_throws) {
  auto lane = lane_of(8);
  FakeFile file;
  auto queue = std::make_unique<Queue>(file);
  queue->feed(0, 300);
  bool caught = false;
  try {
    vfs::read_all(*queue, 300, lane, [] { throw std::runtime_error("meanwhile"); });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  CHECK(caught);
  queue->check(300);
  queue.reset();  // readers that come late must not ask it
}

// Batches fed one after another while others are read, and nobody who finishes them but the readers.
TEST(batch_reads_a_queue_is_read_to_its_end) {
  for (const size_t slices : {1, 3, 64}) {
    auto lane = lane_of(slices);
    FakeFile file;
    Queue queue(file);
    uint64_t fed = 0;
    {
      vfs::ReadStream stream(queue, lane);
      for (int batch = 0; batch < 200; ++batch) {
        const uint64_t count = 1 + static_cast<uint64_t>(batch % 9);
        queue.feed(fed, count);
        stream.wake(count);
        fed += count;
        if (batch % 50 == 49) {
          // Without finish(): a wake() that came just as the last reader left would leave reads lying.
          for (int wait = 0; wait < 20000; ++wait) {
            std::this_thread::sleep_for(std::chrono::microseconds(500));
            if (queue.num_done() == fed) break;
          }
          queue.check(fed);
        }
      }
    }
    queue.check(fed);
  }
}

}  // namespace bunkbed
