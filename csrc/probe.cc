#include "probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "error.h"
#include "memory.h"

namespace bunkbed {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Runs `work(thread)` on threads of its own (the pools would measure their scheduling too) and rethrows the first
// exception.
void on_threads(size_t num_threads, const std::function<void(size_t)>& work) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr error;
  for (size_t i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] {
      try {
        work(i);
      } catch (...) {
        const std::lock_guard guard(mutex);
        if (error == nullptr) error = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace

double probe_memory(size_t threads, size_t bytes, double seconds) {
  const size_t part = std::max<size_t>(bytes / threads / 2, 1u << 20);
  std::vector<vfs::Buffer> memory(2 * threads);
  on_threads(threads, [&](size_t i) {  // touched by the thread that uses it, for machines with several memories
    for (size_t k : {2 * i, 2 * i + 1}) {
      memory[k] = vfs::Buffer(part);
      std::memset(memory[k].data(), static_cast<int>(k), part);
    }
  });
  std::atomic<size_t> copied{0};
  const auto start = Clock::now();
  const auto deadline = after(seconds);
  on_threads(threads, [&](size_t i) {
    size_t mine = 0;
    do {
      std::memcpy(memory[2 * i].data(), memory[2 * i + 1].data(), part);
      mine += part;
    } while (Clock::now() < deadline);
    copied += mine;
  });
  return 2.0 * static_cast<double>(copied) / seconds_since(start);
}

std::pair<double, size_t> probe_writes(vfs::Vfs& vfs, const std::string& path, size_t max_bytes, double seconds) {
  constexpr size_t kBlock = size_t{1} << 20;  // as the log writes
  constexpr size_t kThreads = 4;
  const size_t num_blocks = std::max<size_t>(1, max_bytes / kBlock);
  const auto file = vfs.create(path);
  std::atomic<size_t> next{0};
  std::atomic<size_t> done{0};
  const auto start = Clock::now();
  const auto deadline = after(seconds);
  on_threads(kThreads, [&](size_t i) {
    const vfs::Buffer block(kBlock);
    // Not zeros, not alike: some devices store such blocks for nothing.
    uint64_t state = 0x9E3779B97F4A7C15u * (i + 1);
    while (Clock::now() < deadline) {
      const size_t at = next++;
      if (at >= num_blocks) return;
      for (size_t word = 0; word < kBlock; word += 512) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        std::memcpy(block.data() + word, &state, sizeof(state));
      }
      file->write(block.data(), kBlock, at * kBlock);
      ++done;
    }
  });
  file->sync();
  const size_t written = done * kBlock;
  return {static_cast<double>(written) / seconds_since(start), written};
}

std::pair<double, uint32_t> probe_reads(vfs::Vfs& vfs, const std::vector<std::string>& paths, size_t threads,
                                        double seconds) {
  constexpr size_t kBlock = 4096;
  std::vector<std::shared_ptr<vfs::File>> files;
  std::vector<uint64_t> ends;  // running sum of blocks: picks a file in proportion to its size
  uint32_t unit = 4096;
  for (const std::string& path : paths) {
    files.push_back(vfs.open(path, true));
    unit = std::min(unit, files.back()->read_alignment());
    ends.push_back((ends.empty() ? 0 : ends.back()) + files.back()->size() / kBlock);
  }
  if (ends.empty() || ends.back() == 0) throw Error(ErrorKind::kInvalid, "these files hold no whole block to read");
  std::atomic<uint64_t> reads{0};
  const auto start = Clock::now();
  const auto deadline = after(seconds);
  on_threads(threads, [&](size_t i) {
    const vfs::Buffer block(kBlock);
    uint64_t state = 0x9E3779B97F4A7C15u * (i + 1);
    uint64_t mine = 0;
    while (Clock::now() < deadline) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      const uint64_t at = state % ends.back();
      const size_t k = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), at) - ends.begin());
      files[k]->read(block.data(), kBlock, (at - (k == 0 ? 0 : ends[k - 1])) * kBlock);
      ++mine;
    }
    reads += mine;
  });
  return {static_cast<double>(reads) / seconds_since(start), unit};
}

}  // namespace bunkbed
