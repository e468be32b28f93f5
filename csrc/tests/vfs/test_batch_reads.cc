// Reads in batches, by threads and by io_uring: each read is made once, into its own memory, and the source is not used
// after the stream is destroyed.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/workers.h"
#include "tests/check.h"
#include "tests/sample.h"
#include "tests/sandbox.h"
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

// The same bytes in a real file; counts the reads that do not use its descriptor.
class RealFile final : public vfs::File {
 public:
  explicit RealFile(uint64_t bytes) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0666);
    std::vector<unsigned char> all(bytes);
    for (uint64_t i = 0; i < bytes; ++i) all[i] = FakeFile::byte_at(i);
    CHECK_EQ(::pwrite(fd_, all.data(), bytes, 0), static_cast<ssize_t>(bytes));
    shown = fd_;
  }
  ~RealFile() override { ::close(fd_); }
  void read(void* data, size_t n, uint64_t offset) override {
    ++plain;
    if (::pread(fd_, data, n, static_cast<off_t>(offset)) != static_cast<ssize_t>(n)) {
      throw Error(ErrorKind::kCorruption, "too short");
    }
  }
  void write(const void*, size_t, uint64_t) override {}
  void sync() override {}
  uint64_t size() override { return 0; }
  uint32_t read_alignment() const override { return 1; }
  const std::string& path() const override { return path_; }
  int descriptor(std::shared_ptr<vfs::File>*) override { return shown; }

  int shown;
  std::atomic<int> plain{0};

 private:
  test::Sandbox sandbox_;
  std::string path_ = sandbox_ / "file";
  int fd_;
};

// A queue that several threads may add to.
class Queue final : public vfs::ReadSource {
 public:
  explicit Queue(vfs::File& file) : files_{&file} {}
  Queue(vfs::File& even, vfs::File& odd) : files_{&even, &odd} {}
  void feed(uint64_t first, uint64_t count) {
    const std::lock_guard guard(mutex_);
    for (uint64_t i = first; i < first + count; ++i) waiting_.push_back(i);
  }
  bool next(vfs::ReadOp* op) noexcept override {
    std::unique_lock lock(mutex_);
    if (waiting_.empty()) {
      ++times_empty;
      lock.unlock();
      if (when_empty) when_empty();
      return false;
    }
    const uint64_t tag = waiting_.front();
    waiting_.pop_front();
    *op = {files_[tag % files_.size()], tag * 13, static_cast<uint32_t>(1 + tag % largest), tag};
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

  size_t largest = kSlice;
  std::function<void()> when_empty;
  int times_empty = 0;
  std::vector<int> seen;
  int errors = 0;
  int wrong = 0;

 private:
  const std::vector<vfs::File*> files_;
  std::mutex mutex_;
  std::deque<uint64_t> waiting_;
};

vfs::ReadLane lane_of(size_t num_slices) {
  vfs::ReadLane lane;
  lane.resize(kSlice, num_slices);
  return lane;
}

// During its lifetime new streams use io_uring; false where there is none.
class UringOnly {
 public:
  UringOnly() {
    try {
      vfs::set_io("uring");
    } catch (const Error&) {
      is_there_ = false;
    }
  }
  ~UringOnly() { vfs::set_io("auto"); }
  explicit operator bool() const { return is_there_; }

 private:
  bool is_there_ = true;
};

}  // namespace

TEST(batch_reads_each_is_done_once) {
  for (const size_t slices : {1, 4, 64, 100}) {
    auto lane = lane_of(slices);
    for (const uint64_t count : {0, 1, 2, 63, 700}) {
      FakeFile file;
      Queue queue(file);
      queue.feed(0, count);
      bool ran = false;
      vfs::read_all(queue, count, count * kSlice, lane, [&] { ran = true; });
      CHECK(ran);
      queue.check(count);
      CHECK(file.most() <= static_cast<int>(slices));
      if (slices == 64 && count == 700) CHECK(file.most() > 4);
    }
  }
}

TEST(slices_of_a_read_are_neighbours_and_of_no_other_read) {
  for (const size_t num_slices : {1, 63, 64, 65, 200}) {
    vfs::SliceMap map(num_slices);
    std::vector<bool> used(num_slices);
    std::vector<std::pair<uint32_t, size_t>> taken;
    test::Sampler sampler(num_slices);
    for (int round = 0; round < 3000; ++round) {
      const size_t count = 1 + sampler.bits() % 9;
      if (const auto first = map.take(count)) {
        CHECK(*first + count <= num_slices);
        for (size_t i = *first; i < *first + count; ++i) {
          CHECK(!used[i]);
          used[i] = true;
        }
        taken.push_back({*first, count});
      } else {  // there is no such run
        size_t run = 0;
        for (const bool is_used : used) {
          run = is_used ? 0 : run + 1;
          CHECK(run < count);
        }
      }
      if (taken.empty() || sampler.bits() % 2 == 0) continue;
      std::swap(taken[sampler.bits() % taken.size()], taken.back());
      const auto [first, size] = taken.back();
      taken.pop_back();
      map.give_back(first, size);
      for (size_t i = first; i < first + size; ++i) used[i] = false;
    }
  }
}

