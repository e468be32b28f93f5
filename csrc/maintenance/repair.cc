#include "maintenance/repair.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "commit/manifests.h"
#include "directory/index_snapshot_file.h"
#include "format/format.h"

namespace bunkbed {

namespace {

std::string join(const std::vector<uint64_t>& epochs) {
  std::string text;
  for (const uint64_t epoch : epochs) text += (text.empty() ? "" : ", ") + std::to_string(epoch);
  return text;
}

class Repair {
 public:
  Repair(vfs::Vfs& vfs, const std::string& path, const RepairOptions& options, CheckedTable table)
      : vfs_(vfs), path_(path), options_(options), manifests_(vfs, path) {
    result_.table = std::move(table);
    for (const uint64_t epoch : result_.table.epochs) {
      try {
        loaded_.emplace(epoch, manifests_.load(epoch));
      } catch (const Error&) {
      }
    }
    for (const Problem& problem : result_.table.problems) {
      if (problem.kind == "manifest" || problem.kind == "foreign") unreadable_.insert(problem.epochs.front());
    }
  }

  RepairedTable run() {
    if (result_.table.belongs_to_run && !options_.through_run) {
      throw Error(ErrorKind::kReadOnly, "table " + path_ +
                                            " belongs to a run, whose tables are repaired together; give "
                                            "the run's folder");
    }
    if (options_.fall_back_to.has_value()) fall_back(*options_.fall_back_to);
    void_index_snapshots();
    remove_commits();
    remove_leftovers();
    forget_problems();
    return std::move(result_);
  }

 private:
  bool is_sound(uint64_t epoch) const {
    const auto& sound = result_.table.sound;
    return std::find(sound.begin(), sound.end(), epoch) != sound.end();
  }

  void void_index_snapshots() {
    std::vector<Problem> others;
    for (Problem& problem : result_.table.problems) {
      uint64_t number;
      if (problem.kind != "directory" || !parse_name(problem.file, "directory-", &number)) {
        others.push_back(std::move(problem));
        continue;
      }
      write_void_index_snapshot(vfs_, path_, loaded_.at(problem.epochs.front()).uuid, number);
      result_.done.push_back("emptied " + problem.file +
                             ", which was damaged; the next opening builds the directory from "
                             "the segments");
    }
    result_.table.problems = std::move(others);
  }

  void fall_back(uint64_t epoch) {
    CheckedTable& table = result_.table;
    if (!is_sound(epoch)) {
      throw Error(ErrorKind::kInvalid,
                  "table " + path_ + ": commit " + std::to_string(epoch) +
                      (std::count(table.epochs.begin(), table.epochs.end(), epoch) != 0 ? " is damaged itself"
                                                                                        : " is not there") +
                      "; " + (table.sound.empty() ? "no commit is sound" : "sound ones: " + join(table.sound)) +
                      "; nothing was changed");
    }
    const uint64_t newest = table.epochs.back();
    if (epoch == newest) return;
    if (is_sound(newest) && !options_.through_run) {
      throw Error(ErrorKind::kInvalid,
                  "table " + path_ + ": commit " + std::to_string(newest) +
                      ", the newest, is sound, so there is nothing to fall back from; to go back all "
                      "the same, open the table and call rewind(" +
                      std::to_string(epoch) + "); nothing was changed");
    }
    Manifest manifest = loaded_.at(epoch);
    manifest.parent_epoch = epoch;
    manifest.epoch = newest + 1;
    manifest.keep.clear();
    manifest.writer_flags &= ~kWriterFlagCopy;
    // Numbers of segments and versions never go back, even if the commits that used them are gone.
    for (const auto& [number, other] : loaded_) {
      if (unreadable_.contains(number)) continue;
      manifest.next_version = std::max(manifest.next_version, other.next_version);
      manifest.next_segment = std::max(manifest.next_segment, other.next_segment);
    }
    for (const std::string& name : vfs_.list(path_)) {
      uint64_t segment;
      if (parse_name(name, "segment-", &segment)) manifest.next_segment = std::max(manifest.next_segment, segment + 1);
    }
    manifests_.write(manifest);
    table.epochs.push_back(manifest.epoch);
    table.sound.push_back(manifest.epoch);
    loaded_[manifest.epoch] = manifest;
    result_.done.push_back("went back to commit " + std::to_string(epoch) + " (step " + std::to_string(manifest.step) +
                           "), which is now also commit " + std::to_string(manifest.epoch) + ", the newest");
  }

