// Mirrors table.h. Arrays come checked from table/table.py: contiguous, of the right dtype and shape.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "base/error.h"
#include "base/float_mode.h"
#include "bindings/bindings.h"
#include "device/device_map.h"
#include "scan/removable.h"
#include "scan/scan.h"
#include "table/counted_ids.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

namespace {

OptimizerSpec optimizer_spec(const nb::dict& values) {
  OptimizerSpec spec;
  const auto number = [&values](const char* name, double fallback) {
    return values.contains(name) ? nb::cast<double>(values[name]) : fallback;
  };
  const auto kind = nb::cast<std::string>(values["kind"]);
  spec.kind = kind == "sgd"               ? OptimizerKind::kSgd
              : kind == "adagrad"         ? OptimizerKind::kAdagrad
              : kind == "rowwise_adagrad" ? OptimizerKind::kRowwiseAdagrad
                                          : OptimizerKind::kAdam;
  spec.lr = number("lr", 0.0);
  spec.eps = number("eps", 0.0);
  spec.beta1 = number("beta1", 0.0);
  spec.beta2 = number("beta2", 0.0);
  spec.weight_decay = number("weight_decay", 0.0);
  spec.initial_accumulator = number("initial_accumulator", 0.0);
  spec.decoupled = nb::cast<bool>(values["decoupled"]);
  if (values.contains("state_dtype") && nb::cast<std::string>(values["state_dtype"]) == "bfloat16") {
    spec.state_dtype = DType::kBFloat16;
  }
  return spec;
}

nb::dict optimizer_values(const OptimizerSpec& spec) {
  nb::dict values;
  values["lr"] = spec.lr;
  values["weight_decay"] = spec.weight_decay;
  values["decoupled"] = spec.decoupled;
  if (spec.kind != OptimizerKind::kSgd) values["state_dtype"] = dtype_name(spec.state_dtype);
  switch (spec.kind) {
    case OptimizerKind::kSgd:
      values["kind"] = "sgd";
      break;
    case OptimizerKind::kAdagrad:
      values["kind"] = "adagrad";
      values["eps"] = spec.eps;
      values["initial_accumulator"] = spec.initial_accumulator;
      break;
    case OptimizerKind::kRowwiseAdagrad:
      values["kind"] = "rowwise_adagrad";
      values["eps"] = spec.eps;
      break;
    case OptimizerKind::kAdam:
      values["kind"] = "adam";
      values["eps"] = spec.eps;
      values["beta1"] = spec.beta1;
      values["beta2"] = spec.beta2;
      break;
  }
  return values;
}

nb::dict stats_values(const TableStats& s) {
  nb::dict d;
  d["lookups"] = s.lookups;
  d["updates"] = s.updates;
  d["ids"] = s.ids;
  d["unique_rows"] = s.store.unique_rows;
  d["hits"] = s.store.hits;
  d["misses"] = s.store.misses;
  d["first_touches"] = s.store.first_touches;
  d["admitted_rows"] = s.store.admitted_rows;
  d["refused_rows"] = s.store.refused_rows;
  d["counted_ids"] = s.counted_ids;
  d["evictions"] = s.store.evictions;
  d["written_back"] = s.store.written_back;
  d["reads"] = s.log.reads;
  d["read_records"] = s.log.read_records();
  d["single_records"] = s.log.single_records;
  d["merged_records"] = s.log.merged_records;
  d["swept_records"] = s.log.swept_records;
  d["read_bytes"] = s.log.read_bytes;
  d["written_bytes"] = s.log.written_bytes;
  d["written_records"] = s.log.written_records;
  d["read_wait_s"] = s.log.read_wait_s;
  d["stall_s"] = s.stall_s;
  d["staged_rows"] = s.staged_rows;
  d["window_batches"] = s.window_batches;
  d["window_bytes"] = s.window_bytes;
  d["staging_depth"] = s.staging_depth;
  d["compactions"] = s.compactions;
  d["compacted_records"] = s.compacted_records;
  d["commits"] = s.commits;
  d["ram_bytes"] = s.ram_bytes;
  d["ram_budget_bytes"] = s.ram_budget_bytes;
  d["frames"] = s.frames;
  d["frame_capacity"] = s.frame_capacity;
  d["dirty_rows"] = s.dirty_rows;
  d["stored_rows"] = s.stored_rows;
  d["directory_bytes"] = s.directory_bytes;
  d["disk_bytes"] = s.disk_bytes;
  d["disk_limit_bytes"] = s.disk_limit_bytes;
  d["snapshot_bytes"] = s.snapshot_bytes;
  d["live_bytes"] = s.live_bytes;
  d["segments"] = s.segments;
  d["tombstones"] = s.tombstones;
  d["written_counts"] = s.written_counts;
  d["open_files"] = s.open_files;
  d["index_snapshot_bytes"] = s.index_snapshot_bytes;
  d["indexed_records"] = s.indexed_records;
  return d;
}

TableSpec table_spec(int64_t num_rows, uint32_t dim, int dtype, const std::tuple<std::string, double, double>& init,
                     uint64_t seed, const nb::dict& optimizer, bool belongs_to_run) {
  TableSpec spec;
  spec.num_rows = num_rows;
  spec.dim = dim;
  spec.dtype = static_cast<DType>(dtype);
  spec.init = init_spec(std::get<0>(init), std::get<1>(init), std::get<2>(init), seed);
  spec.optimizer = optimizer_spec(optimizer);
  spec.belongs_to_run = belongs_to_run;
  return spec;
}

nb::dict removable_values(const Removable& found) {
  const size_t n = found.first.size();
  const size_t bytes = n * sizeof(uint64_t);
  auto* keys = static_cast<uint64_t*>(allocate_array(bytes));
  const nb::object own_keys = own_block(keys, bytes);
  auto* ids = static_cast<int64_t*>(allocate_array(bytes));
  const nb::object own_ids = own_block(ids, bytes);
  for (size_t i = 0; i < n; ++i) {
    keys[i] = found.first[i].key;
    ids[i] = found.first[i].id;
  }
  nb::list ages, counts;
  for (const uint64_t rows : found.ages) ages.append(rows);
  for (const uint64_t rows : found.counts) counts.append(rows);
  nb::dict d;
  d["rows"] = found.rows;
  d["expired"] = found.expired;
  d["changes"] = found.changes;
  d["keys"] = nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>(keys, {n}, own_keys);
  d["ids"] = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(ids, {n}, own_ids);
  d["ages"] = ages;
  d["counts"] = counts;
  return d;
}

// Runs a call of the core: without the GIL, in the default floating-point mode.
template <typename Call>
auto unlocked(Call&& call) {
  const WithoutGil without_gil;
  const DefaultFloatMode mode;
  return call();
}

}  // namespace

