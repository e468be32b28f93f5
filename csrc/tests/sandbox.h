// Directories for the files of tests, and a file system that makes no syncs.
#pragma once

#include <cerrno>
#include <filesystem>
#include <string>

#include <unistd.h>

#include "base/error.h"
#include "tests/check.h"
#include "vfs/fault.h"

namespace bunkbed::test {

// A directory of one test, removed at the end.
class Sandbox {
 public:
  Sandbox() {
    // In RAM if possible: the tests write much and do not need a disk.
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

using vfs::Op;

// Counts syncs and does not make them: these tests end processes at most and do not cut power.
class FaultVfs : public vfs::FaultVfs {
 public:
  FaultVfs() { skip_syncs(true); }
};

}  // namespace bunkbed::test
