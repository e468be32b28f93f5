// Mirrors check.h, copy.h, repair.h, snapshots.h, changes.h and cursors.h: work on a table's files without opening the
// table.
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>

#include "bindings/bindings.h"
#include "commit/manifests.h"
#include "commit/snapshots.h"
#include "feed/changes.h"
#include "maintenance/check.h"
#include "maintenance/copy.h"
#include "maintenance/repair.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

namespace {

// Calls a Python function at most 20 times a second. Ctrl-C then ends the work.
CheckProgress python_progress(const nb::object& function) {
  using Clock = std::chrono::steady_clock;
  auto next = std::make_shared<Clock::time_point>(Clock::now());
  return [function, next](uint64_t done, uint64_t total) {
    const auto now = Clock::now();
    if (now < *next && done < total) return;
    *next = now + std::chrono::milliseconds(50);
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    InCore::require_open_door();  // otherwise a check of a large table would delay the end of the process
    if (!function.is_none()) function(done, total);
  };
}

nb::dict checked_values(const CheckedTable& table) {
  nb::list problems;
  for (const Problem& problem : table.problems) {
    nb::dict d;
    d["kind"] = problem.kind;
    d["file"] = problem.file;
    d["offset"] = problem.offset < 0 ? nb::none() : nb::object(nb::int_(problem.offset));
    d["what"] = problem.what;
    d["epochs"] = problem.epochs;
    problems.append(d);
  }
  nb::list leftovers;
  for (const Leftover& leftover : table.leftovers) {
    leftovers.append(nb::make_tuple(leftover.kind, leftover.file, leftover.bytes));
  }
  nb::dict d;
  d["epochs"] = table.epochs;
  d["sound"] = table.sound;
  d["problems"] = problems;
  d["leftovers"] = leftovers;
  d["belongs_to_run"] = table.belongs_to_run;
  d["bytes"] = table.bytes;
  return d;
}

void bind_feed(nb::module_& m) {
  nb::class_<Changes>(m, "Changes", "The rows that changed since a commit; see bunkbed.changes.")
      .def(
          "__init__",
          [](Changes* self, const std::string& path, const std::string& name, uint64_t since, uint64_t since_version,
             bool is_new, std::optional<uint64_t> to, size_t ram_bytes, const std::string& advice) {
            const WithoutGil without_gil;
            new (self) Changes(vfs::current(), path, name, {since, since_version, is_new}, to, ram_bytes, advice);
          },
          "path"_a, "name"_a, "since"_a, "since_version"_a, "is_new"_a, "to"_a.none(), "ram_bytes"_a, "advice"_a)
      .def(
          "next",
          [](Changes& changes, const nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& ids,
             const FloatsOut& weights,
             const nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& deleted) {
            Changes::Found found;
            {
              const WithoutGil without_gil;
              found = changes.next(ids.shape(0), ids.data(), weights.data(), deleted.data());
            }
            return nb::make_tuple(found.rows, found.deleted);
          },
          "ids"_a, "weights"_a, "deleted"_a, "Fill arrays of equal length; return (rows, deleted), both 0 at the end.")
      .def("commit", [](const Changes& changes) { return changes.commit().epoch; })
      .def("dim", [](const Changes& changes) { return changes.commit().dim; })
      .def(
          "cursor",
          [](const Changes& changes) {
            const Bytes bytes = encode_cursor(changes.commit().uuid, changes.cursor());
            return nb::bytes(bytes.data(), bytes.size());
          },
          "Return the file of a consumer that has every change.");
  m.def(
      "new_cursor",
      [](const std::string& path) {
        Manifest newest;
        {
          const WithoutGil without_gil;
          newest = Manifests(vfs::current(), path).load_newest();
        }
        const Bytes bytes = encode_cursor(newest.uuid, {newest.epoch, newest.next_version, true});
        return nb::bytes(bytes.data(), bytes.size());
      },
      "path"_a, "Return the file of a consumer that has no change yet.");
  m.def(
      "load_cursor",
      [](const std::string& path, const std::string& name) -> std::optional<std::tuple<uint64_t, uint64_t, bool>> {
        const WithoutGil without_gil;
        const Uuid uuid = Manifests(vfs::current(), path).load_newest().uuid;
        const auto found = load_cursor(vfs::current(), path, name, uuid);
        if (!found.has_value()) return std::nullopt;
        return std::make_tuple(found->epoch, found->next_version, found->is_new);
      },
      "path"_a, "name"_a, "Return (commit, next version, whether it is new) of a cursor, or None.");
}

}  // namespace

