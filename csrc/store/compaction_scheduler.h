// Decides when and how much to compact. Each appended record adds to a debt: the number of records that compaction must
// examine. compact_some() pays the debt within a step, or a background job pays it in slices. A tombstone or a count
// adds as much, but no call waits until that is paid, because the log hardly grows by it. Requires the table's lock for
// every call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "log/log.h"
#include "store/compactor.h"
#include "store/memory_plan.h"

namespace bunkbed {

class CompactionScheduler {
 public:
  // All arguments outlive the scheduler. `log` is null for a table in RAM only; then nothing is compacted.
  CompactionScheduler(Log* log, Compactor* compactor, const MemoryPlan* plan)
      : log_(log), compactor_(compactor), plan_(plan) {}
  CompactionScheduler(const CompactionScheduler&) = delete;
  CompactionScheduler& operator=(const CompactionScheduler&) = delete;

  // Compacts in proportion to the records appended since the last call, and a slice of what a background job left. Does
  // nothing while a background job compacts.
  void compact_some();
  // Compacts everything that is worth it. Returns the number of moved records.
  uint64_t compact_all();
  // For opening: merges segments while there are too many. The merge that follows a commit becomes durable with the
  // next commit and is lost when the table closes before. Without this call, a table that is opened for each commit
  // would gain one segment each time.
  void merge_segments();
  // Drops the debt: compaction moves no record until a record is appended. A scan depends on this.
  void forgive();

  // The records that a commit appends to its epoch become debt at count_commit_debt(), when the commit is over. So the
  // background job pays for them, and not compact_some() within a step.
  void add_commit_debt(uint64_t records);
  void count_commit_debt();

  // ---- A background job: begin(), then plan() and take() until plan() returns false, then end(). Compactor::execute()
  // runs between plan() and take(), without the table's lock.

  // Returns false when there is nothing to do or another job compacts.
  bool begin();
  bool plan(Compactor::Read* read);
  void take(Compactor::Read read);
  void end() { is_running_ = false; }
  // Whether appends are several segments ahead of compaction.
  bool is_behind();

 private:
  void count_debt();
  void see_appends();
  uint64_t urgent_debt() const { return debt_ - std::min(debt_, patient_debt_); }

  Log* const log_;
  Compactor* const compactor_;
  const MemoryPlan* const plan_;
  uint64_t appended_seen_ = 0;  // appended records, tombstones and counts that the debt includes
  uint64_t others_seen_ = 0;    // tombstones and counts of these
  uint64_t debt_ = 0;           // records to examine
  uint64_t patient_debt_ = 0;   // of these, the last ones, for tombstones and counts; may be more than debt_
  uint64_t commit_debt_ = 0;    // the same, for records that the commit under way appended
  bool is_running_ = false;     // whether a background job runs
};

}  // namespace bunkbed
