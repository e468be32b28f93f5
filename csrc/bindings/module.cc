// The Python module. Mirrors the headers; every call releases the GIL while the core works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <cerrno>
#include <cmath>
#include <new>
#include <stdexcept>

#include "base/error.h"
#include "base/fault.h"
#include "base/float_mode.h"
#include "base/memory.h"
#include "base/workers.h"
#include "batch/gradients.h"
#include "bindings/bindings.h"
#include "commit/manifests.h"
#include "format/format.h"
#include "format/optimizer.h"
#include "kernels/kernels.h"
#include "probe/probe.h"
#include "store/compactor.h"
#include "vfs/batch_reads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian and so is every host so far");

const char* hint_for(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return "; nothing was changed or lost: free some space and call again";
    case EACCES:
    case EPERM:
    case EROFS:
      return "; give write permission, or open the table with mode=\"r\"";
    default:
      return "";
  }
}

void raise(const Error& error) {
  const auto set = [&error](nb::handle type) { PyErr_SetString(type.ptr(), error.what()); };
  const auto ours = [&set](const char* name) { set(nb::module_::import_("bunkbed.errors").attr(name)); };
  switch (error.kind()) {
    case ErrorKind::kInvalid:
      return set(PyExc_ValueError);
    case ErrorKind::kIndex:
      return set(PyExc_IndexError);
    case ErrorKind::kExists:
      return set(PyExc_FileExistsError);
    case ErrorKind::kNotFound:
      return set(PyExc_FileNotFoundError);
    case ErrorKind::kMemory:
      return set(PyExc_MemoryError);
    case ErrorKind::kFormat:
      return ours("FormatError");
    case ErrorKind::kCorruption:
      return ours("CorruptionError");
    case ErrorKind::kLocked:
      return ours("TableLockedError");
    case ErrorKind::kClosed:
      return ours("TableClosedError");
    case ErrorKind::kReadOnly:
      return ours("ReadOnlyError");
    case ErrorKind::kBroken:
      return ours("BunkbedError");
    case ErrorKind::kSystem:
    case ErrorKind::kSync: {
      const std::string text = std::string(error.what()) + hint_for(error.error_number());
      const nb::object value =
          nb::borrow(PyExc_OSError)(error.error_number(), nb::str(text.c_str()), nb::str(error.path().c_str()));
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
      return;
    }
  }
}

constexpr const char* kNoMemory =
    "the system has no memory for what this call needs: give it fewer ids at a time, or the table less ram=";

Simd simd_of(const std::string& name) {
  if (name == "scalar") return Simd::kScalar;
  if (name == "avx2") return Simd::kAvx2;
  if (name == "avx512") return Simd::kAvx512;
  if (name == "auto") {
    return simd_supported(Simd::kAvx512) ? Simd::kAvx512 : simd_supported(Simd::kAvx2) ? Simd::kAvx2 : Simd::kScalar;
  }
  throw Error(ErrorKind::kInvalid, "simd must be one of scalar, avx2, avx512, auto; got '" + name + "'");
}

#if defined(__clang__)
constexpr const char* kCompiler = __VERSION__;  // contains the compiler's name
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

const char* simd_name(Simd level) {
  return level == Simd::kAvx512 ? "avx512" : level == Simd::kAvx2 ? "avx2" : "scalar";
}

}  // namespace

// A block that a capsule frees.
struct OwnedBlock {
  void* address;
  size_t bytes;
};

nb::object own_block(void* address, size_t bytes) {
  return nb::capsule(new OwnedBlock{address, bytes}, [](void* p) noexcept {
    const auto* block = static_cast<OwnedBlock*>(p);
    free_array(block->address, block->bytes);
    delete block;
  });
}

InitSpec init_spec(const std::string& kind, double a, double b, uint64_t seed) {
  InitSpec spec;
  spec.kind = kind == "zeros" ? InitKind::kZeros : kind == "normal" ? InitKind::kNormal : InitKind::kUniform;
  spec.a = a;
  spec.b = b;
  spec.seed = seed;
  return spec;
}

