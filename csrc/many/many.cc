#include "many/many.h"

#include <unordered_map>
#include <utility>

#include "base/memory.h"
#include "base/workers.h"
#include "batch/gradients.h"

namespace bunkbed {

namespace {

// Floats that are worth a thread: about 150 us of a step. With a quarter of it, a step of 26 tables, 256 ids of 16
// floats each, took 1.13 ms on two threads and .91 ms on one: threads sleep between its calls, and waking one takes
// longer.
constexpr size_t kGrainFloats = size_t{1} << 17;

size_t floats_of(const LookupPart& part) { return part.n * part.table->spec().dim; }
size_t floats_of(const SumPart& part) { return part.batch->size() * part.bags.dim; }
size_t floats_of(const UpdatePart& part) { return part.batch->num_unique() * part.table->spec().dim; }

template <typename Part>
std::vector<size_t> work_of(const std::vector<Part>& parts) {
  std::vector<size_t> work;
  work.reserve(parts.size());
  for (const Part& part : parts) work.push_back(floats_of(part));
  return work;
}

// Makes the checks of a part; with a batch, of that.
void prepare(const LookupPart& part) {
  part.table->check_lookup(part.ids, part.batch == nullptr ? part.n : 0);
  if (part.batch != nullptr) *part.batch = part.table->batch(part.ids, part.n);
}

void look_up(const LookupPart& part) {
  if (part.bags.has_value()) {
    const PartBags& bags = *part.bags;
    part.table->lookup_bags(part.ids, part.n, bags.offsets, bags.num_bags, bags.pooling, bags.weights, part.touch,
                            part.out);
  } else if (part.batch != nullptr) {
    part.table->lookup(*part.batch, part.touch, part.out);
  } else {
    part.table->lookup(part.ids, part.n, part.touch, part.out);
  }
}

}  // namespace

void lookup_many(const std::vector<LookupPart>& parts) {
  const std::vector<size_t> work = work_of(parts);
  parallel_items(work, kGrainFloats, [&](size_t item) { prepare(parts[item]); });
  // The parts of one table are one item: their order decides which rows are evicted.
  std::vector<std::vector<size_t>> items;
  std::vector<size_t> work_of_items;
  std::unordered_map<const Table*, size_t> item_of;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto [found, is_new] = item_of.try_emplace(parts[i].table, items.size());
    if (is_new) {
      items.emplace_back();
      work_of_items.push_back(0);
    }
    items[found->second].push_back(i);
    work_of_items[found->second] += work[i];
  }
  parallel_items(work_of_items, kGrainFloats, [&](size_t item) {
    for (const size_t i : items[item]) look_up(parts[i]);
  });
}

void sum_many(std::vector<SumPart>* parts) {
  parallel_items(work_of(*parts), kGrainFloats, [&](size_t item) {
    SumPart& part = (*parts)[item];
    const Batch& batch = *part.batch;
    const auto& [grads, dim] = std::pair(part.bags.grads, part.bags.dim);
    if (part.bags.offsets != nullptr) {
      part.squares = sum_bag_gradients(batch, part.bags, part.sums);
    } else if (part.step == 1) {
      part.squares = sum_gradients(batch, grads, dim, part.sums);
    } else {
      ArrayVector<uint32_t> rows(batch.size());
      for (size_t o = 0; o < rows.size(); ++o) rows[o] = batch.order()[o] * part.step;
      part.squares = sum_gradients(batch, rows.data(), grads, dim, part.sums);
    }
  });
}

void update_many(const std::vector<UpdatePart>& parts) {
  for (const UpdatePart& part : parts) part.table->check_change(*part.batch, true, part.lr, part.step);
  parallel_items(work_of(parts), kGrainFloats, [&](size_t item) {
    const UpdatePart& part = parts[item];
    part.table->update(*part.batch, part.sums, part.lr, part.step);
  });
}

}  // namespace bunkbed
