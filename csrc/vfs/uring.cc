// Makes the three system calls itself: neither a build nor an installed wheel needs liburing.
#include "vfs/uring.h"

#include <cerrno>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

#if defined(__NR_io_uring_setup) && defined(IORING_FEAT_CUR_PERSONALITY)

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#ifndef IORING_SETUP_CLAMP
#define IORING_SETUP_CLAMP (1U << 4)
#endif
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif

namespace bunkbed::vfs {

namespace {

template <typename T>
T* at(void* memory, unsigned offset) {
  return reinterpret_cast<T*>(static_cast<char*>(memory) + offset);
}

void* map_ring(int fd, size_t bytes, off_t offset) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
  return memory == MAP_FAILED ? nullptr : memory;
}

class KernelRing final : public Ring {
 public:
  explicit KernelRing(ReadLane& lane);
  ~KernelRing() override;
  // Returns 0, or the errno that says why there is no ring.
  int open();
  void begin(ReadSource& source) noexcept override;
  std::optional<ReadOp> drive(ReadSource& source) noexcept override;

 private:
  void fill(ReadSource& source) noexcept;
  bool enter(unsigned wait_for) noexcept;
  void reap(ReadSource& source) noexcept;
  void take_back(ReadSource& source) noexcept;
  void finish(ReadSource& source, uint32_t index, int result) noexcept;
  std::byte* data_of(uint32_t index) const { return memory_ + size_t{slices_[index]} * slice_bytes_; }
  size_t slices_of(const ReadOp& op) const { return (op.bytes + slice_bytes_ - 1) / slice_bytes_; }

  std::byte* const memory_;
  const size_t slice_bytes_;
  const size_t num_slices_;
  SliceMap free_slices_;
  // Of each read in flight, by its index:
  std::vector<ReadOp> ops_;
  std::vector<uint32_t> slices_;              // the first slice of its memory
  std::vector<std::shared_ptr<File>> holds_;  // its file's descriptor
  std::vector<uint32_t> free_indexes_;
  std::optional<ReadOp> waiting_;  // the source's next read, for which no memory was free
  std::optional<ReadOp> refused_;
  uint32_t queued_ = 0;       // in the submission queue, not yet taken by the kernel
  uint32_t in_flight_ = 0;    // taken, not yet completed
  bool has_buffers_ = false;  // the memory is registered

  int fd_ = -1;
  void* sq_memory_ = nullptr;
  void* cq_memory_ = nullptr;
  io_uring_sqe* sq_entries_ = nullptr;
  const io_uring_cqe* cq_entries_ = nullptr;
  size_t sq_bytes_ = 0;
  size_t cq_bytes_ = 0;
  size_t entries_bytes_ = 0;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned cq_mask_ = 0;
};

KernelRing::KernelRing(ReadLane& lane)
    : memory_(lane.memory()),
      slice_bytes_(lane.slice_bytes()),
      num_slices_(lane.num_slices()),
      free_slices_(lane.num_slices()),
      ops_(lane.max_reads()),
      slices_(lane.max_reads()),
      holds_(lane.max_reads()) {
  for (size_t i = ops_.size(); i > 0; --i) free_indexes_.push_back(static_cast<uint32_t>(i - 1));
}

int KernelRing::open() {
  // COOP_TASKRUN (5.19): completions wait for the next call into the kernel instead of interrupting the thread. Not
  // DEFER_TASKRUN, which would bind the ring to one thread. Not SQPOLL, whose thread takes a processor from the model.
  io_uring_params params{};
  const auto setup = [&](unsigned flags) {
    params = {};
    params.flags = flags;
    return static_cast<int>(::syscall(__NR_io_uring_setup, static_cast<unsigned>(ops_.size()), &params));
  };
  fd_ = setup(IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN);
  if (fd_ < 0 && errno == EINVAL) fd_ = setup(IORING_SETUP_CLAMP);
  if (fd_ < 0) return errno;
  // NODROP (5.5): completions are never lost. CUR_PERSONALITY came with IORING_OP_READ (5.6).
  constexpr unsigned kNeeded = IORING_FEAT_NODROP | IORING_FEAT_CUR_PERSONALITY;
  if ((params.features & kNeeded) != kNeeded || params.sq_entries < ops_.size()) return ENOSYS;

  sq_bytes_ = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  cq_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  sq_memory_ = map_ring(fd_, sq_bytes_, IORING_OFF_SQ_RING);
  cq_memory_ = map_ring(fd_, cq_bytes_, IORING_OFF_CQ_RING);
  sq_entries_ = static_cast<io_uring_sqe*>(map_ring(fd_, entries_bytes_, IORING_OFF_SQES));
  if (sq_memory_ == nullptr || cq_memory_ == nullptr || sq_entries_ == nullptr) return ENOMEM;
  sq_tail_ = at<unsigned>(sq_memory_, params.sq_off.tail);
  sq_array_ = at<unsigned>(sq_memory_, params.sq_off.array);
  sq_mask_ = *at<unsigned>(sq_memory_, params.sq_off.ring_mask);
  cq_head_ = at<unsigned>(cq_memory_, params.cq_off.head);
  cq_tail_ = at<unsigned>(cq_memory_, params.cq_off.tail);
  cq_mask_ = *at<unsigned>(cq_memory_, params.cq_off.ring_mask);
  cq_entries_ = at<io_uring_cqe>(cq_memory_, params.cq_off.cqes);

  // Spares the kernel a lookup of the pages of each read. Reads also work where the limit of locked memory forbids it.
  iovec whole{memory_, slice_bytes_ * num_slices_};
  has_buffers_ = ::syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS, &whole, 1) == 0;
  return 0;
}

