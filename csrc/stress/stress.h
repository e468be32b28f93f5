// Random calls by several threads on every kind of table, checked against an oracle while they run (oracle.h).
//
// A life is one table, or several, with the least RAM or little more. It has episodes. In an episode threads make
// random calls, and each thread checks its own. Between episodes one thread checks every row exactly, rewinds to an
// earlier commit, sets rows, closes and opens. In a quiet episode nothing changes, so that scans finish. In some others
// the tables are closed while threads are at work. A life ends with a commit, an opening and a check of the files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stress/oracle.h"

namespace bunkbed::stress {

struct Options {
  std::string kind = "fixed";
  double seconds = 10.0;  // no episode begins after so long
  uint64_t episodes = 0;  // or exactly so many; 0: by time
  uint64_t seed = 0;
  size_t threads = 4;
  size_t calls = 120;  // of a thread in an episode
  bool stops_at_wrong = false;
};

struct Outcome {
  Tally tally;
  uint64_t episodes = 0, lives = 0;
  uint64_t uring_reads = 0, thread_reads = 0;
};

// Names that Options::kind takes.
std::vector<std::string> kinds();
// Sets process-wide knobs (index_snapshot_rows, compaction_slack_bytes) while it runs. Error(kInvalid): an unknown
// kind.
Outcome run(const Options& options);

}  // namespace bunkbed::stress
