#include "maintenance/copy.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "base/error.h"
#include "commit/cursors.h"
#include "commit/manifests.h"
#include "format/format.h"
#include "log/log.h"

namespace bunkbed {

namespace {

constexpr size_t kPieceBytes = 4u << 20;
constexpr size_t kGlanceBytes = 64u << 10;

LogMemory small_memory() {
  LogMemory memory;
  memory.num_read_slices = 1;
  return memory;
}

// Encodes a manifest without the parts that a copy changes. Two commits are the same when these bytes are.
Bytes content_of(Manifest manifest) {
  manifest.writer_flags &= ~(kWriterFlagCopy | kWriterFlagRun);
  manifest.index_snapshots.clear();
  manifest.keep.clear();
  return encode_manifest(manifest);
}

class Copy {
 public:
  Copy(vfs::Vfs& vfs, const std::string& from, const std::string& to, const CopyOptions& options,
       const CheckProgress& progress)
      : vfs_(vfs), from_(from), to_(to), options_(options), progress_(progress), source_(vfs, from), target_(vfs, to) {}

  CopyResult run() {
    open_source();
    const auto lock = prepare_target();
    result_.epoch = manifest_.epoch;
    if (!is_there_) {
      for (const SegmentEntry& entry : manifest_.segments) {
        if (!present_.contains(entry.segment)) total_ += entry.bytes;
      }
      for (const SegmentEntry& entry : manifest_.segments) bring(entry);
      vfs_.sync_directory(to_);
      Manifest copied = manifest_;
      copied.writer_flags |= kWriterFlagCopy;
      if (!options_.for_run) copied.writer_flags &= ~kWriterFlagRun;
      copied.index_snapshots.clear();  // an index snapshot only saves time; the segments hold everything
      target_.write(copied);
    }
    if (!options_.for_run) target_.collect({});
    lock->unlock();
    return result_;
  }

 private:
  void open_source() {
    for (int attempt = 0;; ++attempt) {
      try {
        manifest_ = options_.epoch.has_value()  ? source_.load(*options_.epoch)
                    : options_.snapshot.empty() ? source_.load_newest()
                                                : source_.load_snapshot(options_.snapshot);
        if ((manifest_.reader_flags & kReaderFlagScratch) != 0) {
          throw Error(ErrorKind::kInvalid,
                      "table " + from_ + " is a scratch table, of which nothing is kept: there is nothing to copy");
        }
        log_ = make_log(from_);
        log_->adopt(manifest_.segments);
        return;
      } catch (const Error& error) {
        // The writer has collected the commit meanwhile: try again.
        if (error.kind() != ErrorKind::kNotFound || !vfs_.exists(from_) || attempt >= 20) throw;
      }
    }
  }

  std::unique_ptr<Log> make_log(const std::string& directory) {
    return std::make_unique<Log>(vfs_, directory, manifest_.uuid, manifest_.payload_bytes, manifest_.slots_per_segment,
                                 small_memory());
  }

  [[noreturn]] void refuse(ErrorKind kind, const std::string& why) {
    throw Error(kind, "cannot copy " + from_ + " to " + to_ + ": " + why + "; nothing was changed");
  }

  std::unique_ptr<vfs::Lock> prepare_target() {
    bool is_table = false;
    if (vfs_.exists(to_)) {
      for (const std::string& name : vfs_.list(to_)) {
        uint64_t number;
        is_table |= parse_name(name, "manifest-", &number);
        const bool is_ours = name == kLockName || name.starts_with(kCursorPrefix) ||
                             name.rfind(kTemporaryPrefix, 0) == 0 || parse_name(name, "segment-", &number) ||
                             parse_name(name, "manifest-", &number) || parse_name(name, "directory-", &number);
        if (!is_ours) refuse(ErrorKind::kExists, "it holds " + name + ", which is none of a table's");
      }
    } else {
      vfs_.make_directories(to_);
    }
    std::unique_ptr<vfs::Lock> lock;
    try {
      lock = vfs_.lock(to_ + "/" + kLockName);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kLocked) throw;
      refuse(ErrorKind::kLocked, std::string("it is being written by ") + error.what());
    }
    if (is_table) meet_target();
    target_.remove_temporaries();
    return lock;
  }

  void meet_target() {
    const Manifest newest = target_.load_newest();
    if (newest.uuid != manifest_.uuid) refuse(ErrorKind::kInvalid, "another table lies there");
    if ((newest.writer_flags & kWriterFlagCopy) == 0) {
      refuse(ErrorKind::kInvalid, "it was written since it was copied, and went its own way with commit " +
                                      std::to_string(newest.epoch) + "; copy to another folder");
    }
    if (newest.epoch > manifest_.epoch) {
      refuse(ErrorKind::kInvalid, "it holds commit " + std::to_string(newest.epoch) + " already, which is newer than " +
                                      std::to_string(manifest_.epoch));
    }
    const std::string other = "its commit " + std::to_string(newest.epoch) +
                              " is not the one the source had under that number; copy to another folder";
    if (newest.epoch == manifest_.epoch) {
      if (content_of(newest) != content_of(manifest_)) refuse(ErrorKind::kInvalid, other);
      is_there_ = newest.keep == manifest_.keep;
    } else {
      try {
        if (content_of(source_.load(newest.epoch)) != content_of(newest)) refuse(ErrorKind::kInvalid, other);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kNotFound) throw;  // collected since: compare the segments
      }
    }
    if (newest.epoch == manifest_.epoch && !is_there_) {
      refuse(ErrorKind::kInvalid, "it holds that commit already, under the name '" + newest.keep + "'");
    }
    for (const uint64_t epoch : target_.epochs()) {
      Manifest manifest;
      try {
        manifest = target_.load(epoch);
      } catch (const Error&) {
        continue;
      }
      for (const SegmentEntry& entry : manifest.segments) present_[entry.segment] = entry;
    }
    for (const SegmentEntry& entry : manifest_.segments) {
      const auto found = present_.find(entry.segment);
      if (found == present_.end()) continue;
      if (found->second.epoch != entry.epoch || found->second.bytes != entry.bytes || !looks_the_same(entry)) {
        refuse(ErrorKind::kInvalid,
               "its " + segment_name(entry.segment) +
                   " is not the source's, so it is a copy of another history; copy to another folder");
      }
    }
    if (is_there_) {
      for (const SegmentEntry& entry : manifest_.segments) result_.present_bytes += entry.bytes;
    }
  }

