// Controls with which tests make the shipped module fail everywhere: backends of vfs, failpoints, knobs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/failpoints.h"
#include "bindings/bindings.h"
#include "jobs/index_snapshots.h"
#include "kernels/kernels.h"
#include "store/compactor.h"
#include "table/table.h"
#include "vfs/fault.h"
#include "vfs/powerloss.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

namespace {

template <typename Value, size_t N>
Value named(const std::string& name, const std::pair<const char*, Value> (&values)[N]) {
  std::string known;
  for (const auto& [key, value] : values) {
    if (name == key) return value;
    known += std::string(known.empty() ? "" : ", ") + key;
  }
  throw Error(ErrorKind::kInvalid, "expected one of " + known + "; got '" + name + "'");
}

constexpr std::pair<const char*, vfs::Fault> kFaults[] = {
    {"error", vfs::Fault::kError}, {"interrupt", vfs::Fault::kInterrupt},
    {"short", vfs::Fault::kShort}, {"delay", vfs::Fault::kDelay},
    {"die", vfs::Fault::kDie},     {"die_within", vfs::Fault::kDieWithin},
};
constexpr std::pair<const char*, vfs::Op> kOps[] = {
    {"read", vfs::Op::kRead},
    {"write", vfs::Op::kWrite},
    {"sync", vfs::Op::kSync},
    {"create", vfs::Op::kCreate},
    {"open", vfs::Op::kOpen},
    {"link", vfs::Op::kLink},
    {"remove", vfs::Op::kRemove},
    {"truncate", vfs::Op::kTruncate},
    {"sync_directory", vfs::Op::kSyncDirectory},
    {"make_directories", vfs::Op::kMakeDirectories},
    {"list", vfs::Op::kList},
    {"lock", vfs::Op::kLock},
};
constexpr std::pair<const char*, vfs::Names> kNames[] = {
    {"all", vfs::Names::kAll},
    {"none", vfs::Names::kNone},
    {"prefix", vfs::Names::kPrefix},
    {"subset", vfs::Names::kSubset},
};
constexpr std::pair<const char*, vfs::Sectors> kSectors[] = {
    {"kept", vfs::Sectors::kKept},
    {"dropped", vfs::Sectors::kDropped},
    {"trashed", vfs::Sectors::kTrashed},
    {"mixed", vfs::Sectors::kMixed},
};
constexpr std::pair<const char*, FailpointAction> kActions[] = {
    {"count", FailpointAction::kCount},
    {"error", FailpointAction::kError},
    {"die", FailpointAction::kDie},
    {"delay", FailpointAction::kDelay},
};

// Tables keep a reference to the backend that they were opened with, so no backend is ever destroyed.
void use(std::shared_ptr<vfs::Vfs> backend) {
  static auto* const used = new std::vector<std::shared_ptr<vfs::Vfs>>;
  vfs::use(backend.get());
  if (backend != nullptr) used->push_back(std::move(backend));
}

}  // namespace