NB_MODULE(_native, m) {
  m.doc() = "The native core. Use the public names in `bunkbed`; this module's may change.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    } catch (const OutOfMemory& error) {
      PyErr_SetString(PyExc_MemoryError, error.what());
    } catch (const std::bad_alloc&) {
      PyErr_SetString(PyExc_MemoryError, kNoMemory);
    } catch (const std::length_error&) {  // more elements than an address space holds
      PyErr_SetString(PyExc_MemoryError, kNoMemory);
    }
  });
  // Tables that are still open when the interpreter exits are not leaks.
  nb::set_leak_warnings(false);
  (void)kernels();  // a bad BUNKBED_SIMD is reported at import

  bind_batch(m);
  bind_losses(m);
  bind_ranks(m);
  bind_seen_pairs(m);
  bind_device(m);
  bind_stalls(m);
  bind_table(m);
  bind_many(m);
  bind_text_rows(m);
  bind_maintenance(m);
  bind_files(m);
  bind_testing(m);

  m.def("close_door", &InCore::close_door, "At exit: make later calls of other threads raise SystemExit.");
  m.def("num_inside", &InCore::num_inside, "Return the number of calls of other threads inside the core.");
  m.def("simd", [] { return simd_name(current_simd()); }, "Return the instruction set in use.");
  m.def(
      "set_simd", [](const std::string& name) { set_simd(simd_of(name)); }, "name"_a,
      "Use 'scalar', 'avx2', 'avx512' or 'auto' kernels, process-wide. All give the same bits.");
  m.def(
      "io", [] { return vfs::current_io() == vfs::Io::kUring ? "uring" : "threads"; },
      "Return what makes the reads of many rows: 'uring' (the kernel's io_uring) or 'threads'.");
  m.def("set_io", &vfs::set_io, "name"_a,
        "Use 'uring', 'threads' or 'auto' for later reads, process-wide. All give the same bits.");
  m.def(
      "io_counts",
      [] {
        const vfs::IoCounts counts = vfs::io_counts();
        nb::dict found;
        found["uring"] = counts.uring;
        found["threads"] = counts.threads;
        return found;
      },
      "Return the numbers of reads that 'uring' and 'threads' have made so far, process-wide.");
  m.def(
      "simd_supported", [](const std::string& name) { return simd_supported(simd_of(name)); }, "name"_a,
      "Return whether this processor has the instruction set.");
  m.def(
      "build",
      [] {
        nb::dict found;
        found["compiler"] = kCompiler;
        found["format"] = kFormatVersion;
        return found;
      },
      "Return the compiler of this module, and the newest version of the table format that it writes.");
  m.def("get_num_threads", &num_threads, "Return the number of compute threads of one operation.");
  m.def("set_num_threads", &set_num_threads, "n"_a,
        "Set the number of compute threads of one operation, process-wide.");
  m.def(
      "set_fault",
      [](const std::optional<std::string>& name) {
        if (!set_fault(name.has_value() ? name->c_str() : nullptr)) {
          throw Error(ErrorKind::kInvalid, "unknown fault '" + *name + "'");
        }
      },
      "name"_a.none(), "Switch on a seeded bug, for tests that must find it. None switches it off.");

  m.def(
      "init_rows",
      [](const std::string& kind, double a, double b, uint64_t seed, const Ids& ids, const FloatsOut& out) {
        const InitSpec spec = init_spec(kind, a, b, seed);
        const size_t dim = out.shape(1);
        const WithoutGil without_gil;
        const DefaultFloatMode mode;
        for (size_t i = 0; i < ids.shape(0); ++i) {
          kernels().init_row(spec, ids.data()[i], static_cast<int64_t>(dim), out.data() + i * dim);
        }
      },
      "kind"_a, "a"_a, "b"_a, "seed"_a, "ids"_a, "out"_a, "Write the initial weights of rows to out, float32[n, dim].");

  m.def(
      "first_bad_offset",
      [](const Ids& offsets, int64_t num_ids) {
        int64_t before = 0;
        for (size_t i = 0; i < offsets.shape(0); ++i) {
          const int64_t offset = offsets.data()[i];
          if (offset < before || offset > num_ids || (i == 0 && offset != 0)) return static_cast<int64_t>(i);
          before = offset;
        }
        return int64_t{-1};
      },
      "offsets"_a, "num_ids"_a,
      "Return the position of the first wrong start of a bag, or -1. The first start must be 0; starts must not "
      "decrease or exceed num_ids.");

  m.def(
      "empty_rows",
      [](size_t rows, size_t dim) {
        auto* values = static_cast<float*>(allocate_array(std::max<size_t>(1, rows * dim) * sizeof(float)));
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(
            values, {rows, dim}, own_block(values, std::max<size_t>(1, rows * dim) * sizeof(float)));
      },
      "rows"_a, "dim"_a,
      "Return uninitialised float32[rows, dim], 64-byte aligned, in memory that is reused after it is freed.");

  m.def(
      "scale",
      [](const nb::ndarray<float, nb::c_contig, nb::device::cpu>& values, double factor) {
        const WithoutGil without_gil;
        const DefaultFloatMode mode;
        return scale(values.size(), static_cast<float>(factor), values.data());
      },
      "values"_a, "factor"_a, "Multiply a float32 array in place. Return whether every result is finite.");
  m.def("blocks_mapped", &blocks_mapped,
        "Return the number of large blocks allocated from the system so far. A warm step allocates none.");
  m.def(
      "narrow",
      [](const nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& values, int dtype,
         const nb::ndarray<uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& out) {
        const WithoutGil without_gil;
        const DefaultFloatMode mode;
        parallel_for(values.size(), 16384, [&](size_t from, size_t to) {
          kernels().narrow_nearest(static_cast<DType>(dtype), static_cast<int64_t>(to - from), values.data() + from,
                                   out.data() + from);
        });
      },
      "values"_a, "dtype"_a, "out"_a, "Round float32 values to a 16-bit dtype (1 bfloat16, 2 float16), to nearest.");

  m.def(
      "norm",
      [](const nb::ndarray<const float, nb::c_contig, nb::device::cpu>& values) {
        const WithoutGil without_gil;
        const DefaultFloatMode mode;
        return std::sqrt(kernels().sum_of_squares(static_cast<int64_t>(values.size()), values.data()));
      },
      "values"_a, "Return the Euclidean norm of a float32 array, computed in float64 over 16 fixed lanes.");

  m.def(
      "scores",
      [](const nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& queries,
         const nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows, const FloatsOut& out) {
        const size_t dim = queries.shape(1);
        const WithoutGil without_gil;
        parallel_for(rows.shape(0), 256, [&](size_t from, size_t to) {
          for (size_t q = 0; q < queries.shape(0); ++q) {
            for (size_t r = from; r < to; ++r) {
              out.data()[q * rows.shape(0) + r] =
                  kernels().dot(static_cast<int64_t>(dim), queries.data() + q * dim, rows.data() + r * dim);
            }
          }
        });
      },
      "queries"_a, "rows"_a, "out"_a,
      "Compute dot products into out, float32[num_queries, num_rows], over 16 fixed lanes.");

  // Constants of the core that predictions depend on.
  m.attr("TARGET_LIVE") = kTargetLive;
  m.attr("GCLOCK_MAX_COUNT") = int{Cache::kMaxCount};
  m.attr("GCLOCK_HIT") = int{Cache::kHit};
  m.attr("GCLOCK_RETURN") = int{Cache::kReturn};

  m.def(
      "probe_memory",
      [](size_t threads, size_t bytes, double seconds) {
        const WithoutGil without_gil;
        return probe_memory(threads, bytes, seconds);
      },
      "threads"_a, "bytes"_a, "seconds"_a,
      "Return the bytes per second, read and written together, of copies between large arrays.");
  nb::class_<RowProbe>(m, "RowProbe", "Records in memory, laid out as a table's frames.")
      .def(nb::init<size_t, size_t>(), "num_records"_a, "record_bytes"_a)
      .def(
          "run",
          [](RowProbe& probe, const Ids& rows, size_t used_bytes, const std::string& work) {
            const WithoutGil without_gil;
            const RowWork kind = work == "read" ? RowWork::kRead : work == "copy" ? RowWork::kCopy : RowWork::kChange;
            return probe.run(rows.data(), rows.shape(0), used_bytes, kind);
          },
          "rows"_a, "used_bytes"_a, "work"_a,
          "Return the seconds to \"read\", \"copy\" or \"change\" the first used_bytes of these records, int64[N], in "
          "turn.");
  m.def(
      "probe_writes",
      [](const std::string& path, size_t max_bytes, double seconds) {
        const WithoutGil without_gil;
        return probe_writes(vfs::current(), path, max_bytes, seconds);
      },
      "path"_a, "max_bytes"_a, "seconds"_a,
      "Write a new file without the page cache and sync it. Return (bytes per second, bytes written).");
  m.def(
      "probe_reads",
      [](const std::vector<std::string>& paths, size_t threads, double seconds, size_t block_bytes) {
        const WithoutGil without_gil;
        return probe_reads(vfs::current(), paths, threads, seconds, block_bytes);
      },
      "paths"_a, "threads"_a, "seconds"_a, "block_bytes"_a,
      "Make random reads of blocks, of a multiple of 4 KiB, of these files. Return (reads per second, the alignment "
      "that reads need; 1: the page cache was used).");

  m.def(
      "snapshots",
      [](const std::string& path) {
        const WithoutGil without_gil;
        std::vector<std::pair<std::string, uint64_t>> found;
        for (const auto& snapshot : Manifests(vfs::current(), path).snapshots()) {
          found.emplace_back(snapshot.name, snapshot.epoch);
        }
        return found;
      },
      "path"_a, "Return the kept commits as (name, epoch), oldest first.");
}

}  // namespace bunkbed
