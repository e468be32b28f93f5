// Declarations shared by the binding files.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "base/error.h"
#include "base/types.h"
#include "bindings/without_gil.h"
#include "table/table.h"

namespace bunkbed {

using Ids = nanobind::ndarray<const int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using IdsOut = nanobind::ndarray<int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using FloatsIn = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using FloatsOut = nanobind::ndarray<float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using RecordsIn = nanobind::ndarray<const uint8_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using RecordsOut = nanobind::ndarray<uint8_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

InitSpec init_spec(const std::string& kind, double a, double b, uint64_t seed);
// Makes a Python object that frees a block of allocate_array() with the last array over the block.
nanobind::object own_block(void* address, size_t bytes);
// Returns the most numbers of a batch or a plan whose pieces have at most `most` places; raises for 0.
template <typename Numbered>
size_t max_numbers(const Numbered& source, size_t most) {
  if (most == 0) throw Error(ErrorKind::kInvalid, "a piece has at least one place, got 0");
  return source.max_numbers(most);
}
// Raises unless `out` has room for so many numbers.
void require_room(size_t numbers, const IdsOut& out);
// Has a batch or a plan write its numbers.
template <typename Numbered>
size_t write_numbers(const Numbered& source, size_t most, const IdsOut& out) {
  require_room(max_numbers(source, most), out);
  const WithoutGil without_gil;
  return source.write_numbers(most, out.data());
}
void bind_batch(nanobind::module_& m);
void bind_losses(nanobind::module_& m);
void bind_many(nanobind::module_& m);
void bind_ranks(nanobind::module_& m);
void bind_seen_pairs(nanobind::module_& m);
void bind_stalls(nanobind::module_& m);
void bind_table(nanobind::module_& m);
void bind_text_rows(nanobind::module_& m);
void bind_maintenance(nanobind::module_& m);
void bind_device(nanobind::module_& m);
void bind_files(nanobind::module_& m);
void bind_testing(nanobind::module_& m);

}  // namespace bunkbed
