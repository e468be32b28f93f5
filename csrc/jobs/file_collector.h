// Removes the files that no commit needs: manifests, segments and index snapshots. A commit stays if it is one of the
// newest, is kept under a name, or is pinned by a run.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <set>

#include "commit/manifests.h"
#include "jobs/index_snapshots.h"
#include "state/table_state.h"

namespace bunkbed {

class FileCollector {
 public:
  static constexpr size_t kNewest = 2;  // commits that stay without a name or a pin
  // Removing a file occupies the disk, and so delays the reads of steps: it frees the blocks, and file systems mounted
  // with `discard` pass them to the device. kPaused leaves this time after each segment, until a call waits for the
  // commit. A disk limit needs the space at once.
  static constexpr std::chrono::milliseconds kPause{50};
  enum class Pace { kAtOnce, kPaused };

  FileCollector(TableState& table, IndexSnapshots& index) : table_(table), index_(index) {}
  FileCollector(const FileCollector&) = delete;
  FileCollector& operator=(const FileCollector&) = delete;

  // Pins the epochs that the manifests of a run name. `kept`: those of its snapshots. Requires the lock.
  void set_pinned(std::set<uint64_t> epochs, std::set<uint64_t> kept) REQUIRES(table_.lock);
  bool is_pinned(uint64_t epoch) const REQUIRES(table_.lock) { return pinned_.contains(epoch); }

  // Requires the lock.
  void collect(size_t newest = kNewest) REQUIRES(table_.lock);
  // The same, ignoring errors: the next collection tries again.
  void try_collect() REQUIRES(table_.lock);
  // The same in slices that take the lock; files are removed without it, as that is slow. Requires is_committing().
  void collect_in_slices(size_t newest = kNewest, Pace pace = Pace::kAtOnce);
  // For closing, without a store: removes segments that no commit names. Requires the lock of exclusive().
  void collect_leftovers() REQUIRES(table_.lock);

 private:
  std::set<uint64_t> pinned_now() const REQUIRES(table_.lock);
  Manifests::Spared spared(size_t newest) const REQUIRES(table_.lock);

  TableState& table_;
  IndexSnapshots& index_;
  std::set<uint64_t> pinned_ GUARDED_BY(table_.lock);
  std::set<uint64_t> kept_ GUARDED_BY(table_.lock);  // a subset of pinned_
};

}  // namespace bunkbed
