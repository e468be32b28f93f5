#include "vfs/batch_reads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/failpoints.h"
#include "base/mutex.h"
#include "base/workers.h"
#include "vfs/uring.h"

namespace bunkbed::vfs {

// ---- io_uring or threads ----------------------------------------------------------------------------------------

namespace {

// Returns 0, or the errno that says why there is no io_uring.
int probe_uring() {
  ReadLane lane;
  lane.resize(kBlockBytes, 1);
  int error_number = 0;
  Ring::make(lane, &error_number);
  return error_number;
}

Io io_of(const std::string& name) {
  if (name == "threads") return Io::kThreads;
  if (name != "auto" && name != "uring") {
    throw Error(ErrorKind::kInvalid, "io must be one of uring, threads, auto; got '" + name + "' (BUNKBED_IO, set_io)");
  }
  const int error_number = probe_uring();
  if (error_number == 0) return Io::kUring;
  if (name == "auto") return Io::kThreads;
  throw Error(ErrorKind::kSystem,
              std::string("io_uring is not to be had here: ") + std::strerror(error_number) +
                  "; choose 'auto' or 'threads' (BUNKBED_IO, set_io)",
              error_number);
}

std::atomic<Io>& io_setting() {
  static std::atomic<Io> value{[] {
    const char* text = std::getenv("BUNKBED_IO");
    return io_of(text == nullptr || *text == 0 ? "auto" : text);
  }()};
  return value;
}

std::atomic<uint64_t> uring_reads{0}, thread_reads{0};

}  // namespace

IoCounts io_counts() {
  return {uring_reads.load(std::memory_order_relaxed), thread_reads.load(std::memory_order_relaxed)};
}
void count_uring_reads(uint64_t reads) { uring_reads.fetch_add(reads, std::memory_order_relaxed); }

Io current_io() { return io_setting().load(std::memory_order_relaxed); }
void set_io(const std::string& name) { io_setting().store(io_of(name), std::memory_order_relaxed); }

// ---- Lanes -----------------------------------------------------------------------------------------------------

SliceMap::SliceMap(size_t num_slices) : free_((num_slices + 63) / 64, ~uint64_t{0}) {
  if (num_slices % 64 != 0) free_.back() = (uint64_t{1} << num_slices % 64) - 1;
}

// The lowest that fit: slices used lately are still in the processor's cache.
std::optional<uint32_t> SliceMap::take(size_t count) {
  size_t run = 0;  // free slices up to here
  for (size_t word = 0; word < free_.size(); ++word) {
    if (free_[word] == 0) {
      run = 0;
      continue;
    }
    for (size_t at = word * 64; at < word * 64 + 64; ++at) {
      run = (free_[word] >> at % 64 & 1) != 0 ? run + 1 : 0;
      if (run < count) continue;
      const size_t first = at + 1 - count;
      for (size_t i = first; i <= at; ++i) free_[i / 64] &= ~(uint64_t{1} << i % 64);
      return static_cast<uint32_t>(first);
    }
  }
  return std::nullopt;
}

void SliceMap::give_back(uint32_t first, size_t count) {
  for (size_t i = first; i < first + count; ++i) free_[i / 64] |= uint64_t{1} << i % 64;
}

ReadLane::ReadLane() = default;
ReadLane::~ReadLane() { ring_.reset(); }
ReadLane::ReadLane(ReadLane&&) noexcept = default;

void ReadLane::resize(size_t slice_bytes, size_t num_slices, size_t max_threads, Buffer memory) {
  ring_.reset();
  has_no_ring_ = false;
  slice_bytes_ = slice_bytes;
  num_slices_ = num_slices;
  max_threads_ = std::min({num_slices, max_threads, kIoThreads});
  memory_ = std::move(memory);
}

std::byte* ReadLane::memory() {
  if (memory_.size() == 0) memory_ = Buffer(slice_bytes_ * num_slices_);
  return memory_.data();
}

Ring* ReadLane::ring() {
  if (current_io() == Io::kThreads) return nullptr;
  if (ring_ == nullptr && !has_no_ring_) {
    int error_number = 0;
    ring_ = Ring::make(*this, &error_number);
    has_no_ring_ = ring_ == nullptr;  // for example no descriptor is left; threads read instead
  }
  return ring_.get();
}

// ---- Streams ---------------------------------------------------------------------------------------------------

// wake() submits readers to the I/O pool. A reader leaves when the source has no reads. Before it leaves, it checks
// under the lock whether wake() was called since it last asked the source. So no read stays undone.
//
// With a ring there is one reader, its driver, which uses all the memory. When it meets a file without a descriptor,
// the stream uses threads from then on.
struct ReadStream::State : std::enable_shared_from_this<State> {
  State(ReadSource& source_of_reads, ReadLane& lane_of_stream)
      : source(source_of_reads),
        lane(lane_of_stream),
        memory(lane_of_stream.memory()),
        ring(lane_of_stream.ring()),
        free_slices(lane.num_slices()) {}

  bool is_idle() const REQUIRES(mutex) { return num_readers == 0; }

