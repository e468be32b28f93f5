// A cache of descriptors for the whole process: opens files when they are used and closes the least recently used ones.
//
//   1. A CachedFile is made of an open file and stays open until let_close(). From then on it may be closed when more
//      files are open than the limit allows. The next use opens it again by its name.
//   2. The limit is a quarter of the soft RLIMIT_NOFILE. Files that may not be closed count too and may exceed it; the
//      16 most recently used of the others stay open even then.
//   3. The caller of let_close() has synced the file and writes no more: no write error is lost with the descriptor,
//      and the file is opened again for reading only.
//   4. A file that is opened again must have the device and inode of the one that was closed. A file that replaced it
//      is an error and is never read. The caller calls keep_open() before it removes the name of a file still in use.
//   5. A read in flight holds the open file. Its descriptor is closed when the last such read is done.
#pragma once

#include <list>
#include <memory>
#include <string>

#include "vfs/vfs.h"

namespace bunkbed::vfs {

// Any number of threads at once.
class CachedFile final : public File {
 public:
  CachedFile(Vfs& vfs, std::shared_ptr<File> file);
  ~CachedFile() override;
  CachedFile(const CachedFile&) = delete;
  CachedFile& operator=(const CachedFile&) = delete;

  void let_close();
  // Opens the file if it is closed, and keeps it open. Throws Error if that fails; the state is then unchanged.
  void keep_open();
  bool is_open() const;

  void read(void* data, size_t n, uint64_t offset) override { opened()->read(data, n, offset); }
  void write(const void* data, size_t n, uint64_t offset) override { opened()->write(data, n, offset); }
  void sync() override { opened()->sync(); }
  uint64_t size() override { return opened()->size(); }
  uint32_t read_alignment() const override { return read_alignment_; }
  const std::string& path() const override { return path_; }
  bool is_at(const std::string& path) override { return opened()->is_at(path); }
  Identity identity() override { return identity_; }
  int descriptor(std::shared_ptr<File>* hold) override;

 private:
  friend struct OpenFiles;
  std::shared_ptr<File> opened(bool must_stay = false);

  Vfs& vfs_;
  const std::string path_;
  const uint32_t read_alignment_;
  const Identity identity_;
  // Guarded by the cache's mutex.
  std::shared_ptr<File> file_;  // null: closed
  bool may_close_ = false;
  std::list<CachedFile*> node_{this};  // its place in the cache's list while it is open and may be closed
  const std::list<CachedFile*>::iterator place_ = node_.begin();
};

}  // namespace bunkbed::vfs
