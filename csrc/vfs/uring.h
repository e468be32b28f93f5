// io_uring, where the kernel has it: many reads in flight from one thread. A read takes less than half of the processor
// time of a pread in its own thread, so a model that trains concurrently gets more (docs/design/notes/reads.md).
#pragma once

#include <memory>
#include <optional>

#include "vfs/batch_reads.h"

namespace bunkbed::vfs {

// Used by one thread at a time.
class Ring {
 public:
  // Makes a ring over the memory of the lane, with its max_reads() in flight. Returns null where the kernel has no
  // io_uring or refuses it (a container's filter, a sysctl, too many open files); `error_number` is then the reason.
  static std::unique_ptr<Ring> make(ReadLane& lane, int* error_number);
  virtual ~Ring() = default;

  // Submits the source's first reads and returns. drive() must follow, on the same thread.
  virtual void begin(ReadSource& source) noexcept = 0;
  // Carries out reads until the source has none and none is in flight. Stops early at a file without a descriptor and
  // returns its read, which is not carried out.
  virtual std::optional<ReadOp> drive(ReadSource& source) noexcept = 0;
};

}  // namespace bunkbed::vfs
