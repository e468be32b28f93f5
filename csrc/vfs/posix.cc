// The real filesystem. Uses O_DIRECT where the filesystem takes it: appends and reads of records then use no page cache
// outside the RAM budget. Elsewhere it uses buffered I/O and drops the pages that it wrote.
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/fault.h"
#include "vfs/syscalls.h"
#include "vfs/vfs.h"

namespace bunkbed::vfs {

namespace {

[[noreturn]] void fail(const char* what, const std::string& path, int error_number) {
  throw Error(ErrorKind::kSystem, std::string(what) + " failed: " + std::strerror(error_number), error_number, path);
}

[[noreturn]] void fail_sync(const char* what, const std::string& path, int error_number) {
  throw Error(ErrorKind::kSync, std::string(what) + " failed: " + std::strerror(error_number), error_number, path);
}

#ifdef O_DIRECT
constexpr int kDirect = O_DIRECT;
#else
constexpr int kDirect = 0;
#endif

// The alignment that direct reads need here, as reported by the kernel. Many devices take 512 bytes; a record smaller
// than a block then needs a shorter read than with 4096 (measured: 79k against 69k reads a second).
uint32_t direct_alignment(int fd) {
#ifdef STATX_DIOALIGN
  struct statx info{};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0 &&
      info.stx_dio_offset_align != 0) {
    return std::max({info.stx_dio_offset_align, info.stx_dio_mem_align, 512u});
  }
#else
  (void)fd;
#endif
  return kBlockBytes;
}

class PosixFile final : public File {
 public:
  PosixFile(int fd, std::string path, bool direct, bool drop_pages)
      : fd_(fd),
        path_(std::move(path)),
        direct_(direct),
        drop_pages_(drop_pages && !direct),
        read_alignment_(direct ? direct_alignment(fd) : 1) {}
  ~PosixFile() override {
    if (!fault_is("descriptor_leak")) ::close(fd_);
  }

  void read(void* data, size_t n, uint64_t offset) override {
    auto* out = static_cast<char*>(data);
    size_t done = 0;
    while (done < n) {
      const ssize_t got = read_some(fd_, out + done, n - done, static_cast<off_t>(offset + done));
      if (got < 0) {
        if (errno == EINTR) continue;
        fail("read", path_, errno);
      }
      if (got == 0) {
        throw Error(ErrorKind::kCorruption, "file " + path_ + " ends at byte " + std::to_string(offset + done) +
                                                ", expected at least " + std::to_string(offset + n));
      }
      done += static_cast<size_t>(got);
    }
  }

  void write(const void* data, size_t n, uint64_t offset) override {
    const auto* in = static_cast<const char*>(data);
    size_t done = 0;
    bool has_stalled = false;
    while (done < n) {
      const ssize_t put = write_some(fd_, in + done, n - done, static_cast<off_t>(offset + done));
      if (put < 0) {
        if (errno == EINTR) continue;
        fail("write", path_, errno);
      }
      if (put == 0) fail("write", path_, ENOSPC);
      auto more = static_cast<size_t>(put);
      // A direct write cannot start within a block: a short one that ends there is repeated from the start of the
      // block. Two such writes in a row without a whole block mean a quota or a size limit.
      if (direct_ && done + more < n) more = round_down(more, kBlockBytes);
      if (more == 0 && has_stalled) fail("write", path_, EFBIG);
      has_stalled = more == 0;
      done += more;
    }
    if (drop_pages_) {
      // Buffered fallback: write the pages back and drop them, because the RAM budget does not include them.
#ifdef __linux__
      ::sync_file_range(fd_, static_cast<off_t>(offset), static_cast<off_t>(n),
                        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
      ::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(n), POSIX_FADV_DONTNEED);
#endif
    }
  }

  void sync() override {
#ifdef __APPLE__
    const int rc = uninterrupted([&] { return ::fcntl(fd_, F_FULLFSYNC); });
#else
    const int rc = uninterrupted([&] { return ::fdatasync(fd_); });
#endif
    if (rc != 0) fail_sync("fdatasync", path_, errno);
  }

  uint64_t size() override {
    struct stat info{};
    if (::fstat(fd_, &info) != 0) fail("fstat", path_, errno);
    return static_cast<uint64_t>(info.st_size);
  }

