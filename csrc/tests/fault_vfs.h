// A filesystem that fails on purpose: wraps another one, numbers its operations, and makes chosen ones fail. Syncs are
// counted and not carried out: the tests end processes at most, never the power.
#pragma once

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <string>

#include <unistd.h>

#include "check.h"
#include "error.h"
#include "vfs/vfs.h"

namespace bunkbed::test {

// A directory of its own for a test; gone at the end.
class Sandbox {
 public:
  Sandbox() {
    // In memory where there is such a place: the tests write much and want nothing of the disk.
    const std::filesystem::path memory = "/dev/shm";
    const auto parent = ::access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path();
    std::string name = (parent / "bunkbed-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) fail(__FILE__, __LINE__, "mkdtemp failed");
    path_ = name;
  }
  ~Sandbox() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Sandbox(const Sandbox&) = delete;
  Sandbox& operator=(const Sandbox&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

enum class Op { kRead, kWrite, kSync, kCreate, kOpen, kLink, kRemove, kSyncDirectory, kOther };

class FaultVfs final : public vfs::Vfs {
 public:
  explicit FaultVfs(vfs::Vfs& below = vfs::posix()) : below_(below) {}

  // Operation number `at` fails (0: none), and with `and_all_later` everything from there on: to whoever reads the
  // directory afterwards it looks as if the process had died.
  void fail_at(uint64_t at, int error_number, bool and_all_later) {
    at_ = at;
    error_number_ = error_number;
    and_all_later_ = and_all_later;
    count_ = 0;
  }
  // Every operation of this kind fails, until told otherwise.
  void fail_all(Op op, int error_number) {
    error_number_ = error_number;
    failing_ = static_cast<int>(op);
  }
  void heal() {
    failing_ = -1;
    at_ = 0;
  }
  uint64_t count() const { return count_; }
  // Reads and opens are many and change nothing: fault tests may number the others alone.
  void count_reads(bool value) { count_reads_ = value; }

  std::shared_ptr<vfs::File> create(const std::string& path) override {
    enter(Op::kCreate, path);
    return std::make_shared<File>(this, below_.create(path));
  }
  std::shared_ptr<vfs::File> create_small(const std::string& path) override {
    enter(Op::kCreate, path);
    return std::make_shared<File>(this, below_.create_small(path));
  }
  std::shared_ptr<vfs::File> open(const std::string& path, bool direct) override {
    enter(Op::kOpen, path);
    return std::make_shared<File>(this, below_.open(path, direct));
  }
  void link(const std::string& from, const std::string& to) override {
    enter(Op::kLink, to);
    below_.link(from, to);
  }
  void remove(const std::string& path) override {
    enter(Op::kRemove, path);
    below_.remove(path);
  }
  void sync_directory(const std::string& path) override { enter(Op::kSyncDirectory, path); }
  void make_directories(const std::string& path) override {
    enter(Op::kOther, path);
    below_.make_directories(path);
  }
  std::vector<std::string> list(const std::string& path) override {
    enter(Op::kOther, path);
    return below_.list(path);
  }
  bool exists(const std::string& path) override { return below_.exists(path); }
  std::unique_ptr<vfs::Lock> lock(const std::string& path) override {
    enter(Op::kOther, path);
    return below_.lock(path);
  }

 private:
  class File final : public vfs::File {
   public:
    File(FaultVfs* owner, std::shared_ptr<vfs::File> below) : owner_(owner), below_(std::move(below)) {}
    void read(void* data, size_t n, uint64_t offset) override {
      owner_->enter(Op::kRead, path());
      below_->read(data, n, offset);
    }
    void write(const void* data, size_t n, uint64_t offset) override {
      try {
        owner_->enter(Op::kWrite, path());
      } catch (const Error&) {
        // Half of it arrives, as when the disk fills up in the middle.
        below_->write(data, n / 2 / vfs::kBlockBytes * vfs::kBlockBytes, offset);
        throw;
      }
      below_->write(data, n, offset);
    }
    void sync() override { owner_->enter(Op::kSync, path()); }
    uint64_t size() override { return below_->size(); }
    uint32_t read_alignment() const override { return below_->read_alignment(); }
    const std::string& path() const override { return below_->path(); }

   private:
    FaultVfs* owner_;
    std::shared_ptr<vfs::File> below_;
  };

  void enter(Op op, const std::string& path) {
    const bool is_read = op == Op::kRead || op == Op::kOpen;
    uint64_t number = count_;
    if (!is_read || count_reads_) number = ++count_;
    const bool is_chosen = number == at_ && (!is_read || count_reads_);
    const bool is_dead = and_all_later_ && at_ != 0 && number >= at_;
    if (!is_chosen && !is_dead && failing_ != static_cast<int>(op)) return;
    const bool is_sync = op == Op::kSync || op == Op::kSyncDirectory;
    throw Error(is_sync ? ErrorKind::kSync : ErrorKind::kSystem, "injected failure", error_number_, path);
  }

  vfs::Vfs& below_;
  std::atomic<uint64_t> count_{0};
  std::atomic<uint64_t> at_{0};
  std::atomic<int> error_number_{EIO};
  std::atomic<bool> and_all_later_{false};
  std::atomic<bool> count_reads_{true};
  std::atomic<int> failing_{-1};
};

}  // namespace bunkbed::test