  // Compares [begin, end) of the source's segment with a file.
  bool is_same(uint64_t segment, vfs::File* file, uint64_t begin, uint64_t end) {
    vfs::Buffer ours(kPieceBytes), theirs(kPieceBytes);
    for (uint64_t at = begin; at < end; at += kPieceBytes) {
      const size_t n = std::min<uint64_t>(kPieceBytes, end - at);
      log_->find_segment(segment)->file->read(ours.data(), n, at);
      file->read(theirs.data(), n, at);
      if (std::memcmp(ours.data(), theirs.data(), n) != 0) return false;
    }
    return true;
  }

  // Compares both ends only. The last chunk's records differ between two histories that share numbers and lengths.
  bool looks_the_same(const SegmentEntry& entry) {
    const auto file = vfs_.open(to_ + "/" + segment_name(entry.segment), true);
    if (file->size() < entry.bytes) return false;
    const uint64_t head = std::min<uint64_t>(entry.bytes, kGlanceBytes);
    const uint64_t tail = std::max<uint64_t>(head, entry.bytes - std::min<uint64_t>(entry.bytes, kGlanceBytes));
    return is_same(entry.segment, file.get(), 0, head) && is_same(entry.segment, file.get(), tail, entry.bytes);
  }

  void bring(const SegmentEntry& entry) {
    if (present_.contains(entry.segment)) {
      result_.present_bytes += entry.bytes;
      return;
    }
    const std::string path = to_ + "/" + segment_name(entry.segment);
    // The file is from a copy that did not finish, or from a writer that died.
    if (vfs_.exists(path)) {
      const auto file = vfs_.open(path, true);
      if (file->size() == entry.bytes && is_same(entry.segment, file.get(), 0, entry.bytes)) {
        file->sync();
        verify(entry);
        result_.present_bytes += entry.bytes;
        return;
      }
      vfs_.remove(path);
    }
    if (!link(entry, path)) copy(entry, path);
    try {
      verify(entry);
    } catch (...) {
      vfs_.remove(path);
      throw;
    }
  }

  bool link(const SegmentEntry& entry, const std::string& path) {
    // A file longer than its committed length was left by a writer that died: only the committed part is copied.
    if (!options_.may_link || log_->find_segment(entry.segment)->file->size() != entry.bytes) return false;
    try {
      vfs_.link(from_ + "/" + segment_name(entry.segment), path);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kSystem) throw;
      return false;  // another filesystem, one without links, too many links, or collected since
    }
    result_.linked_bytes += entry.bytes;
    return true;
  }

  void copy(const SegmentEntry& entry, const std::string& path) {
    const std::string temporary = to_ + "/" + kTemporaryPrefix + segment_name(entry.segment);
    vfs_.remove(temporary);
    {
      const auto file = vfs_.create(temporary);
      vfs::Buffer piece(kPieceBytes);
      for (uint64_t at = 0; at < entry.bytes; at += kPieceBytes) {
        const size_t n = std::min<uint64_t>(kPieceBytes, entry.bytes - at);
        log_->find_segment(entry.segment)->file->read(piece.data(), n, at);
        file->write(piece.data(), n, at);
        if (progress_) progress_(done_ + at / 2, total_);
      }
      file->sync();
    }
    vfs_.link(temporary, path);
    vfs_.remove(temporary);
    result_.copied_bytes += entry.bytes;
  }

  // Reads the destination's file, because its disk must return the right bytes.
  void verify(const SegmentEntry& entry) {
    const auto log = make_log(to_);
    log->adopt({entry});
    std::vector<Problem> problems;
    uint64_t read = 0;
    check_segment(log.get(), log->find_segment(entry.segment), {manifest_.epoch}, &problems, [&](uint64_t bytes) {
      read += bytes;
      if (progress_) progress_(done_ + (entry.bytes + read) / 2, total_);
    });
    done_ += entry.bytes;
    for (const Problem& problem : problems) {
      if (problem.kind == "padding") continue;  // no value is affected
      throw Error(ErrorKind::kCorruption, "cannot copy " + from_ + " to " + to_ + ": " + problem.what +
                                              "; look at the source with bunkbed check; the destination is as it was");
    }
  }

  vfs::Vfs& vfs_;
  const std::string from_;
  const std::string to_;
  const CopyOptions& options_;
  const CheckProgress& progress_;
  const Manifests source_;
  const Manifests target_;
  Manifest manifest_;
  std::unique_ptr<Log> log_;  // of the source
  std::map<uint64_t, SegmentEntry> present_;
  bool is_there_ = false;
  uint64_t done_ = 0, total_ = 0;
  CopyResult result_;
};

}  // namespace

CopyResult copy_table(vfs::Vfs& vfs, const std::string& from, const std::string& to, const CopyOptions& options,
                      const CheckProgress& progress) {
  return Copy(vfs, from, to, options, progress).run();
}

}  // namespace bunkbed
