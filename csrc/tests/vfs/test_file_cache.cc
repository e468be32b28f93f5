// Files that are closed while they are not used (vfs/file_cache.h).
#include <atomic>
#include <cstring>
#include <thread>

#include "tests/check.h"
#include "tests/descriptors.h"
#include "tests/sample.h"
#include "tests/sandbox.h"
#include "vfs/batch_reads.h"
#include "vfs/file_cache.h"

using namespace bunkbed;
using namespace bunkbed::test;
using vfs::CachedFile;
using vfs::kBlockBytes;

namespace {

constexpr size_t kFiles = 100;
constexpr size_t kMost = 20;  // that are open at once

// Files of one block of their number.
struct Files {
  Files() {
    vfs::Buffer block(kBlockBytes);
    for (size_t i = 0; i < kFiles; ++i) {
      auto file = std::make_shared<CachedFile>(vfs::posix(), vfs::posix().create(path(i)));
      std::memset(block.data(), static_cast<int>(i), kBlockBytes);
      file->write(block.data(), kBlockBytes, 0);
      file->sync();
      file->let_close();
      all.push_back(std::move(file));
    }
  }
  std::string path(size_t i) const { return sandbox / std::to_string(i); }
  size_t num_open() const {
    size_t open = 0;
    for (const auto& file : all) open += file->is_open();
    return open;
  }
  Sandbox sandbox;
  std::vector<std::shared_ptr<CachedFile>> all;
};

void check_reads(CachedFile* file, size_t number) {
  vfs::Buffer block(kBlockBytes);
  file->read(block.data(), kBlockBytes, 0);
  for (size_t i = 0; i < kBlockBytes; ++i) CHECK_EQ(static_cast<int>(block.data()[i]), static_cast<int>(number));
}

}  // namespace

TEST(cached_files_are_open_while_used_and_few_at_once) {
  const FewDescriptors few(kMost);
  Files files;
  CHECK_EQ(files.num_open(), kMost);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      Sampler sampler(seed);
      try {
        for (int i = 0; i < 500; ++i) {
          const size_t number = sampler.bits() % kFiles;
          check_reads(files.all[number].get(), number);
        }
      } catch (const std::exception&) {
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(failures.load(), 0);
  CHECK_EQ(files.num_open(), kMost);
  // The most recently used files are open.
  for (size_t i = 0; i < kMost; ++i) check_reads(files.all[3 * i].get(), 3 * i);
  for (size_t i = 0; i < kMost; ++i) CHECK(files.all[3 * i]->is_open());
}

TEST(cached_files_that_may_not_close_stay_open) {
  const FewDescriptors few(kMost);
  Sandbox sandbox;
  std::vector<std::unique_ptr<CachedFile>> open;
  for (size_t i = 0; i < kMost + 5; ++i) {
    open.push_back(
        std::make_unique<CachedFile>(vfs::posix(), vfs::posix().create(sandbox / ("open" + std::to_string(i)))));
  }
  Files files;
  for (size_t i = 0; i < kFiles; ++i) check_reads(files.all[i].get(), i);
  CHECK(files.num_open() < kMost);
  for (const auto& file : open) CHECK(file->is_open());
}

TEST(cached_files_kept_open_can_be_read_when_their_name_is_gone) {
  const FewDescriptors few(kMost);
  Files files;
  CHECK(!files.all[0]->is_open());
  files.all[0]->keep_open();
  vfs::posix().remove(files.path(0));
  for (size_t i = 1; i < kFiles; ++i) check_reads(files.all[i].get(), i);
  CHECK(files.all[0]->is_open());
  check_reads(files.all[0].get(), 0);
}

TEST(cached_files_refuse_another_file_in_their_place) {
  const FewDescriptors few(kMost);
  Files files;
  CHECK(!files.all[0]->is_open());
  vfs::posix().remove(files.path(0));
  CHECK_THROWS(check_reads(files.all[0].get(), 0), ErrorKind::kNotFound, files.path(0));
  vfs::posix().link(files.path(1), files.path(0));
  CHECK_THROWS(check_reads(files.all[0].get(), 0), ErrorKind::kCorruption, "was replaced by another one");
  CHECK_THROWS(files.all[0]->keep_open(), ErrorKind::kCorruption, files.path(0));
  CHECK(!files.all[0]->is_open());
  check_reads(files.all[1].get(), 1);
}

// Concurrent reads of more files than may be open, by both kinds of I/O.
TEST(cached_files_are_held_by_reads_in_flight) {
  const FewDescriptors few(kMost);
  Files files;
  class Source final : public vfs::ReadSource {
   public:
    explicit Source(Files* files) : files_(files) {}
    bool next(vfs::ReadOp* op) noexcept override {
      const uint64_t index = next_.fetch_add(1);
      if (index >= 20 * kFiles) return false;
      *op = {files_->all[index % kFiles].get(), 0, kBlockBytes, index};
      return true;
    }
    void done(const vfs::ReadOp& op, const std::byte* data, std::exception_ptr error) noexcept override {
      if (error || static_cast<size_t>(data[op.bytes - 1]) != op.tag % kFiles) ++wrong;
      ++read;
    }
    std::atomic<size_t> wrong{0}, read{0};

   private:
    Files* files_;
    std::atomic<uint64_t> next_{0};
  };
  for (const char* io : {"threads", "auto"}) {
    vfs::set_io(io);
    vfs::ReadLane lane;
    lane.resize(kBlockBytes, 32);
    Source source(&files);
    vfs::read_all(source, 20 * kFiles, 20 * kFiles * kBlockBytes, lane, nullptr);
    CHECK_EQ(source.read.load(), 20 * kFiles);
    CHECK_EQ(source.wrong.load(), size_t{0});
    CHECK_EQ(files.num_open(), kMost);
  }
}
