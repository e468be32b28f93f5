#include "vfs/file_cache.h"

#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"

namespace bunkbed::vfs {

struct OpenFiles {
  Mutex mutex;                                        // guards also the state of every CachedFile
  std::list<CachedFile*> closable GUARDED_BY(mutex);  // open and may be closed; the least recently used first
  size_t num_open GUARDED_BY(mutex) = 0;

  void put_last(CachedFile* file, std::list<CachedFile*>* from) REQUIRES(mutex) {
    closable.splice(closable.end(), *from, file->place_);
  }
  void take_out(CachedFile* file) REQUIRES(mutex) { file->node_.splice(file->node_.begin(), closable, file->place_); }

  // Takes the files above the limit out of their CachedFiles. The caller closes them without the mutex.
  void trim(std::vector<std::shared_ptr<File>>* closed) REQUIRES(mutex) {
    for (const size_t limit = most_open(); num_open > limit && closable.size() > kStay; --num_open) {
      CachedFile* const oldest = closable.front();
      closed->push_back(oldest->file_);
      oldest->file_.reset();
      take_out(oldest);
    }
  }

 private:
  static constexpr size_t kStay = 16;
  static size_t most_open() {
    rlimit limit{};
    return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<size_t>(limit.rlim_cur) / 4 : 64;
  }
};

namespace {

// Never destroyed: a table may outlive the interpreter's unloading. fork() takes the mutex: the child finds it free.
OpenFiles& open_files() {
  static OpenFiles* all = nullptr;
  static const bool is_made = [] {
    all = new OpenFiles;
    const auto release = []() NO_THREAD_SAFETY_ANALYSIS { all->mutex.unlock(); };
    ::pthread_atfork([]() NO_THREAD_SAFETY_ANALYSIS { all->mutex.lock(); }, release, release);
    return true;
  }();
  (void)is_made;
  return *all;
}

}  // namespace

CachedFile::CachedFile(Vfs& vfs, std::shared_ptr<File> file)
    : vfs_(vfs),
      path_(file->path()),
      read_alignment_(file->read_alignment()),
      identity_(file->identity()),
      file_(std::move(file)) {
  std::vector<std::shared_ptr<File>> closed;  // before the guard: they are closed without the mutex
  OpenFiles& all = open_files();
  const MutexLock guard(all.mutex);
  ++all.num_open;
  all.trim(&closed);
}

CachedFile::~CachedFile() {
  OpenFiles& all = open_files();
  const MutexLock guard(all.mutex);
  if (file_ == nullptr) return;
  --all.num_open;
  if (may_close_) all.take_out(this);
}

void CachedFile::let_close() {
  OpenFiles& all = open_files();
  const MutexLock guard(all.mutex);
  if (!std::exchange(may_close_, true)) all.put_last(this, &node_);
}

void CachedFile::keep_open() { (void)opened(true); }

bool CachedFile::is_open() const {
  const MutexLock guard(open_files().mutex);
  return file_ != nullptr;
}

int CachedFile::descriptor(std::shared_ptr<File>* hold) {
  try {
    *hold = opened();
  } catch (const Error&) {
    return -1;  // read() fails in the same way and reports the error
  }
  return (*hold)->descriptor(hold);
}

std::shared_ptr<File> CachedFile::opened(bool must_stay) {
  OpenFiles& all = open_files();
  std::shared_ptr<File> again;
  for (;;) {
    {
      std::vector<std::shared_ptr<File>> closed;
      const MutexLock guard(all.mutex);
      if (file_ == nullptr && again != nullptr) {
        file_ = again;
        ++all.num_open;
        all.put_last(this, &node_);
        all.trim(&closed);
      } else if (file_ != nullptr && may_close_) {
        all.put_last(this, &all.closable);
      }
      if (file_ != nullptr) {
        if (must_stay && std::exchange(may_close_, false)) all.take_out(this);
        return file_;
      }
    }
    again = vfs_.open(path_, true);  // without the mutex: another thread may have done the same meanwhile
    if (again->identity() == identity_) continue;
    throw Error(ErrorKind::kCorruption, "file " + path_ +
                                            " was replaced by another one while its table was open; close "
                                            "the table, put the file back and open the table again");
  }
}

}  // namespace bunkbed::vfs
