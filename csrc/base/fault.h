// Seeded bugs, always compiled in, so that the tests can show that they would find them (docs/design/engine.md,
// rule 20).
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

// nullptr switches all off. False when unknown.
inline bool set_fault(const char* name) {
  static constexpr const char* kKnown[] = {
      // Of values.
      "lost_write_back", "stale_read", "double_update",
      // Of threads; csrc/stress must find them.
      "scan_misses_change",   // a scan goes on although the table was changed
      "lookup_without_lock",  // a large lookup gives the lock up between its pieces
      "descriptor_leak",      // a file that is done with is not closed
      // Of commits and compaction.
      "collect_before_commit",  // what the new commit does not name goes before it is durable
      "length_too_long",        // the manifest names a block more than was written
      "move_dead_records",      // compaction does not ask whether a record is still its row's newest
      "move_outranks",          // compaction moves dead records too and gives them new versions
      "update_before_copy",     // a record that a commit has yet to write is changed first
      "evict_into_old_epoch",   // what was changed since a commit began and evicted counts into it
      "checkpoint_too_new",     // a directory checkpoint is said to hold an epoch more than it does
      "replay_last_record",     // of a row's records the last one counts, whatever its version
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
