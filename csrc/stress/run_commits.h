// Commits several tables as one, as a run does: starts a commit of each, waits for all, then records all epochs (in
// memory, instead of a run's manifest). Each table then gets its recorded epochs and collects its other commits.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "stress/subject.h"
#include "stress/worker.h"

namespace bunkbed::stress {

class RunCommits {
 public:
  explicit RunCommits(const std::vector<std::unique_ptr<Subject>>& subjects) : subjects_(subjects) { commit(nullptr); }

  // Runs one at a time. With a null worker, no other thread may be at work, and an error ends the life.
  void commit(Worker* worker) {
    const std::lock_guard guard(mutex_);
    const auto make = [this] {
      std::vector<std::vector<int32_t>> counts;
      std::vector<std::shared_ptr<PendingCommit>> pending;
      for (const auto& subject : subjects_) {
        counts.push_back(subject->bounds.lows());
        pending.push_back(subject->table->begin_commit(std::nullopt, ""));
      }
      std::vector<uint64_t> epochs;
      for (const auto& one : pending) epochs.push_back(one->wait());
      named_.push_back(epochs);
      if (named_.size() > 2) named_.pop_front();
      for (size_t i = 0; i < subjects_.size(); ++i) {
        Subject& subject = *subjects_[i];
        subject.pinned_epoch = epochs[i];
        for (size_t row = 0; row < subject.rows(); ++row) subject.floor.raise_low(row, counts[i][row]);
      }
      for (size_t i = 0; i < subjects_.size(); ++i) {
        std::set<uint64_t> pinned;
        for (const auto& one : named_) pinned.insert(one[i]);
        subjects_[i]->table->set_pinned_epochs(pinned, {});
        subjects_[i]->table->collect();
      }
    };
    if (worker == nullptr) {
      make();
    } else {
      worker->attempt(*subjects_[0], "commit of a run", make);
    }
  }

 private:
  const std::vector<std::unique_ptr<Subject>>& subjects_;
  std::mutex mutex_;  // guards the members below
  std::deque<std::vector<uint64_t>> named_;
};

}  // namespace bunkbed::stress