// 64 slices in use between two free runs do not join these.
TEST(slices_of_a_read_do_not_skip_slices_in_use) {
  vfs::SliceMap map(200);
  for (size_t i = 0; i < 200; ++i) CHECK(map.take(1).has_value());
  CHECK(!map.take(1).has_value());
  map.give_back(60, 4);
  map.give_back(128, 4);
  CHECK(!map.take(5).has_value());
  CHECK_EQ(map.take(4).value(), 60u);
  CHECK_EQ(map.take(4).value(), 128u);
  CHECK(!map.take(1).has_value());
}

// Small and large reads share the memory of a lane: none overwrites the bytes of another.
TEST(batch_reads_of_many_sizes_have_memory_of_their_own) {
  const UringOnly uring;
  for (const bool has_ring : {false, true}) {
    if (has_ring && !uring) continue;
    for (const size_t slices : {8, 40, 640}) {
      vfs::ReadLane lane;
      lane.resize(64, slices);
      CHECK_EQ(lane.largest_read(), 64 * (slices / 8));
      CHECK_EQ(lane.max_reads(), std::min<size_t>(slices, 128));
      FakeFile fake;
      RealFile real(700 * 13 + 64 * 80);
      Queue queue(has_ring ? static_cast<vfs::File&>(real) : fake);
      queue.largest = lane.largest_read();
      queue.feed(0, 700);
      vfs::read_all(queue, 700, 700 * lane.largest_read() / 2, lane, [] {});
      queue.check(700);
      CHECK_EQ(real.plain.load(), 0);
    }
  }
}

TEST(batch_reads_failures_reach_the_source) {
  auto lane = lane_of(8);
  FakeFile file;
  file.bad = 13 * 150;
  Queue queue(file);
  queue.feed(0, 200);
  vfs::read_all(queue, 200, 200 * kSlice, lane, nullptr);
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
    vfs::read_all(*queue, 300, 300 * kSlice, lane, [] { throw std::runtime_error("meanwhile"); });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  CHECK(caught);
  queue->check(300);
  queue.reset();  // late readers must not use it
}

// Waits until `count` reads are done, by the readers alone.
void wait_for(Queue& queue, uint64_t count) {
  for (int wait = 0; wait < 4000 && queue.num_done() < count; ++wait) {
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  queue.check(count);
}

// Batches are added while others are read, and only the readers finish them.
TEST(batch_reads_a_queue_is_read_to_its_end) {
  for (const size_t slices : {1, 3, 64}) {
    auto lane = lane_of(slices);
    FakeFile file;
    Queue queue(file);
    uint64_t fed = 0;
    vfs::ReadStream stream(queue, lane);
    for (int batch = 0; batch < 200; ++batch) {
      const uint64_t count = 1 + static_cast<uint64_t>(batch % 9);
      queue.feed(fed, count);
      stream.wake(count);
      fed += count;
      if (batch % 50 == 49) wait_for(queue, fed);
    }
  }
}

// A batch is added just after the last reader found the queue empty.
TEST(batch_reads_none_is_left_behind) {
  auto lane = lane_of(1);
  FakeFile file;
  Queue queue(file);
  vfs::ReadStream stream(queue, lane);
  queue.feed(0, 5);
  queue.when_empty = [&, is_first = true]() mutable {
    if (!is_first) return;
    is_first = false;
    queue.feed(5, 20);
    stream.wake(20);
  };
  stream.wake(5);
  wait_for(queue, 25);
}

// Readers that get a thread only after the stream is destroyed do not use its source.
TEST(batch_reads_late_readers_leave_the_source_alone) {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false;
  size_t running = 0;
  const auto occupy = [&] {
    std::unique_lock lock(mutex);
    ++running;
    changed.notify_all();
    changed.wait(lock, [&] { return is_open; });
    --running;
    changed.notify_all();
  };
  io_pool().submit(occupy, kIoThreads);
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return running == kIoThreads; });
  }
  auto lane = lane_of(8);
  FakeFile file;
  Queue queue(file);
  queue.feed(0, 30);
  vfs::read_all(queue, 30, 30 * kSlice, lane, [] {});
  queue.check(30);
  const int asked = queue.times_empty;
  {
    std::unique_lock lock(mutex);
    is_open = true;
    changed.notify_all();
    changed.wait(lock, [&] { return running == 0; });
  }
  std::atomic<int> passed{0};  // every reader that was queued before these has ended
  const auto pass = [&] { ++passed; };
  io_pool().submit(pass, kIoThreads);
  while (passed < static_cast<int>(kIoThreads)) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK_EQ(queue.times_empty, asked);
}

