#include "commit/snapshots.h"

#include <memory>

#include "base/error.h"
#include "commit/manifests.h"

namespace bunkbed {

namespace {

std::unique_ptr<vfs::Lock> writers_lock(vfs::Vfs& vfs, const std::string& path) {
  try {
    return vfs.lock(path + "/" + kLockName);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kLocked) throw;
    throw Error(ErrorKind::kLocked,
                "table " + path + " is being written by " + error.what() + "; close it there, or call its drop(name)");
  }
}

void require_known(const Manifest& manifest, const std::string& path) {
  if ((manifest.writer_flags & ~kKnownWriterFlags) == 0) return;
  throw Error(ErrorKind::kReadOnly, "table " + path + " uses features this release cannot write; nothing was changed");
}

}  // namespace

std::vector<Manifest> readable_commits(vfs::Vfs& vfs, const std::string& path) {
  const Manifests manifests(vfs, path);
  std::vector<Manifest> found;
  for (const uint64_t epoch : manifests.epochs()) {
    try {
      found.push_back(manifests.load(epoch));
    } catch (const Error& error) {
      // check() reports damage; a missing manifest was collected meanwhile
      if (error.kind() != ErrorKind::kCorruption && error.kind() != ErrorKind::kNotFound) throw;
    }
  }
  return found;
}

void drop_snapshot(vfs::Vfs& vfs, const std::string& path, const std::string& name) {
  const Manifests manifests(vfs, path);
  if ((manifests.load_newest().writer_flags & kWriterFlagRun) != 0) {
    throw Error(ErrorKind::kReadOnly,
                "table " + path + " belongs to a run, which keeps its snapshots; give the run's folder");
  }
  (void)manifests.load_snapshot(name);
  const auto lock = writers_lock(vfs, path);
  const Manifest newest = manifests.load_newest();
  require_known(newest, path);
  if (newest.keep == name) {
    Manifest same = newest;
    same.epoch = newest.epoch + 1;
    same.parent_epoch = newest.epoch;
    same.keep.clear();
    same.writer_flags &= ~kWriterFlagCopy;
    manifests.write(same);
  }
  std::vector<uint64_t> dropped;
  for (const Manifest& manifest : readable_commits(vfs, path)) {
    if (manifest.keep == name) dropped.push_back(manifest.epoch);
  }
  manifests.remove(dropped);
  manifests.collect({});
  lock->unlock();
}

void collect_commits(vfs::Vfs& vfs, const std::string& path, const std::set<uint64_t>& pinned) {
  const auto lock = writers_lock(vfs, path);
  const Manifests manifests(vfs, path);
  require_known(manifests.load_newest(), path);
  manifests.collect({.pinned = pinned});
  lock->unlock();
}

}  // namespace bunkbed
