#include "stress/stress.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <thread>

#include <unistd.h>

#include "base/error.h"
#include "base/workers.h"
#include "jobs/index_snapshots.h"
#include "store/compactor.h"
#include "stress/device.h"
#include "stress/readers.h"
#include "stress/run_commits.h"
#include "stress/subject.h"
#include "stress/worker.h"
#include "vfs/batch_reads.h"

namespace bunkbed::stress {

namespace {

struct Kind {
  const char* name;
  Shape shape;
  size_t subjects = 1;
  bool has_readers = false;
  bool has_device = false;
};

std::vector<Kind> all_kinds() {
  const Shape fixed;
  Shape open, ram, scratch, disk, in_run;
  open.is_open = true;
  ram.on_disk = false;
  scratch.is_scratch = true;
  disk.has_limit = true;
  in_run.in_run = true;
  return {
      {"fixed", fixed},
      {"open", open},
      {"ram", ram},
      {"scratch", scratch},
      {"disk", disk},
      {.name = "reader", .shape = fixed, .has_readers = true},
      {.name = "device", .shape = fixed, .has_device = true},
      {.name = "shards", .shape = fixed, .subjects = 3},
      {.name = "run", .shape = in_run, .subjects = 2},
  };
}

// A new folder, in memory where that is possible. The destructor removes it.
class Folder {
 public:
  Folder() {
    const std::filesystem::path memory = "/dev/shm";
    const auto parent = ::access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path();
    std::string name = (parent / "bunkbed-stress-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw Error(ErrorKind::kSystem, "mkdtemp failed", errno, name);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Makes small tables compact and take index snapshots until the destructor restores the settings.
class Knobs {
 public:
  Knobs() : rows_(index_snapshot_rows), slack_(compaction_slack_bytes), threads_(num_threads()) {
    index_snapshot_rows = 1;
    compaction_slack_bytes = 4u << 10;
    set_num_threads(3);
  }
  ~Knobs() {
    index_snapshot_rows = rows_;
    compaction_slack_bytes = slack_;
    set_num_threads(threads_);
  }
  Knobs(const Knobs&) = delete;
  Knobs& operator=(const Knobs&) = delete;

 private:
  const uint64_t rows_, slack_;
  const size_t threads_;
};

constexpr size_t kEpisodes = 8;  // of a life

size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd"), end;
  return static_cast<size_t>(std::distance(all, end));
}

class Life {
 public:
  Life(const Kind& kind, const Options& options, uint64_t seed, Tally* tally);
  void episode(size_t number);
  void end();

 private:
  bool is_durable() const { return kind_.shape.on_disk && !kind_.shape.is_scratch; }
  void work(Episode* episode, size_t calls, Worker* worker);
  void run_threads(Episode* episode, bool closes);
  void alone();
  template <typename Run>
  void within_limit(const char* call, const Run& run);
  void open_all();

  const Kind kind_;
  const Options& options_;
  Rng rng_;
  Tally* const tally_;
  Folder folder_;
  std::vector<std::unique_ptr<Subject>> subjects_;
  std::vector<std::unique_ptr<Reader>> readers_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<RunCommits> run_commits_;
};

Life::Life(const Kind& kind, const Options& options, uint64_t seed, Tally* tally)
    : kind_(kind), options_(options), rng_(seed), tally_(tally) {
  static constexpr uint32_t kDims[] = {4, 64, 700};  // loops of one thread, of several, and few records a segment
  Shape shape = kind.shape;
  shape.dim = kDims[rng_.below(3)];
  shape.pairs = 100 + rng_.below(shape.dim > 100 ? 200 : 500);
  for (size_t i = 0; i < kind.subjects; ++i) {
    const std::string name = std::string(kind.name) + std::to_string(i);
    subjects_.push_back(std::make_unique<Subject>(name, folder_ / name, shape, rng_.bits()));
    subjects_.back()->create(tally);
  }
  if (shape.in_run) run_commits_ = std::make_unique<RunCommits>(subjects_);
  if (kind.has_readers) {
    for (int i = 0; i < 2; ++i) readers_.push_back(std::make_unique<Reader>(*subjects_[0], rng_.bits()));
  }
  if (kind.has_device) device_ = std::make_unique<Device>(*subjects_[0], 16 + rng_.below(shape.pairs));
}

void Life::work(Episode* episode, size_t calls, Worker* worker) {
  for (size_t i = 0; i < calls; ++i) {
    Rng& rng = worker->rng();
    bool goes_on = true;
    if (device_ != nullptr && rng.one_in(2)) {
      goes_on = device_->call(worker, episode->is_quiet);
    } else if (subjects_.size() > 1 && !episode->is_quiet && rng.one_in(4)) {
      goes_on = worker->update_as_one(subjects_);
    } else {
      goes_on = worker->call(*subjects_[rng.below(subjects_.size())]);
    }
    if (!goes_on) break;
  }
  worker->finish();
}

void Life::run_threads(Episode* episode, bool closes) {
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::unique_ptr<ReaderThread>> reading;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < episode->threads; ++i) {
    workers.push_back(std::make_unique<Worker>(*episode, i, rng_.bits()));
    threads.emplace_back([this, episode, worker = workers.back().get()] { work(episode, options_.calls, worker); });
  }
  for (const auto& reader : readers_) {
    for (int i = 0; i < 2; ++i) {  // two threads on one table
      reading.push_back(std::make_unique<ReaderThread>(*reader, rng_.bits()));
      threads.emplace_back([this, thread = reading.back().get()] { thread->run(options_.calls / 2); });
    }
  }
  if (closes) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + rng_.below(60)));
    episode->is_closing = true;
    for (const auto& subject : subjects_) subject->table->close();
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& worker : workers) tally_->add(worker->tally());
  for (const auto& thread : reading) tally_->add(thread->tally());
}

