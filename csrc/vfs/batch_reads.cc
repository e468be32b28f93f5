#include "vfs/batch_reads.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "workers.h"

namespace bunkbed::vfs {

// Readers are invited by wake() and leave when the source has nothing. One that is about to leave looks, under the lock,
// whether wake() was called since it last asked the source: so no read is left behind.
struct ReadStream::State {
  State(ReadSource& source_of_reads, ReadLane& lane)
      : source(source_of_reads), memory(lane.memory()), slice_bytes(lane.slice_bytes()), num_slices(lane.num_slices()) {
    for (uint32_t i = 0; i < num_slices; ++i) free_slices.push_back(i);
  }

  // As an invited reader, or (not invited) as one that came by itself. Whoever finds no slice leaves: as many as there
  // are slices read already, and none of them goes while there are reads.
  void work(bool is_invited) {
    std::unique_lock lock(mutex);
    if (is_invited) --invited;
    if (is_closed || free_slices.empty()) return;
    const uint32_t slice = free_slices.back();
    free_slices.pop_back();
    std::byte* const data = memory + slice * slice_bytes;
    for (uint64_t seen = wakes - 1; seen != wakes;) {
      seen = wakes;
      lock.unlock();
      ReadOp op;
      while (source.next(&op)) {
        std::exception_ptr error;
        try {
          op.file->read(data, op.bytes, op.offset);
        } catch (...) {
          error = std::current_exception();
        }
        source.done(op, error ? nullptr : data, error);
      }
      lock.lock();
    }
    free_slices.push_back(slice);
    if (free_slices.size() == num_slices) idle.notify_all();
  }

  ReadSource& source;
  std::byte* const memory;
  const size_t slice_bytes;
  const size_t num_slices;
  std::mutex mutex;  // guards what follows
  std::condition_variable idle;
  std::vector<uint32_t> free_slices;
  size_t invited = 0;
  uint64_t wakes = 0;
  bool is_closed = false;
};

ReadStream::ReadStream(ReadSource& source, ReadLane& lane) : state_(std::make_shared<State>(source, lane)) {}

ReadStream::~ReadStream() {
  finish();
  // Readers that were invited and have not come yet hold the state, and find it closed.
  const std::lock_guard guard(state_->mutex);
  state_->is_closed = true;
}

void ReadStream::wake(size_t num_ops) {
  State& state = *state_;
  size_t more;
  {
    const std::lock_guard guard(state.mutex);
    ++state.wakes;
    const size_t most = std::min(state.num_slices, kIoThreads);
    const size_t present = state.num_slices - state.free_slices.size() + state.invited;
    more = std::min(num_ops, most - std::min(most, present));
    state.invited += more;
  }
  if (more > 0) io_pool().submit([state = state_] { state->work(true); }, more);
}

void ReadStream::finish() {
  state_->work(false);
  std::unique_lock lock(state_->mutex);
  state_->idle.wait(lock, [this] { return state_->free_slices.size() == state_->num_slices; });
}

void read_all(ReadSource& source, size_t num_ops, ReadLane& lane, const std::function<void()>& meanwhile) {
  ReadStream stream(source, lane);
  // The caller reads too once it has nothing better to do.
  stream.wake(meanwhile ? num_ops : num_ops - std::min<size_t>(num_ops, 1));
  if (meanwhile) meanwhile();
  stream.finish();
}

}  // namespace bunkbed::vfs
