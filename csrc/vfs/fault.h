// A filesystem for tests: wraps another one, numbers its operations and makes chosen ones fail, be short, be
// interrupted, be late, or kill the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "vfs/vfs.h"

namespace bunkbed::vfs {

enum class Op {
  kRead,
  kWrite,
  kSync,
  kCreate,
  kOpen,
  kLink,
  kRemove,
  kTruncate,
  kSyncDirectory,
  kMakeDirectories,
  kList,
  kLock,
};

enum class Fault {
  kError,      // it fails and is not carried out; half of a write's blocks are written, as on a full disk
  kInterrupt,  // one of its system calls fails with EINTR
  kShort,      // one of its reads or writes moves fewer bytes than asked for
  kDelay,      // it is carried out late
  kDie,        // SIGKILL ends the process before it
  kDieWithin,  // like kDie, but half of a write is carried out first
};

class FaultVfs : public Vfs {
 public:
  explicit FaultVfs(Vfs& below = posix()) : below_(below) {}

  // Makes operation number `at` fail (0: none). With `and_all_later` every later operation fails too, which leaves the
  // directory as if the process had died there. Counting restarts at 0.
  void fail_at(uint64_t at, int error_number, bool and_all_later);
  // Like fail_at(), for the other faults.
  void set_fault(uint64_t at, Fault fault, int error_number = 0, bool and_all_later = false);
  // The fault also meets every `every`-th operation after `at` (0: none), until it met `most` operations (0: no limit).
  void repeat_every(uint64_t every, uint64_t most = 0) {
    every_ = every;
    most_ = most;
  }
  // Every operation of this kind fails until heal().
  void fail_all(Op op, int error_number);
  void heal();
  void set_delay(double seconds) { delay_s_ = seconds; }
  uint64_t count() const { return count_; }
  uint64_t struck() const { return struck_; }  // how often the fault was met; kShort counts reads and writes only
  // False: reads, opens and lists get no number. They are many and change nothing.
  void count_reads(bool value) { count_reads_ = value; }
  // True: syncs are counted but not carried out, for tests that kill processes but never lose power.
  void skip_syncs(bool value) { skip_syncs_ = value; }

  std::shared_ptr<File> create(const std::string& path) override;
  std::shared_ptr<File> create_small(const std::string& path) override;
  std::shared_ptr<File> open(const std::string& path, bool direct) override;
  void link(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  void truncate(const std::string& path, uint64_t bytes) override;
  void sync_directory(const std::string& path) override;
  void make_directories(const std::string& path) override;
  std::vector<std::string> list(const std::string& path) override;
  bool exists(const std::string& path) override { return below_.exists(path); }
  std::unique_ptr<Lock> lock(const std::string& path) override;

 private:
  class FaultFile;
  // Returns false when the caller must skip the operation and report success (a skipped sync).
  bool enter(Op op, const std::string& path);

  Vfs& below_;
  std::atomic<uint64_t> count_{0};
  std::atomic<uint64_t> at_{0};
  std::atomic<uint64_t> every_{0};
  std::atomic<uint64_t> most_{0};
  std::atomic<uint64_t> struck_{0};
  std::atomic<Fault> fault_{Fault::kError};
  std::atomic<int> error_number_{0};
  std::atomic<bool> and_all_later_{false};
  std::atomic<bool> count_reads_{true};
  std::atomic<bool> skip_syncs_{false};
  std::atomic<int> failing_{-1};
  std::atomic<double> delay_s_{0.01};
};

}  // namespace bunkbed::vfs
