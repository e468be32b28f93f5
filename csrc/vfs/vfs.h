// The interface to the operating system's files. All durable data goes through it, so a test can use a backend that
// injects faults or simulates power loss.
//
// A failure is an Error(kSystem) with errno and path. A failed sync is kSync. Other kinds are named at the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace bunkbed::vfs {

class File {
 public:
  virtual ~File() = default;
  // Reads exactly n bytes at offset; a file that ends before is Error(kCorruption).
  virtual void read(void* data, size_t n, uint64_t offset) = 0;
  // Writes exactly n bytes at offset; retries short writes and EINTR.
  virtual void write(const void* data, size_t n, uint64_t offset) = 0;
  // fdatasync: data and the size needed to read it are on stable storage when this returns.
  virtual void sync() = 0;
  virtual uint64_t size() = 0;
  // Alignment that offset, length and memory address of a read need; 1: none.
  virtual uint32_t read_alignment() const = 0;
  virtual const std::string& path() const = 0;
  // Returns whether that name is a name of this file; false where the backend cannot tell.
  virtual bool is_at(const std::string&) { return false; }
  // Identifies the file independently of its name; both 0 where that is not known.
  struct Identity {
    uint64_t device = 0;
    uint64_t inode = 0;
    bool operator==(const Identity&) const = default;
  };
  virtual Identity identity() { return {}; }
  // The descriptor of this file, for reads that bypass read(). It is valid while the file and the object that this call
  // puts in `hold` live. -1: there is none.
  virtual int descriptor([[maybe_unused]] std::shared_ptr<File>* hold) { return -1; }
};

// The writer's lock. unlock() releases it even where a forked child inherited the descriptor.
class Lock {
 public:
  virtual ~Lock() = default;
  virtual void unlock() = 0;
};

class Vfs {
 public:
  virtual ~Vfs() = default;
  // Makes a file for appends of whole blocks, without the page cache where the filesystem allows it. Error(kExists).
  virtual std::shared_ptr<File> create(const std::string& path) = 0;
  // Makes a new file of a few bytes that uses the page cache. Error(kExists).
  virtual std::shared_ptr<File> create_small(const std::string& path) = 0;
  // Opens a file for block reads (direct), or a small file that is parsed (not direct). Error(kNotFound).
  virtual std::shared_ptr<File> open(const std::string& path, bool direct) = 0;
  // Gives the file at `from` the name `to`; Error(kExists) when `to` exists. Never replaces.
  virtual void link(const std::string& from, const std::string& to) = 0;
  // Removes a file. A missing file is no error.
  virtual void remove(const std::string& path) = 0;
  // Cuts a file to its first `bytes` bytes and syncs it.
  virtual void truncate(const std::string& path, uint64_t bytes) = 0;
  virtual void sync_directory(const std::string& path) = 0;
  virtual void make_directories(const std::string& path) = 0;
  // Names in a directory, sorted; Error(kNotFound) when there is none.
  virtual std::vector<std::string> list(const std::string& path) = 0;
  virtual bool exists(const std::string& path) = 0;
  // Takes the writer's lock; Error(kLocked) naming the holder when another process has it.
  virtual std::unique_ptr<Lock> lock(const std::string& path) = 0;
};

Vfs& posix();

// The Vfs of tables that Python makes and opens: posix(), unless a test gave another one to use(). That one must live
// as long as the process. Null: posix() again.
Vfs& current();
void use(Vfs* vfs);

// Blocks of this size are the unit of appends: every chunk begins and ends on one.
inline constexpr size_t kBlockBytes = 4096;

constexpr uint64_t round_down(uint64_t value, uint64_t unit) { return value / unit * unit; }
constexpr uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Memory aligned for direct I/O, taken with use. Memory of 2 MiB and more has huge pages where the system gives them:
// the pages of a direct read are then side by side, and a disk behind a hypervisor that takes each page by itself reads
// at up to twice the rate (docs/design/notes/reads.md).
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  // Buffers that lie side by side, so that small ones have huge pages, too. The last one that goes frees the memory.
  static std::vector<Buffer> side_by_side(size_t n, size_t bytes);
  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  std::shared_ptr<std::byte> data_;
  size_t size_ = 0;
};

}  // namespace bunkbed::vfs
