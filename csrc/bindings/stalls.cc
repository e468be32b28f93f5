// Mirrors stall.h: shows stalls as the ranges of a profiler.
#include "base/stall.h"

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

namespace {

// Enters a range when a stall begins and leaves it when the stall ends. Takes the GIL under the table's lock, so no
// thread may wait for that lock with the GIL held; no binding does.
class PythonWatch final : public StallWatch {
 public:
  explicit PythonWatch(nb::object make) : make_(std::move(make)), before_(stall_watch) { stall_watch = this; }
  ~PythonWatch() override { stall_watch = before_; }

  void began() noexcept override {
    const nb::gil_scoped_acquire acquire;
    try {
      range_ = make_();
      range_.attr("__enter__")();
    } catch (nb::python_error& error) {
      range_ = nb::object();
      error.discard_as_unraisable("a stall's range");
    }
  }

  void ended() noexcept override {
    const nb::gil_scoped_acquire acquire;
    if (!range_.is_valid()) return;
    try {
      range_.attr("__exit__")(nb::none(), nb::none(), nb::none());
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("a stall's range");
    }
    range_ = nb::object();
  }

  const nb::object& make() const { return make_; }

 private:
  const nb::object make_;
  StallWatch* const before_;
  nb::object range_;
};

}  // namespace

void bind_stalls(nb::module_& m) {
  m.def(
      "with_stalls",
      [](nb::object make, const nb::callable& function, const nb::args& args) {
        const InCore inside;
        const PythonWatch watch(std::move(make));
        return function(*args);
      },
      nb::sig("def with_stalls(make: object, function: object, *args: object) -> object"), "make"_a, "function"_a,
      "args"_a,
      "Return function(*args). Each stall of this thread runs inside a context manager made by make(): a profiler's "
      "range.");
  m.def(
      "stall_ranges",
      []() -> nb::object {
        const auto* watch = static_cast<const PythonWatch*>(stall_watch);
        return watch == nullptr ? nb::none() : watch->make();
      },
      "Return the `make` of this thread's with_stalls(), or None outside of it.");
}

}  // namespace bunkbed
