// The limit of the bytes of a table's files (`disk=`): what the files take, what dirty rows will take when they are
// written, and whether a change fits. disk_budget.cc states the rule and why it is enough. Requires the table's lock
// for every call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>

#include "cache/cache.h"
#include "commit/manifests.h"
#include "directory/directory.h"
#include "log/log.h"
#include "store/compactor.h"
#include "store/memory_plan.h"

namespace bunkbed {

// Rows whose newest record is not in the log. Frozen rows belong to the commit under way.
struct UnwrittenRows {
  size_t dirty = 0;
  size_t frozen = 0;
  size_t counts = 0;  // ids whose count the log may lack
  size_t total() const { return dirty + frozen; }
};

class DiskBudget {
 public:
  // All arguments outlive the budget. `log` is null for a table in RAM only, which has no limit.
  DiskBudget(Log* log, const Directory* directory, const Cache* cache, Compactor* compactor, const MemoryPlan* plan,
             const UnwrittenRows* unwritten)
      : log_(log), directory_(directory), cache_(cache), compactor_(compactor), plan_(plan), unwritten_(unwritten) {}
  DiskBudget(const DiskBudget&) = delete;
  DiskBudget& operator=(const DiskBudget&) = delete;

  // `bytes`: 0 for no limit. `commits`: the most commits without a name at once. `num_rows`: the most rows of the
  // table.
  void set_limit(uint64_t bytes, size_t commits, uint64_t num_rows);
  uint64_t limit() const { return limit_; }
  bool is_limited() const { return limit_ != 0; }

  // ---- The bytes that the files take
  uint64_t used_bytes() const;
  // The part that only kept commits name.
  uint64_t snapshot_bytes() const;
  // Segments that no kept commit names, open chunks, and the bytes that dirty rows will take.
  uint64_t log_bytes() const;
  // Sets the files that durable commits name. Dead segments leave the log; files that `held` names stay.
  void set_held(Manifests::Held held);
  // Index snapshots that no commit names yet.
  void set_index_snapshot_bytes(uint64_t bytes) { index_snapshot_bytes_ = bytes; }
  // The bytes of `meta` that the slack has no room for.
  void set_meta_bytes(uint64_t bytes) { meta_bytes_ = bytes; }
  // Rows that a device cache may write back at any time.
  void reserve_held(size_t rows) { held_rows_ = rows; }

  // ---- Whether a change fits. The rows of the last has_room_for*() count as admitted until forget_admitted().
  bool has_bytes(uint64_t bytes) const { return !is_limited() || used_bytes() + bytes + reserved_bytes() <= limit_; }
  // Whether these rows may become dirty. Rows may be repeated.
  bool has_room_for(const int64_t* rows, size_t n);
  // Changed rows that take as many bytes as the tombstones of n rows.
  uint64_t rows_like_tombstones(size_t n) const;
  // The same for so many unknown rows.
  bool has_room_for_any(size_t rows);
  void forget_admitted() { admitted_ = 0; }
  // Compacts for the rows of the last has_room_for*(). Returns whether there is room then.
  bool make_room();
  // Before a commit: packs the segments that it would name, so that later changes have room. A commit that is to be
  // kept needs more room. Returns false when compaction cannot free enough.
  bool shrink_for_commit(bool is_to_be_kept);
  // The number of stored rows after these rows are added, when the limit does not allow so many; otherwise 0. When one
  // of these rows is new, `above` other rows count too, up to `most` rows in all.
  uint64_t rows_beyond(const int64_t* rows, size_t n, size_t above = 0, uint64_t most = ~uint64_t{0}) const;

  // ---- The smallest limit that is enough
  uint64_t needed(uint64_t stored_rows) const;
  uint64_t needed_with(const LogMemory& memory, uint64_t stored_rows) const;
  // For the present files.
  uint64_t needed_now() const;
  // To keep the present state under a name.
  uint64_t needed_to_keep() const;
  // To change so many more rows in one call at any time.
  uint64_t needed_for(uint64_t rows) const;

  // The most bytes of an index snapshot of so many rows; see directory/index_snapshot_file.h.
  static uint64_t index_snapshot_estimate(uint64_t rows) { return 16 * rows + (64u << 10); }
  static uint64_t slack_bytes(uint64_t segment_bytes, const LogMemory& memory);

 private:
  uint64_t slack() const;
  uint64_t slack_in_use() const;
  uint64_t segment_overhead() const;
  uint64_t written_bytes(uint64_t rows) const;
  uint64_t packed_bytes(uint64_t rows) const;
  uint64_t others_bytes() const;
  uint64_t fixed_bytes(uint64_t stored_rows) const;
  uint64_t most_rows() const;
  uint64_t commit_bytes() const;
  uint64_t count_bytes(uint64_t n) const;
  uint64_t unwritten_bytes(uint64_t more_rows) const;
  uint64_t reserved_bytes() const { return unwritten_bytes(held_rows_ + admitted_) + slack_in_use(); }
  bool fits(size_t rows, uint64_t borrowed = 0) const;
  bool pack_until(const std::function<bool()>& is_enough, const Compactor::MayEmpty& among);
  size_t rows_to_dirty(const int64_t* rows, size_t n) const;

  Log* const log_;
  const Directory* const directory_;
  const Cache* const cache_;
  Compactor* const compactor_;
  const MemoryPlan* const plan_;
  const UnwrittenRows* const unwritten_;
  uint64_t limit_ = 0;
  size_t commits_ = 1;
  uint64_t num_rows_ = ~uint64_t{0};
  std::set<uint64_t> kept_;  // segments of kept commits
  uint64_t kept_bytes_ = 0;
  uint64_t other_bytes_ = 0;  // manifests and index snapshots of commits
  uint64_t index_snapshot_bytes_ = 0;
  uint64_t meta_bytes_ = 0;
  size_t held_rows_ = 0;
  size_t admitted_ = 0;      // rows that the change under way may make dirty
  bool may_borrow_ = false;  // whether the next change may use a segment's bytes of the slack
};

}  // namespace bunkbed
