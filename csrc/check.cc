#include "check.h"

#include <algorithm>
#include <map>

#include "directory.h"
#include "error.h"
#include "format.h"
#include "log.h"
#include "manifests.h"
#include "rebuild.h"
#include "record.h"

namespace bunkbed {

namespace {

constexpr size_t kPieceBytes = 1u << 20;

// Every record of a segment, not only the live ones: a snapshot may need any of them.
void check_segment(Log* log, Segment* segment, std::vector<std::string>* problems) {
  std::vector<int64_t> ids;
  std::vector<uint64_t> versions;
  Span span;
  for (const ChunkTrailer& chunk : log->chunks(*segment)) {
    try {
      log->read_index(*segment, chunk, &span, &ids, &versions);
    } catch (const Error& error) {
      problems->push_back(error.what());
      continue;
    }
    if (chunk.kind != ChunkKind::kData) continue;
    const size_t piece = std::max<size_t>(1, kPieceBytes / log->stride());
    for (size_t from = 0; from < ids.size(); from += piece) {
      const size_t count = std::min(piece, ids.size() - from);
      try {
        log->read_records(*segment, chunk, from, count, ids.data(), &span);
      } catch (const Error& error) {
        problems->push_back(error.what());
      }
    }
  }
}

}  // namespace

std::vector<std::string> check_table(vfs::Vfs& vfs, const std::string& path) {
  const Manifests manifests(vfs, path);
  std::vector<std::string> problems;
  std::map<uint64_t, uint64_t> checked;  // segment -> length already read
  for (const uint64_t epoch : manifests.epochs()) {
    Manifest manifest;
    try {
      manifest = manifests.load(epoch);
    } catch (const Error& error) {
      problems.push_back(error.what());
      continue;
    }
    const std::string commit = "commit " + std::to_string(epoch) + ": ";
    if (manifest.fields != record_fields(manifest.dim, manifest.dtype(), manifest.optimizer) ||
        manifest.payload_bytes != record_payload(manifest.fields)) {
      problems.push_back(commit + "its record holds fields this release does not know");
    }
    LogMemory memory;
    Log log(vfs, path, manifest.uuid, manifest.payload_bytes, manifest.slots_per_segment, memory);
    bool all_open = true;
    for (const SegmentEntry& entry : manifest.segments) {
      try {
        log.adopt({entry});
      } catch (const Error& error) {
        problems.push_back(commit + error.what());
        all_open = false;
        continue;
      }
      if (checked[entry.segment] >= entry.bytes) continue;
      checked[entry.segment] = entry.bytes;
      try {
        check_segment(&log, log.find_segment(entry.segment), &problems);
      } catch (const Error& error) {
        problems.push_back(commit + error.what());
      }
    }
    if (!all_open || !problems.empty()) continue;
    try {
      const auto directory = make_hashed_directory();
      rebuild_directory(&log, directory.get(), manifest.num_rows, manifest.next_version, 256u << 20);
      if (directory->stored_rows() != manifest.stored_rows) {
        problems.push_back(commit + "its segments hold " + std::to_string(directory->stored_rows()) +
                           " rows, it names " + std::to_string(manifest.stored_rows));
      }
    } catch (const Error& error) {
      problems.push_back(commit + error.what());
    }
  }
  for (const std::string& name : vfs.list(path)) {
    uint64_t number;
    const bool known = name == kLockName || name.rfind(kTemporaryPrefix, 0) == 0 ||
                       parse_name(name, "manifest-", &number) || parse_name(name, "segment-", &number);
    if (!known) problems.push_back("a file that is none of the table's: " + name);
  }
  return problems;
}

}  // namespace bunkbed
