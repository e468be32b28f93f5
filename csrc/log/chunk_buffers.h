// The buffers of chunks that are filled, and their writes on other threads. A buffer whose write failed keeps its
// bytes: the next call that needs a buffer, or the commit, tries the write again and reports the error.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "log/segment.h"
#include "vfs/vfs.h"

namespace bunkbed {

struct Chunk {
  vfs::Buffer memory;
  ChunkKind kind = ChunkKind::kData;
  std::vector<int64_t> ids;
  std::vector<uint64_t> versions;
  Segment* segment = nullptr;  // null: it was dropped, and the bytes are not needed
  uint64_t begin = 0;
  uint64_t first_slot = 0;
  uint64_t epoch = 0;
  size_t capacity = 0;                                                        // records
  enum class State { kFree, kOpen, kWriting, kFailed } state = State::kFree;  // guarded by the mutex of its buffers
  uint64_t end = 0;
  std::exception_ptr error;  // guarded too
};

// Each call requires the table's lock unless its comment says otherwise.
class ChunkBuffers {
 public:
  // At most `most` buffers, each of so many bytes.
  ChunkBuffers(size_t most, size_t bytes) : most_(most), bytes_(bytes) {}
  // Requires that no write is under way. Forgets all buffers.
  void reset(size_t most, size_t bytes);

  const std::vector<std::unique_ptr<Chunk>>& all() const { return chunks_; }
  // A free buffer. Waits for a write when there is none. The buffer stays free until open(): a failure before that
  // leaves nothing to undo.
  Chunk* find_free();
  void open(Chunk* chunk);
  // Frees an open buffer.
  void free(Chunk* chunk);
  // Frees the buffer once a thread has written it to its segment.
  void write(Chunk* chunk);
  // Tries failed writes again on this thread; throws the first error.
  void retry_failed();
  void wait_for_all();
  // Number of buffers that an append finds without waiting, with one left for other appends.
  size_t spare();
  // Whether all chunks of the epochs up to this one are in their files. Tries failed writes again; throws their errors.
  bool is_written(uint64_t epoch);
  // True while a chunk of the segment is not in its file yet.
  bool is_being_written(const Segment& segment);
  // True when the bytes of a buffer are in its file. They stay until the buffer is opened again.
  bool is_free(const Chunk& chunk);
  // The bytes of the segment's chunks are not needed.
  void forget(const Segment* segment);
  // Number of writes that have ended; wait_for_write() waits until it differs from `seen`. Needs no table lock.
  uint64_t writes_ended();
  void wait_for_write(uint64_t seen);

 private:
  size_t most_;
  size_t bytes_;
  std::vector<vfs::Buffer> memory_;  // of buffers that are not made yet
  std::vector<std::unique_ptr<Chunk>> chunks_;
  Mutex mutex_;  // guards also the state and error of every Chunk
  uint64_t writes_ended_ GUARDED_BY(mutex_) = 0;
  std::condition_variable written_;
};

}  // namespace bunkbed
