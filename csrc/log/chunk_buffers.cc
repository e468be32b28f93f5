#include "log/chunk_buffers.h"

#include <algorithm>

#include "base/failpoints.h"
#include "base/workers.h"

namespace bunkbed {

void ChunkBuffers::reset(size_t most, size_t bytes) {
  chunks_.clear();
  memory_.clear();
  most_ = most;
  bytes_ = bytes;
}

void ChunkBuffers::open(Chunk* chunk) {
  const MutexLock guard(mutex_);
  chunk->state = Chunk::State::kOpen;
}

void ChunkBuffers::free(Chunk* chunk) {
  const MutexLock guard(mutex_);
  chunk->state = Chunk::State::kFree;
}

bool ChunkBuffers::is_free(const Chunk& chunk) {
  const MutexLock guard(mutex_);
  return chunk.state == Chunk::State::kFree;
}

void ChunkBuffers::forget(const Segment* segment) {
  for (const auto& chunk : chunks_) {
    if (chunk->segment == segment) chunk->segment = nullptr;
  }
}

void ChunkBuffers::write(Chunk* chunk) {
  {
    const MutexLock guard(mutex_);
    chunk->state = Chunk::State::kWriting;
  }
  write_pool().submit([this, chunk, file = chunk->segment->file] {
    std::exception_ptr error;
    try {
      failpoint("log.chunk");
      file->write(chunk->memory.data(), chunk->end - chunk->begin, chunk->begin);
      failpoint("log.chunk_written");
    } catch (...) {
      error = std::current_exception();
    }
    // Notifies with the mutex held: the log may be destroyed as soon as another thread sees that the write has ended.
    const MutexLock guard(mutex_);
    chunk->error = error;
    chunk->state = error ? Chunk::State::kFailed : Chunk::State::kFree;
    ++writes_ended_;
    written_.notify_all();
  });
}

// Tries failed writes again on the calling thread; throws the first error.
void ChunkBuffers::retry_failed() {
  for (const auto& chunk : chunks_) {
    {
      const MutexLock guard(mutex_);
      if (chunk->state != Chunk::State::kFailed) continue;
    }
    if (chunk->segment != nullptr) {  // null: the segment was dropped, its bytes are not needed
      chunk->segment->file->write(chunk->memory.data(), chunk->end - chunk->begin, chunk->begin);
    }
    const MutexLock guard(mutex_);
    chunk->state = Chunk::State::kFree;
    chunk->error = nullptr;
  }
}

Chunk* ChunkBuffers::find_free() {
  for (;;) {
    retry_failed();
    {
      MutexLock lock(mutex_);
      const auto is_free = [](const auto& chunk) { return chunk->state == Chunk::State::kFree; };
      const auto found = std::find_if(chunks_.begin(), chunks_.end(), is_free);
      if (found != chunks_.end()) return found->get();
      if (chunks_.size() < most_) {
        if (memory_.empty()) memory_ = vfs::Buffer::side_by_side(most_ - chunks_.size(), bytes_);
        auto made = std::make_unique<Chunk>();
        chunks_.reserve(chunks_.size() + 1);
        made->memory = std::move(memory_.back());
        memory_.pop_back();
        chunks_.push_back(std::move(made));
        return chunks_.back().get();
      }
      const auto is_over = [](const auto& chunk) {
        return chunk->state == Chunk::State::kFree || chunk->state == Chunk::State::kFailed;
      };
      while (std::none_of(chunks_.begin(), chunks_.end(), is_over)) lock.wait(written_);
    }
  }
}

void ChunkBuffers::wait_for_all() {
  MutexLock lock(mutex_);
  const auto is_writing = [](const auto& chunk) { return chunk->state == Chunk::State::kWriting; };
  while (std::any_of(chunks_.begin(), chunks_.end(), is_writing)) lock.wait(written_);
}

size_t ChunkBuffers::spare() {
  const MutexLock guard(mutex_);
  // A buffer whose write failed counts as free: find_free() tries the write again.
  const auto num_free = static_cast<size_t>(std::count_if(chunks_.begin(), chunks_.end(), [](const auto& chunk) {
    return chunk->state == Chunk::State::kFree || chunk->state == Chunk::State::kFailed;
  }));
  const size_t num_left = num_free + (most_ - std::min(most_, chunks_.size()));
  // One buffer is left for other appends. With four or fewer none is: two are open, and a caller waits for one write.
  return num_left - std::min<size_t>(num_left, most_ > 4 ? 1 : 0);
}

bool ChunkBuffers::is_written(uint64_t epoch) {
  const auto any_is = [&](Chunk::State state) {
    const MutexLock guard(mutex_);
    return std::any_of(chunks_.begin(), chunks_.end(),
                       [&](const auto& chunk) { return chunk->state == state && chunk->epoch <= epoch; });
  };
  if (any_is(Chunk::State::kWriting)) return false;
  if (any_is(Chunk::State::kFailed)) retry_failed();
  return true;
}

uint64_t ChunkBuffers::writes_ended() {
  const MutexLock guard(mutex_);
  return writes_ended_;
}

void ChunkBuffers::wait_for_write(uint64_t seen) {
  MutexLock lock(mutex_);
  while (writes_ended_ == seen) lock.wait(written_);
}

bool ChunkBuffers::is_being_written(const Segment& segment) {
  const MutexLock guard(mutex_);
  return std::any_of(chunks_.begin(), chunks_.end(), [&segment](const auto& chunk) {
    return chunk->segment == &segment && chunk->state != Chunk::State::kFree;
  });
}

}  // namespace bunkbed
