// io_uring, where the kernel has it: many reads in flight from one thread. A read then costs less than half of the
// processor time of a pread in a thread of its own, and a model beside the reads gets the rest (benchmarks/RESULTS.md).
#pragma once

#include <memory>
#include <optional>

#include "vfs/batch_reads.h"

namespace bunkbed::vfs {

// One thread at a time.
class Ring {
 public:
  // As many reads at once as there are slices. Null where the kernel has no io_uring or refuses it (a container's
  // filter, a sysctl, too many open files); `error_number` then says why.
  static std::unique_ptr<Ring> make(std::byte* memory, size_t slice_bytes, size_t num_slices, int* error_number);
  virtual ~Ring() = default;

  // Puts the source's first reads on their way and returns; drive() must follow, on the same thread.
  virtual void begin(ReadSource& source) noexcept = 0;
  // Carries out reads until the source has none and none is in flight. A file without a descriptor ends it early: the
  // read that could not be taken is returned.
  virtual std::optional<ReadOp> drive(ReadSource& source) noexcept = 0;
};

}  // namespace bunkbed::vfs
