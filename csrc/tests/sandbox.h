// Where tests put their files, and a filesystem that fails for them.
#pragma once

#include <cerrno>
#include <filesystem>
#include <string>

#include <unistd.h>

#include "base/error.h"
#include "tests/check.h"
#include "vfs/fault.h"

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

using vfs::Op;

// Syncs are counted and not carried out: the tests here end processes at most, never the power.
class FaultVfs : public vfs::FaultVfs {
 public:
  FaultVfs() { skip_syncs(true); }
};

}  // namespace bunkbed::test