  // Runs a reader that invite() submitted, or (`is_invited` false) the caller of finish(). A reader that finds as many
  // others as there may be returns: those do not leave while the source has reads.
  void work(bool is_invited) {
    MutexLock lock(mutex);
    if (is_invited) --invited;
    if (is_closed || num_readers >= (ring != nullptr ? size_t{1} : lane.max_reads())) return;
    ++num_readers;
    read(lock);
    leave();
  }

  // Submits readers for `num_ops` more reads. Called without the lock.
  void invite(size_t num_ops) {
    size_t more;
    {
      const MutexLock guard(mutex);
      ++wakes;
      const size_t most = ring != nullptr ? 1 : lane.max_threads();
      more = std::min(num_ops, most - std::min(most, num_readers + invited));
      invited += more;
    }
    if (more > 0) io_pool().submit([state = shared_from_this()] { state->work(true); }, more);
  }

  void leave() REQUIRES(mutex) {
    --num_readers;
    if (is_idle()) idle.notify_all();
  }

  // The analysis does not follow a lock that is an argument.
  void read(MutexLock& lock) NO_THREAD_SAFETY_ANALYSIS {
    std::optional<ReadOp> refused;
    for (uint64_t seen = wakes - 1; ring != nullptr && seen != wakes;) {
      seen = wakes;
      lock.unlock();
      refused = ring->drive(source);
      lock.lock();
      if (refused) ring = nullptr;
    }
    if (ring != nullptr) return;
    if (refused) {
      lock.unlock();
      invite(kIoThreads);
      lock.lock();
    }

    const auto carry_out = [&](const ReadOp& op) {
      const size_t count = lane.slices_of(op.bytes);
      const uint32_t first = wait_for_slices(count);
      std::byte* const data = memory + first * lane.slice_bytes();
      std::exception_ptr error;
      try {
        op.file->read(data, op.bytes, op.offset);
      } catch (...) {
        error = std::current_exception();
      }
      thread_reads.fetch_add(1, std::memory_order_relaxed);
      source.done(op, error ? nullptr : data, error);
      give_back(first, count);
    };
    for (uint64_t seen = wakes - 1; seen != wakes || refused;) {
      seen = wakes;
      lock.unlock();
      ReadOp op;
      if (refused) carry_out(*std::exchange(refused, std::nullopt));
      while (source.next(&op)) carry_out(op);
      lock.lock();
    }
  }

  // Both are for readers that are threads.
  uint32_t wait_for_slices(size_t count) {
    MutexLock lock(mutex);
    for (;;) {
      if (const std::optional<uint32_t> first = free_slices.take(count)) return *first;
      lock.wait(more_slices);
    }
  }
  void give_back(uint32_t first, size_t count) {
    const MutexLock guard(mutex);
    free_slices.give_back(first, count);
    more_slices.notify_all();
  }

  ReadSource& source;
  const ReadLane& lane;
  std::byte* const memory;
  Mutex mutex;
  Ring* ring;  // null: threads read
  std::condition_variable idle;
  std::condition_variable more_slices;
  SliceMap free_slices GUARDED_BY(mutex);
  size_t num_readers GUARDED_BY(mutex) = 0;
  size_t invited GUARDED_BY(mutex) = 0;
  uint64_t wakes GUARDED_BY(mutex) = 0;
  bool is_closed GUARDED_BY(mutex) = false;
  bool is_begun = false;  // the caller of begin() is the ring's driver and has not called finish() yet
};

ReadStream::ReadStream(ReadSource& source, ReadLane& lane) : state_(std::make_shared<State>(source, lane)) {}

ReadStream::~ReadStream() {
  finish();
  failpoint("reads.finished");
  // Submitted readers that have not started keep the state alive and find it closed. A reader that started after
  // finish() saw none uses the source: wait until it leaves.
  MutexLock lock(state_->mutex);
  state_->is_closed = true;
  while (!state_->is_idle()) lock.wait(state_->idle);
}

void ReadStream::wake(size_t num_ops) { state_->invite(num_ops); }

void ReadStream::begin(size_t num_ops, size_t num_bytes) {
  State& state = *state_;
  const ReadLane& lane = state.lane;
  {
    const MutexLock guard(state.mutex);
    // One call submits all reads that fit into the ring. More reads need a thread that refills the ring.
    if (state.ring != nullptr && state.is_idle() && num_ops <= lane.max_reads() &&
        num_ops + lane.slices_of(num_bytes) <= lane.num_slices()) {
      ++state.num_readers;
      state.is_begun = true;
    }
  }
  if (!state.is_begun) return wake(num_ops);
  state.ring->begin(state.source);
}

void ReadStream::finish() {
  State& state = *state_;
  if (state.is_begun) {
    MutexLock lock(state.mutex);
    state.is_begun = false;
    state.read(lock);
    state.leave();
  } else {
    state.work(false);
  }
  MutexLock lock(state.mutex);
  while (!state.is_idle()) lock.wait(state.idle);
}

void read_all(ReadSource& source, size_t num_ops, size_t num_bytes, ReadLane& lane,
              const std::function<void()>& meanwhile) {
  ReadStream stream(source, lane);
  // The caller reads too after `meanwhile`.
  if (meanwhile) {
    stream.begin(num_ops, num_bytes);
    meanwhile();
  } else if (lane.ring() == nullptr && num_ops > 1) {
    stream.wake(num_ops - 1);
  }
  stream.finish();
}

}  // namespace bunkbed::vfs