  uint32_t read_alignment() const override { return read_alignment_; }
  const std::string& path() const override { return path_; }
  bool is_at(const std::string& path) override {
    struct stat there{};
    return ::stat(path.c_str(), &there) == 0 && identity() == Identity{there.st_dev, there.st_ino};
  }
  Identity identity() override {
    struct stat info{};
    if (::fstat(fd_, &info) != 0) fail("fstat", path_, errno);
    return {info.st_dev, info.st_ino};
  }
  int descriptor(std::shared_ptr<File>*) override { return fd_; }

 private:
  int fd_;
  std::string path_;
  bool direct_;
  bool drop_pages_;
  uint32_t read_alignment_;
};

class PosixLock final : public Lock {
 public:
  explicit PosixLock(int fd) : fd_(fd), owner_(::getpid()) {}
  ~PosixLock() override {
    // A forked child only closes its descriptor: the lock is the parent's.
    if (fd_ >= 0) ::close(fd_);
  }
  void unlock() override {
    if (fd_ < 0 || ::getpid() != owner_) return;
    ::flock(fd_, LOCK_UN);  // explicit: a forked child may still hold a copy of the descriptor
    ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
  pid_t owner_;
};

class PosixVfs final : public Vfs {
 public:
  std::shared_ptr<File> create(const std::string& path) override {
    return open_with(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, true, true);
  }

  std::shared_ptr<File> create_small(const std::string& path) override {
    return open_with(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, false, false);
  }

  std::shared_ptr<File> open(const std::string& path, bool direct) override {
    auto file = open_with(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, direct, false);
    // Checks the opened file, not the name: garbage collection may have removed the name.
    struct stat info{};
    if (::fstat(file->descriptor(nullptr), &info) != 0) fail("fstat", path, errno);
    if (!S_ISREG(info.st_mode)) throw Error(ErrorKind::kFormat, "file " + path + " is not a regular file");
    return file;
  }

  void link(const std::string& from, const std::string& to) override {
    if (uninterrupted([&] { return ::link(from.c_str(), to.c_str()); }) != 0) {
      if (errno == EEXIST) throw Error(ErrorKind::kExists, "file " + to + " exists already", EEXIST, to);
      fail("link", to, errno);
    }
  }

  void remove(const std::string& path) override {
    if (uninterrupted([&] { return ::unlink(path.c_str()); }) != 0 && errno != ENOENT) fail("unlink", path, errno);
  }

  void truncate(const std::string& path, uint64_t bytes) override {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) fail("open", path, errno);
    const bool was_cut = ::ftruncate(fd, static_cast<off_t>(bytes)) == 0;
    const bool was_synced = was_cut && ::fsync(fd) == 0;
    const int error_number = errno;
    ::close(fd);
    if (!was_cut) fail("ftruncate", path, error_number);
    if (!was_synced) fail_sync("fsync", path, error_number);
  }

  void sync_directory(const std::string& path) override {
    const int fd = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    if (fd < 0) fail("open", path, errno);
    const int rc = uninterrupted([&] { return ::fsync(fd); });
    const int error_number = errno;
    ::close(fd);
    if (rc != 0) fail_sync("fsync", path, error_number);
  }

  void make_directories(const std::string& path) override {
    for (size_t at = 1; at <= path.size(); ++at) {
      if (at != path.size() && path[at] != '/') continue;
      const std::string prefix = path.substr(0, at);
      if (uninterrupted([&] { return ::mkdir(prefix.c_str(), 0777); }) == 0) {
        const size_t slash = prefix.find_last_of('/');
        sync_directory(slash == std::string::npos ? "." : slash == 0 ? "/" : prefix.substr(0, slash));
      } else if (errno != EEXIST && errno != EISDIR) {
        fail("mkdir", prefix, errno);
      }
    }
  }

  std::vector<std::string> list(const std::string& path) override {
    DIR* directory = ::opendir(path.c_str());
    if (directory == nullptr) {
      if (errno == ENOENT) throw Error(ErrorKind::kNotFound, "no such directory: " + path, ENOENT, path);
      fail("opendir", path, errno);
    }
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(directory)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    const int error_number = errno;
    ::closedir(directory);
    if (error_number != 0) fail("readdir", path, error_number);
    std::sort(names.begin(), names.end());
    return names;
  }

  bool exists(const std::string& path) override {
    struct stat info{};
    return ::lstat(path.c_str(), &info) == 0;
  }