TEST(batch_reads_through_the_ring) {
  const UringOnly uring;
  if (!uring) return;
  RealFile file(700 * 13 + kSlice);
  for (const size_t slices : {1, 3, 64, 128}) {
    auto lane = lane_of(slices);
    for (const uint64_t count : {0, 1, 2, 63, 700}) {
      for (const bool is_beside : {false, true}) {
        Queue queue(file);
        queue.feed(0, count);
        bool ran = !is_beside;
        vfs::read_all(queue, count, count * kSlice, lane, is_beside ? [&] { ran = true; } : std::function<void()>());
        CHECK(ran);
        queue.check(count);
      }
    }
  }
  CHECK_EQ(file.plain.load(), 0);
  auto lane = lane_of(4);
  Queue queue(file);
  vfs::ReadStream stream(queue, lane);
  for (uint64_t fed = 0; fed < 600; fed += 20) {
    queue.feed(fed, 20);
    stream.wake(20);
    if (fed % 100 == 80) wait_for(queue, fed + 20);
  }
}

// Short and failed reads are repeated with plain reads, which report the error.
TEST(batch_reads_the_ring_leaves_errors_to_the_file) {
  const UringOnly uring;
  if (!uring) return;
  auto lane = lane_of(16);
  RealFile file(100 * 13);
  Queue queue(file);
  queue.feed(0, 200);
  vfs::read_all(queue, 200, 200 * kSlice, lane, nullptr);
  queue.check(200);
  CHECK(queue.errors > 100);
  CHECK_EQ(file.plain.load(), queue.errors);

  RealFile closed(200 * 13 + kSlice);
  closed.shown = 1 << 20;  // no such descriptor
  Queue others(closed);
  others.feed(0, 200);
  vfs::read_all(others, 200, 200 * kSlice, lane, [] {});
  others.check(200);
  CHECK_EQ(others.errors, 0);
  CHECK_EQ(closed.plain.load(), 200);
}

// A file without a descriptor among files with one: threads read it, and no read is made twice or lost.
TEST(batch_reads_threads_take_over_from_the_ring) {
  const UringOnly uring;
  if (!uring) return;
  auto lane = lane_of(64);
  for (const uint64_t count : {2, 40, 700}) {
    FakeFile fake;
    RealFile real(700 * 13 + kSlice);
    Queue queue(real, fake);
    queue.feed(0, count);
    vfs::read_all(queue, count, count * kSlice, lane, [] {});
    queue.check(count);
    if (count == 700) CHECK(fake.most() > 4);
  }
}

TEST(batch_reads_when_meanwhile_throws_the_ring_is_empty) {
  const UringOnly uring;
  if (!uring) return;
  auto lane = lane_of(64);
  RealFile file(700 * 13 + kSlice);
  for (const uint64_t count : {20, 700}) {
    auto queue = std::make_unique<Queue>(file);
    queue->feed(0, count);
    bool caught = false;
    try {
      vfs::read_all(*queue, count, count * kSlice, lane, [] { throw std::runtime_error("meanwhile"); });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    CHECK(caught);
    queue->check(count);
  }
}

TEST(batch_reads_backends_have_names) {
  CHECK_THROWS(vfs::set_io("aio"), ErrorKind::kInvalid, "must be one of uring, threads, auto; got 'aio'");
  vfs::set_io("threads");
  CHECK(vfs::current_io() == vfs::Io::kThreads);
  auto lane = lane_of(4);
  CHECK(lane.ring() == nullptr);
  vfs::set_io("auto");
}

namespace {

// One read; counts the calls that are under way after its stream is destroyed.
class Mortal final : public vfs::ReadSource {
 public:
  explicit Mortal(vfs::File* file) : file_(file) {}
  bool next(vfs::ReadOp* op) noexcept override {
    if (is_taken_.exchange(true)) {
      if (std::this_thread::get_id() != owner_) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      calls_of_the_dead += is_gone;
      return false;
    }
    *op = {file_, 1, 1, 0};
    return true;
  }
  void done(const vfs::ReadOp&, const std::byte*, std::exception_ptr) noexcept override {}

  std::atomic<bool> is_gone{false};
  static inline std::atomic<int> calls_of_the_dead{0};

 private:
  vfs::File* file_;
  const std::thread::id owner_ = std::this_thread::get_id();
  std::atomic<bool> is_taken_{false};
};

}  // namespace

TEST(batch_reads_a_late_reader_meets_no_source_that_is_gone) {
  FakeFile file;
  vfs::ReadLane lane;
  lane.resize(kSlice, 64);
  vfs::set_io("threads");
  std::vector<std::unique_ptr<Mortal>> sources;
  // Time for a reader to start between the end of the reads and that of the stream.
  arm_failpoint("reads.finished", 0, FailpointAction::kDelay, 1e-3);
  for (int round = 0; round < 60; ++round) {
    sources.push_back(std::make_unique<Mortal>(&file));
    {
      vfs::ReadStream stream(*sources.back(), lane);
      stream.wake(2);
    }
    sources.back()->is_gone = true;
  }
  disarm_failpoints();
  vfs::set_io("auto");
  CHECK_EQ(Mortal::calls_of_the_dead.load(), 0);
}

}  // namespace bunkbed
