// Read-only files in memory, from which the fuzz targets open tables.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "vfs/vfs.h"

namespace bunkbed::fuzz {

class MemoryVfs final : public vfs::Vfs {
 public:
  std::map<std::string, std::vector<std::byte>> files;  // by path

  std::shared_ptr<vfs::File> open(const std::string& path, bool) override {
    const auto found = files.find(path);
    if (found == files.end()) throw Error(ErrorKind::kNotFound, "no such file: " + path);
    return std::make_shared<MemoryFile>(path, found->second);
  }
  std::vector<std::string> list(const std::string& path) override {
    std::vector<std::string> names;
    for (const auto& [name, bytes] : files) {
      if (name.compare(0, path.size() + 1, path + "/") == 0) names.push_back(name.substr(path.size() + 1));
    }
    if (names.empty()) throw Error(ErrorKind::kNotFound, "no such directory: " + path);
    return names;
  }
  bool exists(const std::string& path) override { return files.contains(path); }

  std::shared_ptr<vfs::File> create(const std::string& path) override { refuse(path); }
  std::shared_ptr<vfs::File> create_small(const std::string& path) override { refuse(path); }
  void link(const std::string&, const std::string& to) override { refuse(to); }
  void remove(const std::string& path) override { refuse(path); }
  void truncate(const std::string& path, uint64_t) override { refuse(path); }
  void sync_directory(const std::string& path) override { refuse(path); }
  void make_directories(const std::string& path) override { refuse(path); }
  std::unique_ptr<vfs::Lock> lock(const std::string& path) override { refuse(path); }

 private:
  class MemoryFile final : public vfs::File {
   public:
    MemoryFile(std::string path, const std::vector<std::byte>& bytes) : path_(std::move(path)), bytes_(bytes) {}
    void read(void* data, size_t n, uint64_t offset) override {
      if (offset > bytes_.size() || n > bytes_.size() - offset) {
        throw Error(ErrorKind::kCorruption, "file " + path_ + " ends too early");
      }
      std::memcpy(data, bytes_.data() + offset, n);
    }
    void write(const void*, size_t, uint64_t) override { refuse(path_); }
    void sync() override { refuse(path_); }
    uint64_t size() override { return bytes_.size(); }
    uint32_t read_alignment() const override { return 1; }
    const std::string& path() const override { return path_; }

   private:
    const std::string path_;
    const std::vector<std::byte>& bytes_;
  };

  [[noreturn]] static void refuse(const std::string& path) {
    throw Error(ErrorKind::kReadOnly, path + " cannot be written here");
  }
};

}  // namespace bunkbed::fuzz
