// A filesystem that fails on purpose: wraps another one, numbers its operations and makes chosen ones fail, come up short,
// be interrupted, take long, or end the process.
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
  kError,      // the error, the operation not carried out; of a write half its blocks arrive, as on a full disk
  kInterrupt,  // one system call of it fails with EINTR
  kShort,      // one read or write of it moves fewer bytes than asked for
  kDelay,      // carried out late
  kDie,        // the process ends by SIGKILL before it
  kDieWithin,  // as kDie, a write half done
};

class FaultVfs : public Vfs {
 public:
  explicit FaultVfs(Vfs& below = posix()) : below_(below) {}

  // Operation number `at` fails (0: none), and with `and_all_later` everything from there on: to whoever reads the
  // directory afterwards it looks as if the process had died. Counting begins anew.
  void fail_at(uint64_t at, int error_number, bool and_all_later);
  // As fail_at(), for the other faults.
  void set_fault(uint64_t at, Fault fault, int error_number = 0, bool and_all_later = false);
  // Besides operation `at`, every `every`-th after it (0: none), until `most` have been struck in all (0: without end).
  void repeat_every(uint64_t every, uint64_t most = 0) {
    every_ = every;
    most_ = most;
  }
  // Every operation of this kind fails, until told otherwise.
  void fail_all(Op op, int error_number);
  void heal();
  void set_delay(double seconds) { delay_s_ = seconds; }
  uint64_t count() const { return count_; }
  uint64_t struck() const { return struck_; }  // operations that met the fault so far; a short one is a read or write
  // Reads, opens and lists are many and change nothing: tests may number the others alone.
  void count_reads(bool value) { count_reads_ = value; }
  // Syncs are counted and not carried out: for tests that end processes at most, never the power.
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
  // False: the operation is not to be carried out and nobody is to hear of it (a skipped sync).
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