KernelRing::~KernelRing() {
  if (sq_entries_ != nullptr) ::munmap(sq_entries_, entries_bytes_);
  if (cq_memory_ != nullptr) ::munmap(cq_memory_, cq_bytes_);
  if (sq_memory_ != nullptr) ::munmap(sq_memory_, sq_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

// Queues reads while there is memory. The next enter() passes the queued reads to the kernel.
void KernelRing::fill(ReadSource& source) noexcept {
  unsigned tail = std::atomic_ref(*sq_tail_).load(std::memory_order_relaxed);
  while (!free_indexes_.empty() && !refused_) {
    ReadOp op;
    if (waiting_) {
      op = *waiting_;
    } else if (!source.next(&op)) {
      break;
    }
    const std::optional<uint32_t> first = free_slices_.take(slices_of(op));
    waiting_ = first ? std::nullopt : std::optional(op);
    if (!first) break;
    std::shared_ptr<File> hold;
    const int descriptor = op.file->descriptor(&hold);
    if (descriptor < 0) {
      free_slices_.give_back(*first, slices_of(op));
      refused_ = op;
      break;
    }
    const uint32_t index = free_indexes_.back();
    free_indexes_.pop_back();
    ops_[index] = op;
    slices_[index] = *first;
    holds_[index] = std::move(hold);
    io_uring_sqe& entry = sq_entries_[tail & sq_mask_];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = has_buffers_ ? IORING_OP_READ_FIXED : IORING_OP_READ;
    entry.fd = descriptor;
    entry.off = op.offset;
    entry.addr = reinterpret_cast<uint64_t>(data_of(index));
    entry.len = op.bytes;
    entry.user_data = index;
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    ++tail;
    ++queued_;
  }
  // Pairs with the kernel's acquire of the tail: the kernel sees the entries written above.
  std::atomic_ref(*sq_tail_).store(tail, std::memory_order_release);
}

// Submits the queued reads to the kernel and waits for `wait_for` completions. Returns false when the call failed,
// other than by an interrupt: no read was submitted.
bool KernelRing::enter(unsigned wait_for) noexcept {
  const unsigned flags = wait_for > 0 ? IORING_ENTER_GETEVENTS : 0;
  const long taken = ::syscall(__NR_io_uring_enter, fd_, queued_, wait_for, flags, nullptr, size_t{0});
  if (taken < 0) return errno == EINTR;
  queued_ -= static_cast<uint32_t>(taken);
  in_flight_ += static_cast<uint32_t>(taken);
  return true;
}

// A read that is not complete (short, interrupted or failed) is repeated by File::read, which reads until it is
// complete and reports errors.
void KernelRing::finish(ReadSource& source, uint32_t index, int result) noexcept {
  const ReadOp op = ops_[index];
  holds_[index].reset();
  std::exception_ptr error;
  if (result != static_cast<int>(op.bytes)) {
    try {
      op.file->read(data_of(index), op.bytes, op.offset);
    } catch (...) {
      error = std::current_exception();
    }
  }
  source.done(op, error ? nullptr : data_of(index), error);
  free_slices_.give_back(slices_[index], slices_of(op));
  free_indexes_.push_back(index);
}

void KernelRing::reap(ReadSource& source) noexcept {
  unsigned head = std::atomic_ref(*cq_head_).load(std::memory_order_relaxed);
  // Pairs with the kernel's release of the tail: the completions and the bytes of their reads are visible.
  const unsigned tail = std::atomic_ref(*cq_tail_).load(std::memory_order_acquire);
  count_uring_reads(tail - head);
  for (; head != tail; ++head) {
    const io_uring_cqe& entry = cq_entries_[head & cq_mask_];
    --in_flight_;
    finish(source, static_cast<uint32_t>(entry.user_data), entry.res);
  }
  std::atomic_ref(*cq_head_).store(head, std::memory_order_release);
}

void KernelRing::begin(ReadSource& source) noexcept {
  fill(source);
  if (queued_ > 0) enter(0);
}

// Does the queued reads by File::read when the kernel accepts none. The kernel reads the queue in enter() only.
void KernelRing::take_back(ReadSource& source) noexcept {
  const unsigned tail = std::atomic_ref(*sq_tail_).load(std::memory_order_relaxed);
  std::atomic_ref(*sq_tail_).store(tail - queued_, std::memory_order_release);
  for (unsigned i = tail - queued_; i != tail; ++i) {
    finish(source, static_cast<uint32_t>(sq_entries_[i & sq_mask_].user_data), -EAGAIN);
  }
  queued_ = 0;
}

std::optional<ReadOp> KernelRing::drive(ReadSource& source) noexcept {
  for (;;) {
    fill(source);
    if (queued_ + in_flight_ == 0) return std::exchange(refused_, std::nullopt);
    // Waits for an eighth of the reads at once: fewer calls, while the device keeps most of its queue.
    if (!enter(std::max(1u, (queued_ + in_flight_) / 8))) {
      if (in_flight_ > 0) {
        ::usleep(100);  // probably short of memory, which completions free
      } else {
        take_back(source);
      }
    }
    reap(source);
  }
}

}  // namespace

std::unique_ptr<Ring> Ring::make(ReadLane& lane, int* error_number) {
  auto ring = std::make_unique<KernelRing>(lane);
  *error_number = ring->open();
  if (*error_number != 0) return nullptr;
  return ring;
}

}  // namespace bunkbed::vfs

#else  // the same function where there is no io_uring

namespace bunkbed::vfs {

std::unique_ptr<Ring> Ring::make(ReadLane&, int* error_number) {
  *error_number = ENOSYS;
  return nullptr;
}

}  // namespace bunkbed::vfs

#endif
