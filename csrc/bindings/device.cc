// Mirrors device_map.h.
#include "device/device_map.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "base/error.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

namespace {

using Array = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;
using Plan = DeviceMap::Plan;

// An array over memory that `owner` keeps alive.
template <typename Owner>
Array view(const ArrayVector<int64_t>& values, const std::shared_ptr<Owner>& owner) {
  const nb::capsule keep(new std::shared_ptr<Owner>(owner),
                         [](void* p) noexcept { delete static_cast<std::shared_ptr<Owner>*>(p); });
  return Array(const_cast<int64_t*>(values.data()), {values.size()}, keep);
}

Array plan_array(const Plan& plan, ArrayVector<int64_t> Plan::Arrays::* which) {
  return view((*plan.arrays()).*which, plan.arrays());
}

}  // namespace

void bind_device(nb::module_& m) {
  nb::class_<Plan>(m, "DevicePlan",
                   "The frames of one batch's rows in a device cache, and the records to move. Its arrays stay valid "
                   "without it. Its pins end with the plan or with release().")
      .def_prop_ro(
          "frames", [](const Plan& plan) { return plan_array(plan, &Plan::Arrays::frames); }, nb::rv_policy::automatic,
          "int64[U]: the frame of each of batch.unique().")
      .def_prop_ro(
          "load_ids", [](const Plan& plan) { return plan_array(plan, &Plan::Arrays::load_rows); },
          nb::rv_policy::automatic, "int64[L]: ids whose records must be loaded.")
      .def_prop_ro(
          "load_frames", [](const Plan& plan) { return plan_array(plan, &Plan::Arrays::load_frames); },
          nb::rv_policy::automatic, "int64[L]: the frames to load them into.")
      .def_prop_ro(
          "evict_ids", [](const Plan& plan) { return plan_array(plan, &Plan::Arrays::evict_rows); },
          nb::rv_policy::automatic, "int64[E]: evicted dirty ids, to be written back before their frames are loaded.")
      .def_prop_ro(
          "evict_frames", [](const Plan& plan) { return plan_array(plan, &Plan::Arrays::evict_frames); },
          nb::rv_policy::automatic, "int64[E]: the frames to write them back from.")
      .def(
          "write_numbers", &write_numbers<Plan>, "most"_a, "out"_a,
          "Write frames [U], load_frames [L], evict_frames [E], and what write_numbers() of the batch writes, with the "
          "frame of each id in place of inverse(). Return what that returns.")
      .def("max_numbers", &max_numbers<Plan>, "most"_a, "The most numbers that write_numbers() writes.")
      .def(
          "mark_dirty", [](Plan& plan) { plan.mark_dirty(); }, nb::call_guard<WithoutGil>(),
          "Mark its frames as newer than the table. Call it after their loads and before release().")
      .def(
          "done", [](Plan& plan) { plan.done(); },
          "Report that the plan was executed. A plan that ends without done() or release() is undone.")
      .def(
          "undo", [](Plan& plan) { plan.undo(); }, nb::call_guard<WithoutGil>(),
          "Undo a plan that failed before any load, and release it. Rows to load have no frame again; evicted dirty "
          "rows are in their frames again, unless the table has them. Call it before another plan is made.")
      .def(
          "release", [](Plan& plan) { plan.release(); }, nb::call_guard<WithoutGil>(),
          "Remove the pins. Later calls do nothing.");

  nb::class_<DeviceMap>(m, "DeviceMap",
                        "The map from rows to frames of a device cache. Plans which records to move, from ids alone. "
                        "Thread-safe.")
      .def(nb::new_([](const Table& table, size_t frames) { return DeviceMap::make(table.name(), frames); }), "table"_a,
           "frames"_a)
      .def_prop_ro("frames", &DeviceMap::frames)
      .def_ro_static("WINDOW_FULL", &DeviceMap::kWindowFull)
      .def("expect", &DeviceMap::expect, "batch"_a, nb::call_guard<WithoutGil>(),
           "Add a coming batch to the window that ranks eviction. Return its number, or WINDOW_FULL.")
      .def("forget", &DeviceMap::forget, "number"_a, nb::call_guard<WithoutGil>(),
           "Remove an expected batch that will not come.")
      .def("plan", &DeviceMap::plan, "batch"_a, "number"_a = 0, nb::keep_alive<0, 2>(), nb::call_guard<WithoutGil>(),
           nb::sig("def plan(self, batch: Batch, number: int = 0) -> DevicePlan | None"),
           "Give each row of the batch a frame and pin it. `number`: from expect(), or 0. Return None, with nothing "
           "changed, while other plans pin too many frames. Raise ValueError if the batch has more rows than there "
           "are frames.")
      .def(
          "find",
          [](const DeviceMap& map, const Ids& ids) {
            const size_t n = ids.shape(0);
            auto frames = std::make_shared<ArrayVector<int64_t>>(n);
            {
              const WithoutGil without_gil;
              map.find(ids.data(), n, frames->data());
            }
            return view(*frames, frames);
          },
          "ids"_a, "int64[N]: the frames of ids, -1 for ids without one. Does not touch the frames.")
      .def(
          "dirty",
          [](const DeviceMap& map) {
            std::shared_ptr<DeviceMap::Dirty> found;
            {
              const WithoutGil without_gil;
              found = std::make_shared<DeviceMap::Dirty>(map.dirty());
            }
            return nb::make_tuple(view(found->rows, found), view(found->frames, found));
          },
          nb::sig("def dirty(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], "
                  "Annotated[NDArray[numpy.int64], dict(shape=(None,))]]"),
          "(ids int64[D], frames int64[D]) that are dirty, without evicted rows that are being written back.")
      .def(
          "mark_dirty", [](DeviceMap& map, const Ids& frames) { map.mark_dirty(frames.data(), frames.shape(0)); },
          "frames"_a, nb::call_guard<WithoutGil>(), "Mark these frames as newer than the table.")
      .def(
          "mark_clean", [](DeviceMap& map, const Ids& frames) { map.mark_clean(frames.data(), frames.shape(0)); },
          "frames"_a, nb::call_guard<WithoutGil>(), "Mark these frames as equal to the table.")
      .def(
          "arrived", [](DeviceMap& map, const Ids& ids) { map.arrived(ids.data(), ids.shape(0)); }, "ids"_a,
          nb::call_guard<WithoutGil>(),
          "Report that evicted records of these ids were written back. Table.scatter_records reports it itself if the "
          "map is attached.")
      .def("forget_all", &DeviceMap::forget_all, nb::call_guard<WithoutGil>(),
           "Free every frame, even dirty ones. Raises while plans have pins. Expected batches stay expected.")
      .def(
          "stats",
          [](const DeviceMap& map) {
            const DeviceStats s = map.stats();
            nb::dict d;
            d["hits"] = s.hits;
            d["misses"] = s.misses;
            d["evictions"] = s.evictions;
            d["write_backs"] = s.write_backs;
            d["frames"] = s.frames;
            d["resident"] = s.resident;
            d["pinned"] = s.pinned;
            d["dirty"] = s.dirty;
            d["leaving"] = s.leaving;
            d["plans"] = s.plans;
            d["window_batches"] = s.window_batches;
            d["bytes"] = s.bytes;
            return d;
          },
          nb::sig("def stats(self) -> dict[str, int]"));
}

}  // namespace bunkbed
