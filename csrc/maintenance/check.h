// Reads everything that a table's commits name and lists the problems. Changes nothing; repair.h repairs.
//
// In order: every manifest; every segment once, however many commits name it: header, chunks, ids, each record's
// checksum, and that unused bytes are zero; every index snapshot; then, for each commit, that its segments hold
// as many rows as it says. A few threads take a segment each; the problems are listed in the order of the segments.
// Memory is a chunk's index and a piece of a segment for each thread, and the ids of the count, inside `ram_bytes`.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "format/shard_rule.h"
#include "vfs/vfs.h"

namespace bunkbed {

struct Problem {
  // manifest, foreign, fields, segment, chunk, record, padding, directory, rows, stranger, misplaced
  std::string kind;
  std::string file;              // its name in the table's directory; empty: no single one
  int64_t offset = -1;           // byte in it; -1: all of it
  std::string what;              // a description
  std::vector<uint64_t> epochs;  // of the commits that cannot be read in full because of it
};

// Bytes that no commit names: of a running writer, or of a session that died.
struct Leftover {
  std::string kind;  // temporary, segment, tail, directory
  std::string file;
  uint64_t bytes = 0;
};

struct CheckedTable {
  std::vector<uint64_t> epochs;  // commits there are, ascending
  std::vector<uint64_t> sound;   // commits of whose rows every byte was read and is right
  std::vector<Problem> problems;
  std::vector<Leftover> leftovers;
  bool belongs_to_run = false;
  uint64_t bytes = 0;  // read, of segments
};

// Called with (bytes done, bytes in all). An exception that it throws ends the check.
using CheckProgress = std::function<void(uint64_t done, uint64_t total)>;

// Error only when `path` is no table at all. `place` of a shard says which rows it may have.
CheckedTable inspect_table(vfs::Vfs& vfs, const std::string& path, size_t ram_bytes = 256u << 20,
                           const CheckProgress& progress = nullptr, ShardPlace place = {});

// inspect_table() with one line for each problem; empty when the table is sound.
std::vector<std::string> check_table(vfs::Vfs& vfs, const std::string& path);

class Log;
struct Segment;
// Verifies one open segment of `log`, from its header to its committed length, and appends its problems.
// Calls `at` with the number of bytes of each part that is done.
void check_segment(Log* log, Segment* segment, const std::vector<uint64_t>& epochs, std::vector<Problem>* problems,
                   const std::function<void(uint64_t bytes)>& at, ShardPlace place = {});

}  // namespace bunkbed
