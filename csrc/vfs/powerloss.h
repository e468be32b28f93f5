// A filesystem that carries each operation out in another one and records it. From the record it makes the states of
// the disk that a loss of power at any moment could leave behind.
//
// What a loss at a moment p may do (stricter than any one filesystem):
//   1. A write is safe if a sync of its file began after the write ended, and ended before p. Of any other write that
//      began before p, each 512-byte sector is present, absent or garbage. The file may have the length of the whole
//      write.
//   2. A change of a name (create, link, remove, mkdir) is safe if a sync of its directory began after the change and
//      ended before p. Of the other changes the first ones in time survive, or any subset. Syncing a file makes no name
//      safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "vfs/vfs.h"

namespace bunkbed::vfs {

// Which of the unsafe changes of names survive.
enum class Names { kAll, kNone, kPrefix, kSubset };
// What happens to the sectors of unsafe writes. kMixed: chosen for each write, or for each of its sectors.
enum class Sectors { kKept, kDropped, kTrashed, kMixed };

// The files of a disk after a loss of power.
class CrashState {
 public:
  // Equal for states with the same names and bytes.
  uint64_t digest() const { return digest_; }
  // Writes the state to a directory that is empty or missing.
  void write(const std::string& path) const;

 private:
  friend class PowerlossVfs;
  std::vector<std::string> directories_;
  std::map<std::string, std::vector<std::byte>> files_;
  uint64_t digest_ = 0;
};

// Syncs that a crash state ignores, as if the code did not make the call.
struct IgnoredSync {
  // "": syncs of files whose name begins with `name`. Otherwise: syncs of a directory that would make safe a change of
  // this kind (create, link, remove, mkdir) of a name that begins with `name`.
  std::string change;
  std::string name;
};

class PowerlossVfs final : public Vfs {
 public:
  // Records the operations below `root`. Files that exist already are safe.
  explicit PowerlossVfs(std::string root, Vfs& below = posix());

  // Returns the moment after all operations so far.
  uint64_t now();
  // Returns "after" or "during", kind and name of the operation that began last at `moment`; "" if there is none.
  std::string describe(uint64_t moment);
  CrashState crash(uint64_t moment, Names names, Sectors sectors, uint64_t seed,
                   const std::vector<IgnoredSync>& ignored = {});

  std::shared_ptr<File> create(const std::string& path) override;
  std::shared_ptr<File> create_small(const std::string& path) override;
  std::shared_ptr<File> open(const std::string& path, bool direct) override { return below_.open(path, direct); }
  void link(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  void truncate(const std::string& path, uint64_t bytes) override;
  void sync_directory(const std::string& path) override;
  void make_directories(const std::string& path) override;
  std::vector<std::string> list(const std::string& path) override { return below_.list(path); }
  bool exists(const std::string& path) override { return below_.exists(path); }
  std::unique_ptr<Lock> lock(const std::string& path) override;

 private:
  class TracedFile;
  enum class Kind { kWrite, kTruncate, kSync, kCreate, kLink, kRemove, kMakeDirectory, kSyncDirectory };
  struct Event {
    Kind kind;
    uint64_t begin;
    uint64_t end;    // ~0: not yet
    uint32_t inode;  // of the file; of a directory for kSyncDirectory and kMakeDirectory
    uint32_t parent = 0;
    std::string name;
    uint64_t offset = 0;  // of a write; the length after a truncation
    std::vector<std::byte> data;
  };
  // The names in a directory, each with its inode.
  using Entries = std::map<std::string, uint32_t>;

  static const char* kind_name(Kind kind);
  void adopt(const std::string& path, uint32_t inode) REQUIRES(mutex_);
  std::shared_ptr<File> traced(const std::string& path, std::shared_ptr<File> below, size_t event);
  size_t begin_event(Kind kind, const std::string& path, uint32_t inode);
  void end_event(size_t event);
  template <typename Call>
  auto record(size_t event, Call&& call);
  uint32_t directory_of(const std::string& path, std::string* name) REQUIRES(mutex_);
  bool is_ignored(const Event& sync, const std::vector<const Event*>& pending,
                  const std::vector<IgnoredSync>& ignored) const;

  const std::string root_;
  Vfs& below_;
  Mutex mutex_{LockLevel::kTesting};
  uint64_t tick_ GUARDED_BY(mutex_) = 0;
  std::vector<Event> events_ GUARDED_BY(mutex_);
  uint32_t num_inodes_ GUARDED_BY(mutex_) = 1;  // 0 is the root
  // The current state.
  std::map<std::string, uint32_t> inodes_ GUARDED_BY(mutex_);  // by path below the root
  // The state at construction.
  std::map<uint32_t, Entries> first_entries_ GUARDED_BY(mutex_);
  std::map<uint32_t, std::vector<std::byte>> first_bytes_ GUARDED_BY(mutex_);
};

}  // namespace bunkbed::vfs