void bind_testing(nb::module_& m) {
  nb::class_<vfs::Vfs>(m, "Vfs", "A backend for files.");
  nb::class_<vfs::FaultVfs, vfs::Vfs>(m, "FaultVfs", "Fails chosen operations.")
      .def("__init__", [](vfs::FaultVfs* self) { new (self) vfs::FaultVfs(vfs::posix()); })
      .def(
          "set_fault",
          [](vfs::FaultVfs& self, uint64_t at, const std::string& fault, int error_number, bool and_all_later) {
            self.set_fault(at, named(fault, kFaults), error_number, and_all_later);
          },
          "at"_a, "fault"_a = "error", "error_number"_a = 0, "and_all_later"_a = false,
          "Make operation number `at`, counted from now, fail: error, interrupt, short, delay, die or die_within.")
      .def(
          "fail_all",
          [](vfs::FaultVfs& self, const std::string& op, int error_number) {
            self.fail_all(named(op, kOps), error_number);
          },
          "op"_a, "error_number"_a, "Make every operation of a kind fail until heal().")
      .def("heal", &vfs::FaultVfs::heal)
      .def("set_delay", &vfs::FaultVfs::set_delay, "seconds"_a)
      .def("count", &vfs::FaultVfs::count, "Return the number of operations since set_fault().")
      .def("repeat_every", &vfs::FaultVfs::repeat_every, "every"_a, "most"_a = 0,
           "Make each `every`-th operation after the chosen one fail, too; at most `most` in all, 0: no bound.")
      .def("struck", &vfs::FaultVfs::struck, "Return the number of operations that failed since set_fault().")
      .def("count_reads", &vfs::FaultVfs::count_reads, "value"_a,
           "Set whether reads, opens and lists count as operations.")
      .def("skip_syncs", &vfs::FaultVfs::skip_syncs, "value"_a);

  nb::class_<vfs::CrashState>(m, "CrashState", "The files of a disk after power loss.")
      .def("digest", &vfs::CrashState::digest)
      .def("write", &vfs::CrashState::write, "path"_a, nb::call_guard<WithoutGil>());
  nb::class_<vfs::PowerlossVfs, vfs::Vfs>(m, "PowerlossVfs",
                                          "Records all operations below a directory; see powerloss.h.")
      .def(
          "__init__", [](vfs::PowerlossVfs* self, const std::string& root) { new (self) vfs::PowerlossVfs(root); },
          "root"_a)
      .def("now", &vfs::PowerlossVfs::now, "Return the moment after all operations so far.")
      .def("describe", &vfs::PowerlossVfs::describe, "moment"_a)
      .def(
          "crash",
          [](vfs::PowerlossVfs& self, uint64_t moment, const std::string& names, const std::string& sectors,
             uint64_t seed, const std::vector<std::pair<std::string, std::string>>& ignored) {
            std::vector<vfs::IgnoredSync> rules;
            for (const auto& [change, name] : ignored) rules.push_back({change, name});
            const vfs::Names which = named(names, kNames);
            const vfs::Sectors what = named(sectors, kSectors);
            const WithoutGil without_gil;
            return self.crash(moment, which, what, seed, rules);
          },
          "moment"_a, "names"_a, "sectors"_a, "seed"_a,
          "ignored"_a = std::vector<std::pair<std::string, std::string>>{},
          "Return the disk after power loss at a moment. names: all, none, prefix, subset; sectors: kept, dropped, "
          "trashed, "
          "mixed; ignored: (change, name prefix) of syncs that count as missing, change \"\" for those of files.");
  m.def("use_vfs", &use, "backend"_a.none(), "Use this backend for files from now on; None: the real one.");

  m.def(
      "arm_failpoint",
      [](const std::string& name, uint64_t nth, const std::string& action, double delay_s) {
        arm_failpoint(name, nth, named(action, kActions), delay_s);
      },
      "name"_a, "nth"_a, "action"_a, "delay_s"_a = 0.0,
      "Set an action for the nth time (0: every time) that the place is reached: count, error, die or delay. \"\": "
      "count all places.");
  m.def("disarm_failpoints", &disarm_failpoints);
  m.def("failpoint_counts", &failpoint_counts, "Return (name, times reached) of each failpoint.");
  m.def("failpoint", [](const std::string& name) { failpoint(name.c_str()); }, "name"_a, "A failpoint in Python code.");
  m.def(
      "crc32c_of_parts",
      [](const nb::bytes& data, size_t part) {
        if (part == 0) throw Error(ErrorKind::kInvalid, "a part must have a byte at least");
        const auto* const bytes = static_cast<const char*>(data.data());
        uint32_t all = 0;
        const WithoutGil without_gil;
        for (size_t at = 0; at < data.size(); at += part) {
          all ^= kernels().crc32c(0, bytes + at, std::min(part, data.size() - at));
        }
        return all;
      },
      "data"_a, "part"_a, "Return the exclusive or of the checksums of parts of so many bytes, to measure their cost.");
  m.def(
      "set_index_snapshots",
      [](uint64_t rows, bool in_line) {
        index_snapshot_rows = rows;
        index_snapshots_in_line = in_line;
      },
      "rows"_a = 100'000, "in_line"_a = false,
      "Set the fewest rows of a table that takes index snapshots; with in_line they are taken within a commit.");
  m.def(
      "set_compaction_slack", [](uint64_t bytes) { compaction_slack_bytes = bytes; }, "bytes"_a,
      "Set the dead bytes that never start compaction (default: 256 KiB), for tests of small tables.");
}

}  // namespace bunkbed
