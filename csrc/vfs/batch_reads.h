// Many reads at once. A source hands out reads one by one for as long as it has any; a stream carries them out, as many
// at a time as its lane has slices of memory, and gives each back where it was finished.
//
// Pulled, not pushed: a source may be a queue that several batches feed, and then no device time is lost between the
// end of one batch and the beginning of the next.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "vfs/vfs.h"

namespace bunkbed::vfs {

struct ReadOp {
  File* file;       // lives until done()
  uint64_t offset;  // of file->read_alignment(), as is bytes
  uint32_t bytes;   // at most the lane's slice
  uint64_t tag;     // the source's own
};

// Both calls come from any thread, several at once, and must not throw.
class ReadSource {
 public:
  virtual ~ReadSource() = default;
  // The next read, or false: none now. After it said false it is asked again when wake() was called.
  virtual bool next(ReadOp* op) noexcept = 0;
  // Each read once: either its bytes, which are valid during the call only, or why there are none. A source that wants
  // no more reads after a failure says so in next().
  virtual void done(const ReadOp& op, const std::byte* data, std::exception_ptr error) noexcept = 0;
};

// Who carries reads out: the kernel's io_uring, driven by one thread, or a pool of threads that wait for one read each.
enum class Io { kUring, kThreads };
// The first where the kernel lets us, unless BUNKBED_IO or set_io() says otherwise. Error(kInvalid) when BUNKBED_IO is
// no such name, Error(kSystem) when it asks for what is not there.
Io current_io();
void set_io(const std::string& name);  // uring, threads or auto; process-wide, for streams to come

// Reads that each of the two carried out so far, process-wide: who really served, whatever was asked for.
struct IoCounts {
  uint64_t uring = 0;
  uint64_t threads = 0;
};
IoCounts io_counts();
void count_uring_reads(uint64_t reads);  // the ring's own

class Ring;

// Memory where reads land. It serves one stream at a time.
class ReadLane {
 public:
  ReadLane();
  ~ReadLane();
  ReadLane(ReadLane&&) noexcept;
  // Where threads read, at most `max_threads` of them do.
  void resize(size_t slice_bytes, size_t num_slices, size_t max_threads = ~size_t{0});
  size_t max_threads() const { return max_threads_; }
  size_t slice_bytes() const { return slice_bytes_; }
  size_t num_slices() const { return num_slices_; }
  std::byte* memory();
  // Null when threads are to read.
  Ring* ring();

 private:
  size_t slice_bytes_ = 0;
  size_t num_slices_ = 0;
  size_t max_threads_ = 0;
  Buffer memory_;
  std::unique_ptr<Ring> ring_;  // reads into memory_
  bool has_no_ring_ = false;    // it was tried
};

class ReadStream {
 public:
  // Both must live longer than the stream.
  ReadStream(ReadSource& source, ReadLane& lane);
  // Finishes what the source still has.
  ~ReadStream();
  ReadStream(const ReadStream&) = delete;
  ReadStream& operator=(const ReadStream&) = delete;

  // The source has about `num_ops` reads more. Any thread; returns at once. The source's lock may be held.
  void wake(size_t num_ops);
  // As wake(), from a caller who comes back soon with finish(), on the same thread: few reads may do without another.
  void begin(size_t num_ops);
  // The caller reads too until the source has none, then waits for the reads of the others.
  void finish();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Carries out everything `source` has, about `num_ops` reads; `meanwhile` runs on the caller while others read. What it
// throws is thrown again once no read is under way. Errors of reads are the source's.
void read_all(ReadSource& source, size_t num_ops, ReadLane& lane, const std::function<void()>& meanwhile);

}  // namespace bunkbed::vfs
