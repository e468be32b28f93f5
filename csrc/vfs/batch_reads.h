// Many reads at once. A stream pulls reads from a source and carries them out, as many at a time as its lane has memory
// for. It passes each finished read back to the source.
//
// Reads are pulled, not pushed: a source may be a queue that several batches feed, and the device does not idle between
// two batches.
#pragma once

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "vfs/vfs.h"

namespace bunkbed::vfs {

struct ReadOp {
  File* file;       // lives until done()
  uint64_t offset;  // a multiple of file->read_alignment(), as is bytes
  uint32_t bytes;   // at most the lane's largest_read()
  uint64_t tag;     // for the source's use
};

// Any thread may make both calls, several threads at once. They must not throw.
class ReadSource {
 public:
  virtual ~ReadSource() = default;
  // Returns the next read, or false: none now. After false the stream calls it again when wake() was called.
  virtual bool next(ReadOp* op) noexcept = 0;
  // Called once for each read, with its bytes, which are valid during the call only, or with its error. A source that
  // wants no more reads after an error returns false from next().
  virtual void done(const ReadOp& op, const std::byte* data, std::exception_ptr error) noexcept = 0;
};

// How reads are carried out: by io_uring, which one thread drives, or by a pool of threads that wait for one read each.
enum class Io { kUring, kThreads };
// kUring where the kernel allows it, unless BUNKBED_IO or set_io() says otherwise. Error(kInvalid) if BUNKBED_IO is no
// such name. Error(kSystem) if it is uring and there is none.
Io current_io();
void set_io(const std::string& name);  // uring, threads or auto; process-wide, for later streams

// Number of reads that each way carried out so far, process-wide, independent of the setting.
struct IoCounts {
  uint64_t uring = 0;
  uint64_t threads = 0;
};
IoCounts io_counts();
void count_uring_reads(uint64_t reads);  // called by the ring

class Ring;

// Which of a lane's slices are in use. A read takes as many neighbouring slices as its bytes need.
class SliceMap {
 public:
  explicit SliceMap(size_t num_slices);
  // Takes `count` neighbouring slices and returns the first, or nothing where no so many are free side by side.
  std::optional<uint32_t> take(size_t count);
  void give_back(uint32_t first, size_t count);

 private:
  std::vector<uint64_t> free_;  // a bit for each slice
};

// Memory for the bytes of reads. It serves one stream at a time.
class ReadLane {
 public:
  ReadLane();
  ~ReadLane();
  ReadLane(ReadLane&&) noexcept;
  // A small read takes one slice, a large one several. With Io::kThreads at most `max_threads` threads read. `memory`:
  // of all slices; empty: the lane takes its own when it is used.
  void resize(size_t slice_bytes, size_t num_slices, size_t max_threads = ~size_t{0}, Buffer memory = {});
  size_t max_threads() const { return max_threads_; }
  size_t slice_bytes() const { return slice_bytes_; }
  size_t num_slices() const { return num_slices_; }
  // The most reads under way: with 128 a disk makes a sixth more reads per second than with 48, and each costs less
  // processor time, because more reads complete between two polls.
  size_t max_reads() const { return std::min<size_t>(num_slices_, 128); }
  // The most bytes of a read: an eighth of the memory, so that the device has several large reads to do, within
  // 256 KiB, with which it has its full rate.
  size_t largest_read() const {
    constexpr size_t kFullRate = 256u << 10;
    return slice_bytes_ * std::max<size_t>(1, std::min(num_slices_ / 8, kFullRate / std::max<size_t>(1, slice_bytes_)));
  }
  size_t slices_of(size_t bytes) const { return (bytes + slice_bytes_ - 1) / slice_bytes_; }
  std::byte* memory();
  // Null when threads read.
  Ring* ring();

 private:
  size_t slice_bytes_ = 0;
  size_t num_slices_ = 0;
  size_t max_threads_ = 0;
  Buffer memory_;
  std::unique_ptr<Ring> ring_;  // reads into memory_
  bool has_no_ring_ = false;    // making a ring failed
};

class ReadStream {
 public:
  // Both must live longer than the stream.
  ReadStream(ReadSource& source, ReadLane& lane);
  // Carries out the reads that the source still has.
  ~ReadStream();
  ReadStream(const ReadStream&) = delete;
  ReadStream& operator=(const ReadStream&) = delete;

  // The source has about `num_ops` reads more. Any thread; returns at once. The caller may hold the source's lock.
  void wake(size_t num_ops);
  // Like wake(), for a caller that soon calls finish() on the same thread. Reads of `num_bytes` in all that fit into
  // the lane's memory then need no other thread.
  void begin(size_t num_ops, size_t num_bytes);
  // Reads on the calling thread until the source has no reads, then waits for the other readers.
  void finish();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Carries out all reads of `source`, about `num_ops` of `num_bytes` in all. `meanwhile` runs on the calling thread
// while other threads read; its exception is thrown again once no read is under way. The source handles errors of
// reads.
void read_all(ReadSource& source, size_t num_ops, size_t num_bytes, ReadLane& lane,
              const std::function<void()>& meanwhile);

}  // namespace bunkbed::vfs