  void remove_commits() {
    // A run gives the commits that it names in `pinned`. Without a run the newest commit must be sound.
    if (!options_.through_run && !is_sound(result_.table.epochs.back())) return;
    for (const uint64_t epoch : result_.table.epochs) {
      if (is_sound(epoch) || options_.pinned.contains(epoch)) continue;
      const bool is_unreadable = unreadable_.contains(epoch);
      if (!is_unreadable && !loaded_.at(epoch).keep.empty()) continue;  // its readable part may be wanted
      removed_.push_back(epoch);
      result_.done.push_back("removed commit " + std::to_string(epoch) +
                             (is_unreadable ? ", which cannot be read" : ", which is damaged and superseded"));
    }
    manifests_.remove(removed_);
    for (const uint64_t epoch : removed_) loaded_.erase(epoch);
  }

  void remove_leftovers() {
    std::map<uint64_t, uint64_t> named;  // segment -> length
    std::set<uint64_t> index_snapshots;
    bool all_known = true;
    for (const uint64_t epoch : result_.table.epochs) {
      if (std::count(removed_.begin(), removed_.end(), epoch) != 0) continue;
      const auto found = loaded_.find(epoch);
      all_known &= found != loaded_.end();
      if (found == loaded_.end()) continue;
      for (const SegmentEntry& entry : found->second.segments) {
        uint64_t& bytes = named[entry.segment];
        bytes = std::max(bytes, entry.bytes);
      }
      for (const IndexSnapshotEntry& entry : found->second.index_snapshots) index_snapshots.insert(entry.file);
    }
    bool names_changed = false;
    const auto remove = [&](const std::string& name, uint64_t bytes, const char* what) {
      vfs_.remove(path_ + "/" + name);
      names_changed = true;
      result_.done.push_back("removed " + name + ", " + what + " (" + std::to_string(bytes) + " bytes)");
    };
    for (const std::string& name : vfs_.list(path_)) {
      uint64_t number;
      const bool is_temporary = name.rfind(kTemporaryPrefix, 0) == 0;
      const bool is_index_snapshot = parse_name(name, "directory-", &number);
      if (!is_temporary && !is_index_snapshot && !parse_name(name, "segment-", &number)) continue;
      if (is_index_snapshot && index_snapshots.contains(number)) continue;
      uint64_t bytes = 0;
      try {
        bytes = vfs_.open(path_ + "/" + name, false)->size();
      } catch (const Error&) {
        continue;  // not a file: reported, and left alone
      }
      if (is_temporary) {
        remove(name, bytes, "of a commit that did not finish");
      } else if (is_index_snapshot || !named.contains(number)) {
        if (all_known) remove(name, bytes, "which no commit names");
      } else if (bytes > named[number]) {
        vfs_.truncate(path_ + "/" + name, named[number]);
        result_.done.push_back("cut " + name + " to its committed length, " + std::to_string(bytes - named[number]) +
                               " bytes less");
      }
    }
    if (names_changed) vfs_.sync_directory(path_);
  }

  // Drops the problems of removed commits, and of files that only those named.
  void forget_problems() {
    CheckedTable& table = result_.table;
    const auto is_removed = [this](uint64_t epoch) { return std::count(removed_.begin(), removed_.end(), epoch) != 0; };
    std::vector<Problem> remaining;
    for (Problem& problem : table.problems) {
      const bool had_some = !problem.epochs.empty();
      std::erase_if(problem.epochs, is_removed);
      const bool is_gone = problem.epochs.empty() && !problem.file.empty() && !vfs_.exists(path_ + "/" + problem.file);
      if (!is_gone && !(had_some && problem.epochs.empty())) remaining.push_back(std::move(problem));
    }
    table.problems = std::move(remaining);
    std::erase_if(table.epochs, is_removed);
    table.leftovers.clear();
  }

  vfs::Vfs& vfs_;
  const std::string path_;
  const RepairOptions& options_;
  const Manifests manifests_;
  RepairedTable result_;
  std::map<uint64_t, Manifest> loaded_;
  std::set<uint64_t> unreadable_;
  std::vector<uint64_t> removed_;
};

}  // namespace

RepairedTable repair_table(vfs::Vfs& vfs, const std::string& path, const RepairOptions& options,
                           const CheckProgress& progress) {
  (void)Manifests(vfs, path).epochs();  // an error unless it is a table
  std::unique_ptr<vfs::Lock> lock;
  try {
    lock = vfs.lock(path + "/" + kLockName);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kLocked) throw;
    throw Error(ErrorKind::kLocked, "table " + path + " is being written by " + error.what() +
                                        "; close it there before repairing it; nothing was changed");
  }
  CheckedTable found = inspect_table(vfs, path, options.ram_bytes, progress, options.place);
  RepairedTable result = Repair(vfs, path, options, std::move(found)).run();
  lock->unlock();
  return result;
}

}  // namespace bunkbed