void Life::open_all() {
  for (const auto& subject : subjects_) {
    subject->close();
    subject->open(tally_);
    ++tally_->calls["open"];
  }
}

void Life::episode(size_t number) {
  Episode episode;
  episode.threads = options_.threads;
  episode.has_device = device_ != nullptr;
  episode.is_quiet = number % 4 == 2 || number % 8 == 5;
  episode.goes_back = number % 8 == 5;
  if (run_commits_ != nullptr) episode.run_commit = [this](Worker* worker) { run_commits_->commit(worker); };
  const bool closes = number % 5 == 3 && is_durable() && device_ == nullptr;
  if (device_ != nullptr) device_->attach();
  run_threads(&episode, closes);
  if (device_ != nullptr) {
    device_->verify("between episodes, above", tally_);
    device_->detach();
  }
  if (closes) {
    open_all();
    for (const auto& subject : subjects_) subject->settle(tally_);
  }
  for (const auto& subject : subjects_) subject->verify(closes ? "opened again" : "between episodes", tally_);
  alone();
  for (const auto& reader : readers_) reader->verify(tally_);
}

// Runs a call that may fail for lack of room where the files are limited; it then changed nothing.
template <typename Run>
void Life::within_limit(const char* call, const Run& run) {
  try {
    run();
    ++tally_->calls[call];
  } catch (const Error& error) {
    if (!kind_.shape.has_limit || error.error_number() != ENOSPC) throw;
    ++tally_->refused[std::string(call) + ": no room within its limit"];
  }
}

// The calls between episodes, while no other thread is at work.
void Life::alone() {
  for (const auto& subject : subjects_) {
    if (rng_.one_in(2)) {
      within_limit("set", [&] { subject->set_some(&rng_); });
      subject->verify("after set()", tally_);
    }
    if (kind_.shape.in_run || kind_.shape.is_scratch) continue;
    if (rng_.one_in(3)) {
      within_limit("commit(keep=)", [&] { subject->commit("kept " + std::to_string(rng_.below(3))); });
    }
    if (rng_.one_in(3)) subject->rewind(&rng_, tally_);
  }
  if (!is_durable()) return;
  if (run_commits_ != nullptr) {
    run_commits_->commit(nullptr);
  } else {
    for (const auto& subject : subjects_) subject->commit("");
  }
  for (const auto& subject : subjects_) subject->check_files(tally_);
  if (!rng_.one_in(3)) return;
  open_all();
  for (const auto& subject : subjects_) subject->verify("closed and opened", tally_);
}

void Life::end() {
  readers_.clear();
  device_.reset();
  if (is_durable()) {
    if (run_commits_ != nullptr) {
      run_commits_->commit(nullptr);
    } else {
      for (const auto& subject : subjects_) subject->commit("");
    }
    open_all();
    for (const auto& subject : subjects_) {
      subject->verify("at the end", tally_);
      subject->check_files(tally_);
    }
  }
  for (const auto& subject : subjects_) subject->close();
}

}  // namespace

std::vector<std::string> kinds() {
  std::vector<std::string> names;
  for (const Kind& kind : all_kinds()) names.emplace_back(kind.name);
  return names;
}

Outcome run(const Options& options) {
  const std::vector<Kind> all = all_kinds();
  const auto kind = std::find_if(all.begin(), all.end(), [&](const Kind& one) { return options.kind == one.name; });
  if (kind == all.end()) throw Error(ErrorKind::kInvalid, "there is no kind '" + options.kind + "'");
  const Knobs knobs;
  Outcome outcome;
  const vfs::IoCounts before = vfs::io_counts();
  const auto start = std::chrono::steady_clock::now();
  const auto is_over = [&] {
    if (options.stops_at_wrong && outcome.tally.num_wrong > 0) return true;
    if (options.episodes > 0) return outcome.episodes >= options.episodes;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() >= options.seconds;
  };
  const auto live = [&] {
    Life life(*kind, options, options.seed + outcome.lives * 0x9e3779b97f4a7c15u, &outcome.tally);
    ++outcome.lives;
    for (size_t i = 0; i < kEpisodes && !is_over(); ++i) {
      life.episode(i);
      ++outcome.episodes;
    }
    if (!options.stops_at_wrong || outcome.tally.num_wrong == 0) life.end();
  };
  try {
    const size_t before_all = open_descriptors();
    while (!is_over()) {
      live();
      if (const size_t left = open_descriptors(); left > before_all) {
        outcome.tally.fail(std::to_string(left - before_all) + " descriptors are left open by tables that are closed");
      }
    }
  } catch (const std::exception& error) {
    outcome.tally.fail(std::string("ended by: ") + error.what());
  }
  const vfs::IoCounts after = vfs::io_counts();
  outcome.uring_reads = after.uring - before.uring;
  outcome.thread_reads = after.threads - before.threads;
  return outcome;
}

}  // namespace bunkbed::stress
