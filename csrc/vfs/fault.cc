#include "vfs/fault.h"

#include <signal.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "vfs/syscalls.h"

namespace bunkbed::vfs {

namespace {

[[noreturn]] void die() {
  for (;;) ::kill(::getpid(), SIGKILL);
}

// Thrown by enter() where half of a write must be carried out.
struct DieWithin {};

}  // namespace

class FaultVfs::FaultFile final : public File {
 public:
  FaultFile(FaultVfs* owner, std::shared_ptr<File> below) : owner_(owner), below_(std::move(below)) {}
  void read(void* data, size_t n, uint64_t offset) override {
    owner_->enter(Op::kRead, path());
    below_->read(data, n, offset);
  }
  void write(const void* data, size_t n, uint64_t offset) override {
    const size_t half = n / 2 / kBlockBytes * kBlockBytes;
    try {
      owner_->enter(Op::kWrite, path());
    } catch (const DieWithin&) {
      below_->write(data, half, offset);
      die();
    } catch (const Error&) {
      if (half > 0) below_->write(data, half, offset);
      throw;
    }
    below_->write(data, n, offset);
  }
  void sync() override {
    if (owner_->enter(Op::kSync, path())) below_->sync();
  }
  uint64_t size() override { return below_->size(); }
  uint32_t read_alignment() const override { return below_->read_alignment(); }
  const std::string& path() const override { return below_->path(); }
  bool is_at(const std::string& path) override { return below_->is_at(path); }
  Identity identity() override { return below_->identity(); }

 private:
  FaultVfs* owner_;
  std::shared_ptr<File> below_;
};

void FaultVfs::fail_at(uint64_t at, int error_number, bool and_all_later) {
  set_fault(at, Fault::kError, error_number, and_all_later);
}

void FaultVfs::set_fault(uint64_t at, Fault fault, int error_number, bool and_all_later) {
  at_ = at;
  fault_ = fault;
  error_number_ = error_number;
  and_all_later_ = and_all_later;
  every_ = 0;
  struck_ = 0;
  count_ = 0;
}

void FaultVfs::fail_all(Op op, int error_number) {
  fault_ = Fault::kError;
  error_number_ = error_number;
  failing_ = static_cast<int>(op);
}

void FaultVfs::heal() {
  failing_ = -1;
  at_ = 0;
}

bool FaultVfs::enter(Op op, const std::string& path) {
  next_mishap() = Mishap::kNone;
  const bool changes_nothing = op == Op::kRead || op == Op::kOpen || op == Op::kList;
  const bool is_counted = count_reads_ || !changes_nothing;
  const uint64_t number = is_counted ? ++count_ : count_.load();
  const bool is_sync = op == Op::kSync || op == Op::kSyncDirectory;
  const bool is_carried_out = !is_sync || !skip_syncs_;
  const uint64_t at = at_, every = every_;
  const bool is_left = most_ == 0 || struck_ < most_;
  const bool comes_again = every != 0 && at != 0 && number > at && (number - at) % every == 0 && is_left;
  const bool is_chosen = is_counted && (number == at || comes_again);
  const bool is_dead = and_all_later_ && at != 0 && number >= at;
  if (!is_chosen && !is_dead && failing_ != static_cast<int>(op)) return is_carried_out;
  const bool moves_bytes = op == Op::kRead || op == Op::kWrite;
  if (is_chosen && (moves_bytes || fault_ != Fault::kShort)) ++struck_;
  switch (fault_.load()) {
    case Fault::kInterrupt:
      next_mishap() = Mishap::kInterrupt;
      return is_carried_out;
    case Fault::kShort:
      if (moves_bytes) next_mishap() = Mishap::kShort;
      return is_carried_out;
    case Fault::kDelay:
      std::this_thread::sleep_for(std::chrono::duration<double>(delay_s_.load()));
      return is_carried_out;
    case Fault::kDieWithin:
      if (op == Op::kWrite) throw DieWithin();
      die();
    case Fault::kDie:
      die();
    case Fault::kError:
      break;
  }
  const int error_number = error_number_;
  throw Error(is_sync ? ErrorKind::kSync : ErrorKind::kSystem,
              std::string("injected failure: ") + std::strerror(error_number), error_number, path);
}

std::shared_ptr<File> FaultVfs::create(const std::string& path) {
  enter(Op::kCreate, path);
  return std::make_shared<FaultFile>(this, below_.create(path));
}

std::shared_ptr<File> FaultVfs::create_small(const std::string& path) {
  enter(Op::kCreate, path);
  return std::make_shared<FaultFile>(this, below_.create_small(path));
}

std::shared_ptr<File> FaultVfs::open(const std::string& path, bool direct) {
  enter(Op::kOpen, path);
  return std::make_shared<FaultFile>(this, below_.open(path, direct));
}

void FaultVfs::link(const std::string& from, const std::string& to) {
  enter(Op::kLink, to);
  below_.link(from, to);
}

void FaultVfs::remove(const std::string& path) {
  enter(Op::kRemove, path);
  below_.remove(path);
}

void FaultVfs::truncate(const std::string& path, uint64_t bytes) {
  enter(Op::kTruncate, path);
  below_.truncate(path, bytes);
}

void FaultVfs::sync_directory(const std::string& path) {
  if (enter(Op::kSyncDirectory, path)) below_.sync_directory(path);
}

void FaultVfs::make_directories(const std::string& path) {
  enter(Op::kMakeDirectories, path);
  below_.make_directories(path);
}

std::vector<std::string> FaultVfs::list(const std::string& path) {
  enter(Op::kList, path);
  return below_.list(path);
}

std::unique_ptr<Lock> FaultVfs::lock(const std::string& path) {
  enter(Op::kLock, path);
  return below_.lock(path);
}

}  // namespace bunkbed::vfs