void bind_maintenance(nb::module_& m) {
  m.def(
      "check_table",
      [](const std::string& path, size_t ram_bytes, const nb::object& progress, uint32_t shard, uint32_t shards) {
        const CheckProgress report = python_progress(progress);
        CheckedTable table;
        {
          const WithoutGil without_gil;
          table = inspect_table(vfs::current(), path, ram_bytes, report, {shard, shards});
        }
        return checked_values(table);
      },
      "path"_a, "ram_bytes"_a, "progress"_a.none(), "shard"_a = 0, "shards"_a = 1,
      "Return the problems of a table's files. Calls progress(bytes done, bytes in all) regularly.");
  m.def(
      "repair_table",
      [](const std::string& path, size_t ram_bytes, std::optional<uint64_t> fall_back_to, std::set<uint64_t> pinned,
         bool through_run, const nb::object& progress, uint32_t shard, uint32_t shards) {
        const CheckProgress report = python_progress(progress);
        RepairOptions options;
        options.fall_back_to = fall_back_to;
        options.through_run = through_run;
        options.pinned = std::move(pinned);
        options.ram_bytes = ram_bytes;
        options.place = {shard, shards};
        RepairedTable repaired;
        {
          const WithoutGil without_gil;
          repaired = repair_table(vfs::current(), path, options, report);
        }
        return nb::make_tuple(checked_values(repaired.table), repaired.done);
      },
      "path"_a, "ram_bytes"_a, "fall_back_to"_a.none(), "pinned"_a, "through_run"_a, "progress"_a.none(), "shard"_a = 0,
      "shards"_a = 1, "Repair a table's files. Return (the remaining problems, the changes, one line each).");
  m.def(
      "commits",
      [](const std::string& path) {
        std::vector<Manifest> commits;
        {
          const WithoutGil without_gil;
          commits = readable_commits(vfs::posix(), path);
        }
        nb::list found;
        for (const Manifest& manifest : commits) {
          nb::dict segments;
          for (const SegmentEntry& entry : manifest.segments) segments[nb::int_(entry.segment)] = entry.bytes;
          nb::dict d;
          d["epoch"] = manifest.epoch;
          d["keep"] = manifest.keep;
          d["step"] = manifest.step;
          d["stored_rows"] = manifest.stored_rows;
          d["segments"] = segments;
          d["uuid"] = nb::bytes(manifest.uuid.data(), manifest.uuid.size());
          d["belongs_to_run"] = (manifest.writer_flags & kWriterFlagRun) != 0;
          found.append(d);
        }
        return found;
      },
      "path"_a, "Return each readable commit of a table, ascending.");
  m.def(
      "drop_snapshot",
      [](const std::string& path, const std::string& name) {
        const WithoutGil without_gil;
        drop_snapshot(vfs::posix(), path, name);
      },
      "path"_a, "name"_a, "Drop a snapshot of a table that no process has open for writing.");
  m.def(
      "collect_commits",
      [](const std::string& path, std::set<uint64_t> pinned) {
        const WithoutGil without_gil;
        collect_commits(vfs::posix(), path, pinned);
      },
      "path"_a, "pinned"_a, "Remove a table's commits except the newest two, the kept ones and `pinned`.");
  m.def(
      "copy_table",
      [](const std::string& from, const std::string& to, const std::string& snapshot, std::optional<uint64_t> epoch,
         bool for_run, bool may_link, const nb::object& progress) {
        const CheckProgress report = python_progress(progress);
        CopyOptions options;
        options.snapshot = snapshot;
        options.epoch = epoch;
        options.for_run = for_run;
        options.may_link = may_link;
        CopyResult result;
        {
          const WithoutGil without_gil;
          result = copy_table(vfs::posix(), from, to, options, report);
        }
        return nb::make_tuple(result.epoch, result.linked_bytes, result.copied_bytes, result.present_bytes);
      },
      "from_path"_a, "to_path"_a, "snapshot"_a, "epoch"_a.none(), "for_run"_a, "may_link"_a, "progress"_a.none(),
      "Copy a commit's files. Return (epoch, bytes linked, bytes copied, bytes of segments that existed already).");
  bind_feed(m);
}

}  // namespace bunkbed
