#include "probe/probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "base/error.h"
#include "base/memory.h"
#include "base/mutex.h"
#include "base/workers.h"
#include "kernels/kernels.h"

namespace bunkbed {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Runs `work(thread)` on new threads (a pool would add its scheduling to the measurement) and rethrows the first
// exception.
void on_threads(size_t num_threads, const std::function<void(size_t)>& work) {
  std::vector<std::thread> threads;
  Mutex mutex{LockLevel::kLocal};
  std::exception_ptr error;
  for (size_t i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] {
      try {
        work(i);
      } catch (...) {
        const MutexLock guard(mutex);
        if (error == nullptr) error = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (error != nullptr) std::rethrow_exception(error);
}

// The records of a block, and how many bytes of each are used.
struct RowBlock {
  const int64_t* rows;
  size_t n;
  size_t known;  // rows that can be prefetched, counted from the first
  size_t record_bytes;
  size_t used_bytes;
};

// The simplest loop: prefetches a record far enough ahead and works on the current one.
void work_on_rows(const RowBlock& block, RowWork work, std::byte* records, std::byte* copies) {
  const size_t bytes = block.used_bytes;
  const auto num_floats = static_cast<int64_t>(bytes / sizeof(float));
  const size_t ahead_bytes = work == RowWork::kChange ? 24576 : 12288;  // as the kernels of a step do
  const size_t ahead = std::clamp<size_t>(ahead_bytes / bytes, 4, 64);
  const auto place_of = [&](size_t i) { return records + static_cast<size_t>(block.rows[i]) * block.record_bytes; };
  const auto add_row = kernels().add_row;
  std::vector<float> other(bytes / sizeof(float));
  for (size_t i = 0; i < block.n; ++i) {
    if (i + ahead < block.known) {
      const std::byte* const coming = place_of(i + ahead);
      for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(coming + at, 0, 2);
    }
    std::byte* const record = place_of(i);
    if (work == RowWork::kRead) {
      add_row(num_floats, reinterpret_cast<const float*>(record), other.data());
    } else if (work == RowWork::kCopy) {
      std::memcpy(copies + i * bytes, record, bytes);
    } else {
      add_row(num_floats, other.data(), reinterpret_cast<float*>(record));
    }
  }
}

}  // namespace

RowProbe::RowProbe(size_t num_records, size_t record_bytes)
    : num_records_(num_records), record_bytes_(record_bytes), records_(num_records * record_bytes) {
  if (!records_.empty()) std::memset(records_.data(), 0, records_.size());
}

double RowProbe::run(const int64_t* rows, size_t n, size_t used_bytes, RowWork work) {
  constexpr size_t kBlock = 256;  // records a thread claims at once
  for (size_t i = 0; i < n; ++i) {
    if (rows[i] >= 0 && static_cast<uint64_t>(rows[i]) < num_records_) continue;
    throw Error(ErrorKind::kIndex, "no record " + std::to_string(rows[i]) + " among " + std::to_string(num_records_));
  }
  if (used_bytes == 0 || used_bytes % sizeof(float) != 0 || used_bytes > record_bytes_) {
    throw Error(ErrorKind::kInvalid, "the bytes used of a record must be a multiple of 4 and at most " +
                                         std::to_string(record_bytes_) + ", got " + std::to_string(used_bytes));
  }
  if (work == RowWork::kCopy && copies_.size() < n * used_bytes) {
    copies_.resize(n * used_bytes);
    std::memset(copies_.data(), 0, copies_.size());  // touches the pages before the clock starts
  }
  const auto start = Clock::now();
  parallel_for(n, kBlock, [&](size_t from, size_t to) {
    const RowBlock block{rows + from, to - from, n - from, record_bytes_, used_bytes};
    work_on_rows(block, work, records_.data(), work == RowWork::kCopy ? copies_.data() + from * used_bytes : nullptr);
  });
  return seconds_since(start);
}

double probe_memory(size_t threads, size_t bytes, double seconds) {
  const size_t part = std::max<size_t>(bytes / threads / 2, 1u << 20);
  std::vector<vfs::Buffer> memory(2 * threads);
  on_threads(threads, [&](size_t i) {  // touched by the thread that uses it, for machines with several NUMA nodes
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
    // Neither zeros nor equal blocks: some devices do not really store such blocks.
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
                                        double seconds, size_t block_bytes) {
  std::vector<std::shared_ptr<vfs::File>> files;
  std::vector<uint64_t> ends;  // running sum of blocks: picks a file in proportion to its size
  uint32_t unit = 4096;
  for (const std::string& path : paths) {
    files.push_back(vfs.open(path, true));
    unit = std::min(unit, files.back()->read_alignment());
    ends.push_back((ends.empty() ? 0 : ends.back()) + files.back()->size() / block_bytes);
  }
  if (ends.empty() || ends.back() == 0) throw Error(ErrorKind::kInvalid, "these files hold no whole block to read");
  std::atomic<uint64_t> reads{0};
  const auto start = Clock::now();
  const auto deadline = after(seconds);
  on_threads(threads, [&](size_t i) {
    const vfs::Buffer block(block_bytes);
    uint64_t state = 0x9E3779B97F4A7C15u * (i + 1);
    uint64_t mine = 0;
    while (Clock::now() < deadline) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      const uint64_t at = state % ends.back();
      const size_t k = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), at) - ends.begin());
      files[k]->read(block.data(), block_bytes, (at - (k == 0 ? 0 : ends[k - 1])) * block_bytes);
      ++mine;
    }
    reads += mine;
  });
  return {static_cast<double>(reads) / seconds_since(start), unit};
}

}  // namespace bunkbed