  std::unique_ptr<Lock> lock(const std::string& path) override {
    const int fd = uninterrupted([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666); });
    if (fd < 0) fail("open", path, errno);
    auto held = std::make_unique<PosixLock>(fd);
    if (uninterrupted([&] { return ::flock(fd, LOCK_EX | LOCK_NB); }) != 0) {
      if (errno != EWOULDBLOCK) fail("flock", path, errno);
      char text[32] = {};
      const ssize_t got = ::pread(fd, text, sizeof(text) - 1, 0);
      std::string holder = got > 0 ? std::string(text, static_cast<size_t>(got)) : "";
      while (!holder.empty() && holder.back() == '\n') holder.pop_back();
      throw Error(ErrorKind::kLocked, holder.empty() ? "another process" : "process " + holder);
    }
    const std::string self = std::to_string(::getpid()) + "\n";
    // Only the error message of another process that finds the file locked uses this number. A failed write is ignored.
    if (::ftruncate(fd, 0) == 0) (void)!::pwrite(fd, self.data(), self.size(), 0);
    return held;
  }

 private:
  static std::shared_ptr<File> open_with(const std::string& path, int flags, bool direct, bool drop_pages) {
    int fd = -1;
    const auto open = [&path](int with) { return uninterrupted([&] { return ::open(path.c_str(), with, 0666); }); };
    if (direct) fd = open(flags | kDirect);
    const bool is_direct = fd >= 0 && kDirect != 0;
    // A create that fails because O_DIRECT is refused may have made the file: the second try omits O_EXCL.
    if (fd < 0 && !direct) fd = open(flags);
    if (fd < 0 && direct && errno == EINVAL) fd = open(flags & ~O_EXCL);
    if (fd < 0) {
      if (errno == ENOENT) throw Error(ErrorKind::kNotFound, "no such file: " + path, ENOENT, path);
      if (errno == EEXIST) throw Error(ErrorKind::kExists, "file " + path + " exists already", EEXIST, path);
      fail("open", path, errno);
    }
#ifdef POSIX_FADV_RANDOM
    if (direct && !is_direct) ::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
#endif
    return std::make_shared<PosixFile>(fd, path, is_direct, drop_pages);
  }
};

}  // namespace

Vfs& posix() {
  static auto* instance = new PosixVfs;  // leaked: threads may still write at process exit
  return *instance;
}

namespace {

std::atomic<Vfs*> current_vfs{nullptr};  // null: posix()

}  // namespace

Vfs& current() {
  // Pairs with use(): the backend's construction is visible.
  Vfs* const chosen = current_vfs.load(std::memory_order_acquire);
  return chosen != nullptr ? *chosen : posix();
}

void use(Vfs* vfs) { current_vfs.store(vfs, std::memory_order_release); }

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

std::shared_ptr<std::byte> map_memory(size_t bytes) {
  const size_t spare = bytes >= kHugePage ? kHugePage : 0;  // to begin at a huge page
  void* const mapped = ::mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw Error(ErrorKind::kMemory, "cannot allocate a buffer of " + std::to_string(bytes) + " bytes");
  }
  auto* memory = static_cast<std::byte*>(mapped);
  if (spare > 0) {
    const size_t ahead = round_up(reinterpret_cast<uintptr_t>(memory), kHugePage) - reinterpret_cast<uintptr_t>(memory);
    if (ahead > 0) ::munmap(memory, ahead);
    memory += ahead;
    if (spare > ahead) ::munmap(memory + bytes, spare - ahead);
#ifdef MADV_HUGEPAGE
    ::madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  }
  return {memory, [bytes](std::byte* block) { ::munmap(block, bytes); }};
}

}  // namespace

Buffer::Buffer(size_t bytes) : size_(round_up(bytes, kBlockBytes)) { data_ = map_memory(size_); }

std::vector<Buffer> Buffer::side_by_side(size_t n, size_t bytes) {
  const size_t size = round_up(bytes, kBlockBytes);
  const std::shared_ptr<std::byte> memory = map_memory(n * size);
  std::vector<Buffer> buffers(n);
  for (size_t i = 0; i < n; ++i) {
    buffers[i].data_ = {memory, memory.get() + i * size};
    buffers[i].size_ = size;
  }
  return buffers;
}

Buffer::Buffer(Buffer&& other) noexcept : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace bunkbed::vfs
