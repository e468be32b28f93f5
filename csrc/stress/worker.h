// The random calls of one thread on a table, each checked against the bounds.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "stress/oracle.h"
#include "stress/subject.h"

namespace bunkbed::stress {

class Worker;

// Shared by the threads of an episode.
struct Episode {
  size_t threads = 1;
  bool has_device = false;                  // a device cache may hold rows that a call wants
  bool is_quiet = false;                    // nothing changes: scans must finish
  bool goes_back = false;                   // quiet, and one thread rewinds to commits with the same values
  std::atomic<bool> is_closing{false};      // tables are closed meanwhile
  std::atomic<int64_t> step{0};             // of tables that are updated as one
  std::function<void(Worker*)> run_commit;  // of tables that are committed as one
};

class Worker {
 public:
  Worker(Episode& episode, size_t index, uint64_t seed) : episode_(episode), index_(index), rng_(seed) {}
  // Makes a random call; false once the table is closed.
  bool call(Subject& subject);
  // Updates each of the tables, with one step number.
  bool update_as_one(const std::vector<std::unique_ptr<Subject>>& subjects);
  // Before the thread ends: waits for pending commits and forgets the batches of the window.
  void finish();
  Tally& tally() { return tally_; }
  Rng& rng() { return rng_; }

  // Runs a call and counts it. False where it failed; the failure is wrong unless allowed() gives a reason for it.
  template <typename Run>
  bool attempt(const Subject& subject, const std::string& name, const Run& run) {
    try {
      run();
      ++tally_.calls[name];
      return true;
    } catch (const Error& error) {
      if (const std::string reason = allowed(subject, name, error); !reason.empty()) {
        ++tally_.refused[name + ": " + reason];
      } else {
        tally_.fail(name + ": " + error.what());
      }
    } catch (const std::exception& error) {
      tally_.fail(name + ": " + error.what());
    }
    return false;
  }

 private:
  std::string allowed(const Subject& subject, const std::string& call, const Error& error);
  size_t some_count(const Subject& subject);
  std::vector<size_t> rows_to_read(const Subject& subject, size_t n);
  // (row, how often), both rows of each pair.
  std::map<size_t, int32_t> rows_to_change(const Subject& subject, size_t n);
  std::vector<size_t> own_rows(const Subject& subject);
  template <typename Run>
  void change(Subject& subject, const std::string& name, const std::map<size_t, int32_t>& amounts, const Run& run);

  void lookup(Subject& s);
  void lookup_batch(Subject& s);
  void lookup_bags(Subject& s);
  void update(Subject& s, std::optional<int64_t> step = std::nullopt);
  void update_batch(Subject& s);
  void stage(Subject& s);
  void window(Subject& s);
  void get(Subject& s);
  void gather_records(Subject& s);
  void contains(Subject& s);
  void set(Subject& s);
  void write_records(Subject& s);
  void scan(Subject& s);
  void commit(Subject& s);
  void begin_commit(Subject& s);
  void keep_and_drop(Subject& s);
  void go_back(Subject& s);
  void facts(Subject& s);
  void maintain(Subject& s);
  void harmless(Subject& s);  // a call that must not end a scan

  Episode& episode_;
  const size_t index_;
  Rng rng_;
  Tally tally_;
  bool is_over_ = false;
  struct StartedCommit {
    Subject* subject;
    std::shared_ptr<PendingCommit> commit;
    std::vector<int32_t> counts;
  };
  void wait_for(StartedCommit* entry);
  std::vector<StartedCommit> started_;
  std::vector<std::pair<Subject*, uint32_t>> expected_;  // batches of the window
};

}  // namespace bunkbed::stress