void bind_table(nb::module_& m) {
  nb::class_<Retention>(m, "Retention", "The rules of a table by which rows go; 0 is no rule. See bunkbed.Retention.")
      .def(
          "__init__",
          [](Retention* self, int64_t expire, int clock, int64_t max_rows, int evict, int64_t keep, double admit,
             uint32_t admit_from) {
            new (self) Retention{
                expire,    static_cast<AgeClock>(clock), max_rows, static_cast<EvictFirst>(evict), keep, admit,
                admit_from};
          },
          "expire"_a, "clock"_a, "max_rows"_a, "evict"_a, "keep"_a, "admit"_a, "admit_from"_a)
      .def_ro("expire", &Retention::expire)
      .def_prop_ro("clock", [](const Retention& r) { return static_cast<int>(r.clock); })
      .def_ro("max_rows", &Retention::max_rows)
      .def_prop_ro("evict", [](const Retention& r) { return static_cast<int>(r.evict); })
      .def_ro("keep", &Retention::keep)
      .def_ro("admit", &Retention::admit)
      .def_ro("admit_from", &Retention::admit_from);

  nb::class_<TableSpec>(m, "TableSpec", "The definition of a table in the core.")
      .def(
          "__init__",
          [](TableSpec* self, int64_t num_rows, uint32_t dim, int dtype, const std::string& init_kind, double init_a,
             double init_b, uint64_t seed, const nb::dict& optimizer, const Retention& retention, bool belongs_to_run,
             bool is_scratch) {
            new (self) TableSpec(
                table_spec(num_rows, dim, dtype, {init_kind, init_a, init_b}, seed, optimizer, belongs_to_run));
            self->retention = retention;
            self->is_scratch = is_scratch;
          },
          "num_rows"_a, "dim"_a, "dtype"_a, "init_kind"_a, "init_a"_a, "init_b"_a, "seed"_a, "optimizer"_a,
          "retention"_a, "belongs_to_run"_a, "is_scratch"_a)
      .def("minimum_ram", [](const TableSpec& spec, uint64_t stored_rows,
                             bool on_disk) { return minimum_ram(spec, stored_rows, on_disk); })
      .def("rows_within",
           [](const TableSpec& spec, size_t ram_bytes, bool on_disk) { return rows_within(spec, ram_bytes, on_disk); })
      .def("wanted_ram", [](const TableSpec& spec, bool on_disk) { return wanted_ram(spec, on_disk); })
      .def(
          "memory_use",
          [](const TableSpec& spec, uint64_t stored_rows, size_t ram_bytes, size_t read_unit, bool on_disk) {
            const MemoryUse use = memory_use(spec, stored_rows, ram_bytes, read_unit, on_disk);
            nb::dict d;
            d["record_bytes"] = use.record_bytes;
            d["stored_bytes"] = use.stored_bytes;
            d["frame_bytes"] = use.frame_bytes;
            d["frames"] = use.frames;
            d["directory_bytes"] = use.directory_bytes;
            d["fixed_bytes"] = use.fixed_bytes;
            d["most_segments"] = use.most_segments;
            return d;
          },
          "stored_rows"_a, "ram_bytes"_a, "read_unit"_a, "on_disk"_a)
      .def_ro("num_rows", &TableSpec::num_rows)
      .def_ro("dim", &TableSpec::dim)
      .def_prop_ro("dtype", [](const TableSpec& spec) { return static_cast<int>(spec.dtype); })
      .def_prop_ro("init_kind", [](const TableSpec& spec) { return static_cast<int>(spec.init.kind); })
      .def_prop_ro("init_a", [](const TableSpec& spec) { return spec.init.a; })
      .def_prop_ro("init_b", [](const TableSpec& spec) { return spec.init.b; })
      .def_prop_ro("seed", [](const TableSpec& spec) { return spec.init.seed; })
      .def_prop_ro("optimizer", [](const TableSpec& spec) { return optimizer_values(spec.optimizer); })
      .def_ro("retention", &TableSpec::retention)
      .def_ro("belongs_to_run", &TableSpec::belongs_to_run)
      .def_ro("is_scratch", &TableSpec::is_scratch);

  m.def(
      "create",
      [](const std::string& path, const std::string& name, const TableSpec& spec, size_t ram_bytes, uint64_t disk_bytes,
         const std::optional<std::pair<nb::bytes, uint64_t>>& identity) {
        std::optional<Identity> of;
        if (identity.has_value()) {
          const auto& [uuid, epoch] = *identity;
          of.emplace();
          if (uuid.size() != of->uuid.size() || epoch == 0) throw nb::value_error("no uuid and number of a commit");
          std::memcpy(of->uuid.data(), uuid.c_str(), uuid.size());
          of->epoch = epoch;
        }
        return unlocked([&] { return Table::create(vfs::current(), path, name, spec, ram_bytes, disk_bytes, of); });
      },
      "path"_a, "name"_a, "spec"_a, "ram_bytes"_a, "disk_bytes"_a, "identity"_a = nb::none(),
      "Make a table. `identity`: (uuid, number of the first commit) of the table that it replaces.");
  m.def(
      "open",
      [](const std::string& path, const std::string& name, bool writable, size_t ram_bytes, const std::string& snapshot,
         std::optional<uint64_t> epoch, bool through_run, uint64_t disk_bytes) {
        OpenOptions options;
        options.writable = writable;
        options.ram_bytes = ram_bytes;
        options.disk_bytes = disk_bytes;
        options.snapshot = snapshot;
        options.epoch = epoch;
        options.through_run = through_run;
        return unlocked([&] { return Table::open(vfs::current(), path, name, options); });
      },
      "path"_a, "name"_a, "writable"_a, "ram_bytes"_a, "snapshot"_a, "epoch"_a.none(), "through_run"_a, "disk_bytes"_a);
  m.def(
      "read_spec",
      [](const std::string& path, const std::string& snapshot, std::optional<uint64_t> epoch) {
        const Manifests manifests(vfs::current(), path);
        const Manifest manifest = !snapshot.empty()   ? manifests.load_snapshot(snapshot)
                                  : epoch.has_value() ? manifests.load(*epoch)
                                                      : manifests.load_newest();
        return nb::make_tuple(spec_of(manifest), manifest.stored_rows, manifest.counted_ids);
      },
      "path"_a, "snapshot"_a, "epoch"_a.none(),
      "Return (TableSpec, stored rows, counted ids) of a commit; default: the newest.");

  nb::class_<PendingCommit>(m, "PendingCommit", "A commit that was started.")
      .def("wait", [](PendingCommit& commit) { return unlocked([&] { return commit.wait(); }); })
      .def("is_over", &PendingCommit::is_over);

  nb::class_<Table>(m, "Table", "One table; see bunkbed.Table.")
      .def("lookup",
           [](Table& t, const Ids& ids, bool touch, const FloatsOut& out) {
             unlocked([&] { t.lookup(ids.data(), ids.shape(0), touch, out.data()); });
           })
      .def("batch",
           [](Table& t, const Ids& ids) { return unlocked([&] { return t.batch(ids.data(), ids.shape(0)); }); })
      .def("lookup_batch", [](Table& t, const Batch& batch, bool touch,
                              const FloatsOut& out) { unlocked([&] { t.lookup(batch, touch, out.data()); }); })
      .def(
          "lookup_bags",
          [](Table& t, const Ids& ids, const Ids& offsets, int pooling,
             const std::optional<nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>>& weights,
             bool touch, const FloatsOut& out) {
            unlocked([&] {
              t.lookup_bags(ids.data(), ids.shape(0), offsets.data(), offsets.shape(0), static_cast<Pooling>(pooling),
                            weights.has_value() ? weights->data() : nullptr, touch, out.data());
            });
          },
          "ids"_a, "offsets"_a, "pooling"_a, "weights"_a.none(), "touch"_a, "out"_a)
      .def(
          "update",
          [](Table& t, const Ids& ids, const FloatsIn& grads, std::optional<double> lr, std::optional<int64_t> step) {
            unlocked([&] { t.update(ids.data(), ids.shape(0), grads.data(), lr, step); });
          },
          "ids"_a, "grads"_a, "lr"_a.none(), "step"_a.none())
      .def(
          "update_batch",
          [](Table& t, const Batch& batch, const FloatsIn& sums, std::optional<double> lr,
             std::optional<int64_t> step) { unlocked([&] { t.update(batch, sums.data(), lr, step); }); },
          "batch"_a, "sums"_a, "lr"_a.none(), "step"_a.none())
      .def(
          "check_change",
          [](Table& t, const Batch& batch, bool is_step, std::optional<int64_t> step) {
            unlocked([&] { t.check_change(batch, is_step, std::nullopt, step); });
          },
          "batch"_a, "is_step"_a, "step"_a.none(),
          "Make the checks of update_batch() with this or the next step, or of set(), and their room.")
      .def("stage", [](Table& t, const Ids& ids) { unlocked([&] { t.stage(ids.data(), ids.shape(0)); }); })
      .def(
          "expect",
          [](Table& t, const Ids& ids, uint32_t most) {
            return unlocked([&] { return t.expect(ids.data(), ids.shape(0), most); });
          },
          "ids"_a, "most"_a)
      .def("forget", [](Table& t, uint32_t batch) { unlocked([&] { t.forget(batch); }); })
      .def_ro_static("WINDOW_FULL", &Table::kWindowFull)
      .def(
          "advance",
          [](Table& t, uint32_t over, uint32_t current, uint32_t depth) {
            unlocked([&] { t.advance(over, current, depth); });
          },
          "over"_a, "current"_a, "depth"_a)
      .def("get", [](Table& t, const Ids& ids, size_t field,
                     const FloatsOut& out) { unlocked([&] { t.get(ids.data(), ids.shape(0), field, out.data()); }); })
      .def("set",
           [](Table& t, const Ids& ids, size_t field, const FloatsIn& values) {
             unlocked([&] { t.set(ids.data(), ids.shape(0), field, values.data()); });
           })
      .def(
          "erase",
          [](Table& t, const Ids& ids, std::optional<uint64_t> changes) {
            const Erased erased = unlocked([&] { return t.erase(ids.data(), ids.shape(0), changes); });
            return nb::make_tuple(erased.rows, erased.changes);
          },
          "ids"_a, "changes"_a = nb::none(),
          "Delete rows; return how many were stored, and the number of changes. Raises if that was not `changes` "
          "before.")
      .def(
          "forget_counts",
          [](Table& t, int64_t before) { return unlocked([&] { return CountedIds(&t).forget(before); }); }, "before"_a,
          "Forget the counts of ids that were last named before this time; return how many.")
      .def(
          "counted",
          [](Table& t, uint64_t part, uint64_t parts) {
            const CountedIds::Found found = unlocked([&] { return CountedIds(&t).find(part, parts); });
            const auto array = [](const std::vector<int64_t>& values) {
              const size_t bytes = values.size() * sizeof(int64_t);
              auto* const memory = static_cast<int64_t*>(allocate_array(bytes));
              std::copy(values.begin(), values.end(), memory);
              return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(memory, {values.size()}, own_block(memory, bytes));
            };
            return nb::make_tuple(array(found.ids), array(found.counts), array(found.times), found.since);
          },
          "part"_a, "parts"_a,
          "Return ids of a part that steps have named and not stored, their counts and times, and the bound of times.")
      .def(
          "set_counts",
          [](Table& t, const Ids& ids, const Ids& counts, const Ids& times) {
            unlocked([&] { CountedIds(&t).set(ids.data(), counts.data(), times.data(), ids.shape(0)); });
          },
          "ids"_a, "counts"_a, "times"_a, "Give ids that are not stored the counts of another table.")
      .def("changes", [](Table& t) { return unlocked([&] { return t.changes(); }); })
      .def("contains",
           [](Table& t, const Ids& ids, const nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>& out) {
             unlocked([&] { t.contains(ids.data(), ids.shape(0), out.data()); });
           })
      .def("gather_records",
           [](Table& t, const Ids& ids, const RecordsOut& out) {
             unlocked([&] { t.gather_records(ids.data(), ids.shape(0), reinterpret_cast<std::byte*>(out.data())); });
           })
      .def("scatter_records",
           [](Table& t, const Ids& ids, const RecordsIn& in) {
             unlocked(
                 [&] { t.scatter_records(ids.data(), ids.shape(0), reinterpret_cast<const std::byte*>(in.data())); });
           })
      .def("append_records",
           [](Table& t, const Ids& ids, const RecordsIn& in) {
             if (in.shape(0) != ids.shape(0) || in.shape(1) != t.payload_bytes()) {
               throw nb::value_error("append_records() takes one whole record for each id");
             }
             unlocked(
                 [&] { t.append_records(ids.data(), ids.shape(0), reinterpret_cast<const std::byte*>(in.data())); });
           })
      .def(
          "set_device_cache",
          [](Table& t, std::shared_ptr<DeviceMap> map, nb::object write_back) {
            if (map == nullptr) {
              unlocked([&] { t.set_device_cache(nullptr, nullptr); });
              return;
            }
            // Threads without the GIL copy and drop this pointer, so its deleter takes the GIL.
            const std::shared_ptr<nb::object> call(new nb::object(std::move(write_back)), [](nb::object* object) {
              const nb::gil_scoped_acquire acquire;
              delete object;
            });
            std::function<void()> asked = [call] {
              const nb::gil_scoped_acquire acquire;
              if (!call->is_none()) (*call)();
            };
            unlocked([&] { t.set_device_cache(std::move(map), std::move(asked)); });
          },
          "map"_a.none(), "write_back"_a.none(),
          "Attach a device cache's map. `write_back` is called before a commit, a scan or a rewind, and must scatter "
          "the cache's rows. None, None detaches it.")
      .def(
          "commit",
          [](Table& t, const std::optional<std::string>& meta, const std::string& keep) {
            return unlocked([&] { return t.commit(meta, keep); });
          },
          "meta"_a.none(), "keep"_a)
      .def(
          "begin_commit",
          [](Table& t, const std::optional<std::string>& meta, const std::string& keep) {
            return unlocked([&] { return t.begin_commit(meta, keep); });
          },
          "meta"_a.none(), "keep"_a)
      .def("write_dirty", [](Table& t) { unlocked([&] { t.write_dirty(); }); })
      .def("snapshots",
           [](Table& t) {
             std::vector<std::pair<std::string, uint64_t>> found;
             for (const auto& snapshot : unlocked([&] { return t.snapshots(); })) {
               found.emplace_back(snapshot.name, snapshot.epoch);
             }
             return found;
           })
      .def("drop", [](Table& t, const std::string& name) { unlocked([&] { t.drop(name); }); })
      .def(
          "rewind",
          [](Table& t, const std::string& name, std::optional<uint64_t> epoch) {
            unlocked([&] { t.rewind(name, epoch); });
          },
          "name"_a, "epoch"_a.none())
      .def(
          "refresh", [](Table& t, std::optional<uint64_t> to) { return unlocked([&] { return t.refresh(to); }); },
          nb::arg("to") = nb::none())
      .def("require_disk_to_keep",
           [](Table& t, const std::string& keep) { unlocked([&] { t.require_disk_to_keep(keep); }); })
      .def("set_pinned_epochs",
           [](Table& t, std::set<uint64_t> epochs, std::set<uint64_t> kept) {
             unlocked([&] { t.set_pinned_epochs(std::move(epochs), std::move(kept)); });
           })
      .def(
          "collect", [](Table& t, size_t newest) { unlocked([&] { t.collect(newest); }); }, "newest"_a = 2)
      .def("compact", [](Table& t) { return unlocked([&] { return t.compact(); }); })
      .def("close", [](Table& t) { unlocked([&] { t.close(); }); })
      .def("set_ram", [](Table& t, size_t bytes) { unlocked([&] { t.set_ram(bytes); }); })
      .def("set_read_gap", [](Table& t, size_t bytes) { unlocked([&] { t.set_read_gap(bytes); }); })
      .def("set_optimizer",
           [](Table& t, const nb::dict& values) {
             const OptimizerSpec spec = optimizer_spec(values);
             unlocked([&] { t.set_optimizer(spec); });
           })
      .def("optimizer", [](Table& t) { return optimizer_values(unlocked([&] { return t.changeable().optimizer; })); })
      .def("set_retention", [](Table& t, const Retention& rules) { unlocked([&] { t.set_retention(rules); }); })
      .def("retention", [](Table& t) { return unlocked([&] { return t.changeable().retention; }); })
      .def("clock", [](Table& t) { return unlocked([&] { return t.clock(); }); })
      .def("set_clock", [](Table& t, int64_t now) { unlocked([&] { t.set_clock(now); }); })
      .def(
          "removable",
          [](Table& t, const Retention& rules, int64_t now, size_t most, bool only_expired, uint64_t after_key,
             int64_t after_id) {
            return removable_values(
                unlocked([&] { return find_removable(t, rules, now, most, only_expired, {after_key, after_id}); }));
          },
          "rules"_a, "now"_a, "most"_a, "only_expired"_a, "after_key"_a, "after_id"_a,
          "Return the rows that a sweep removes first, in their order, and how many rows there are; see "
          "scan/removable.h.")
      .def("stats", [](Table& t) { return stats_values(unlocked([&] { return t.stats(); })); })
      .def("step", [](Table& t) { return unlocked([&] { return t.step(); }); })
      .def("epoch", [](Table& t) { return unlocked([&] { return t.epoch(); }); })
      .def("is_changed", [](Table& t) { return unlocked([&] { return t.is_changed(); }); })
      .def(
          "uncommitted",
          [](Table& t) {
            const Table::Uncommitted found = unlocked([&] { return t.uncommitted(); });
            return nb::make_tuple(found.rows, found.is_exact, found.steps);
          },
          "Return the changes since the last commit: (rows, whether that is exact or an upper bound, steps).")
      .def("meta", [](Table& t) { return unlocked([&] { return t.meta(); }); })
      .def("uuid", [](Table& t) { return nb::bytes(t.uuid().data(), t.uuid().size()); })
      .def("payload_bytes", &Table::payload_bytes)
      .def("fields", [](Table& t) {
        nb::list fields;
        for (const Field& field : t.fields()) fields.append(nb::make_tuple(field.name, field.length));
        return fields;
      });

  nb::class_<Scan>(m, "Scan", "A scan of every stored row.")
      .def(
          "__init__",
          [](Scan* self, Table* table, const std::vector<size_t>& fields) {
            unlocked([&] { new (self) Scan(table, fields); });
          },
          "table"_a, "fields"_a, nb::keep_alive<1, 2>())
      .def("next_records",
           [](Scan& scan, const nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& ids,
              const RecordsOut& records) {
             return unlocked([&] {
               return scan.next_records(ids.shape(0), ids.data(), reinterpret_cast<std::byte*>(records.data()));
             });
           })
      .def("next", [](Scan& scan, const nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& ids,
                      const std::vector<FloatsOut>& values) {
        std::vector<float*> out;
        for (const FloatsOut& one : values) out.push_back(one.data());
        return unlocked([&] { return scan.next(ids.shape(0), ids.data(), out); });
      });
}

}  // namespace bunkbed
