// Seeded bugs, always compiled in. With one switched on, a test shows that it would find such a bug
// (docs/design/engine.md, rule 20).
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace bunkbed {

inline std::atomic<const char*>& fault_slot() {
  static std::atomic<const char*> name{nullptr};
  return name;
}

// True when the named bug is switched on; one relaxed load when none is.
inline bool fault_is(const char* name) {
  const char* active = fault_slot().load(std::memory_order_relaxed);
  return active != nullptr && std::strcmp(active, name) == 0;
}

// Switches the named bug on; nullptr switches all off. Returns false for an unknown name.
inline bool set_fault(const char* name) {
  static constexpr const char* kKnown[] = {
      // Values.
      "lost_write_back",
      "stale_read",
      "double_update",
      "lost_tombstone",          // a delete is not written to the log
      "admission_without_step",  // a row that one step refused is refused by all
      "admission_by_place",      // whether a row is admitted depends on its place in the batch
      "lost_count",              // the count of an id is not written to the log
      "count_survives_delete",   // a deleted id goes on from its count
      "counts_not_rewound",      // going back in RAM leaves no id a count
      "old_counts_stay",         // a sweep takes no count
      // Threads; csrc/stress must find these.
      "scan_misses_change",   // a scan goes on although the table was changed
      "lookup_without_lock",  // a large lookup releases the lock between its pieces
      "descriptor_leak",      // a file that is no longer used is not closed
      // Commits and compaction.
      "collect_before_commit",          // files that the new commit does not name are removed before it is durable
      "length_too_long",                // the manifest names a block more than was written
      "move_dead_records",              // compaction does not check whether a record is its row's newest
      "move_outranks",                  // compaction moves dead records too and gives them new versions
      "update_before_copy",             // a record that a commit has not written yet is changed first
      "evict_into_old_epoch",           // a row changed and evicted during a commit is written to that commit's epoch
      "index_snapshot_too_new",         // an index snapshot claims one epoch more than it holds
      "counts_not_moved",               // compaction drops the counts of a segment
      "counts_outrank",                 // compaction moves counts that are dead, too, and gives all new versions
      "index_snapshot_without_counts",  // an index snapshot leaves out counts
      "purge_too_early",                // tombstones are dropped while records of their rows are in the log
      "stale_usage",                    // a step does not note in its rows that it named them
      "expires_early",                  // a sweep takes rows that expire with the next unit of the clock
      "replay_last_record",             // replay takes the last record of a row, whatever its version
  };
  if (name == nullptr) {
    fault_slot().store(nullptr);
    return true;
  }
  for (const char* known : kKnown) {
    if (std::strcmp(known, name) != 0) continue;
    fault_slot().store(known);
    return true;
  }
  return false;
}

}  // namespace bunkbed
