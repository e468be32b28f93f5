#include "batch.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#include "error.h"
#include "workers.h"

namespace bunkbed {

namespace {

constexpr size_t kPartitionIds = 2048;  // ids of a partition, about
constexpr size_t kMaxPartitions = 256;
constexpr size_t kChunkIds = 8192;  // ids of one block of a pass over the batch
constexpr int64_t kFree = -1;
constexpr size_t kKeptSlots = 16384;  // of a thread's hash table between batches

size_t partitions_of(size_t n) {
  return n <= 2 * kPartitionIds ? 1 : std::min(kMaxPartitions, std::bit_ceil(n / kPartitionIds));
}

// The high bits choose the partition, those below the place in its table.
uint64_t spread(int64_t id) {
  const auto x = static_cast<uint64_t>(id);
  return (x ^ (x >> 32)) * 0x9e3779b97f4a7c15ull;
}

// The highest `bits` bits of a hash; none are a zero, which one shift by 64 would not make.
uint64_t high_bits(uint64_t hash, unsigned bits) { return (hash >> 1) >> (63 - bits); }

// An open-addressing hash table.
struct Table {
  ArrayVector<int64_t> keys;
  ArrayVector<uint32_t> numbers;  // of the distinct keys
};

// Distinct keys in order of first occurrence, written over the front of `keys`; index[j] says which of them keys[j] was.
// `used_bits` of the hash are the same for all keys. Returns how many are distinct.
//
// Looking up and inserting alternate in runs of keys: a load that may alias a store just before it waits for it, and
// one loop over both took five times as long as the lookups alone.
size_t dedupe(int64_t* keys, size_t n, unsigned used_bits, Table* scratch, uint32_t* index) {
  constexpr size_t kRun = 64;
  const size_t capacity = std::bit_ceil(std::max<size_t>(16, 2 * n));
  const size_t mask = capacity - 1;
  const auto slot_bits = static_cast<unsigned>(std::countr_zero(capacity));
  scratch->keys.assign(capacity, kFree);
  scratch->numbers.resize(capacity);
  int64_t* const table = scratch->keys.data();
  uint32_t* const numbers = scratch->numbers.data();
  size_t num_unique = 0;
  for (size_t begin = 0; begin < n; begin += kRun) {
    const size_t end = std::min(n, begin + kRun);
    uint32_t unmatched[kRun];
    size_t num_unmatched = 0;
    for (size_t j = begin; j < end; ++j) {
      const size_t slot = high_bits(spread(keys[j]) << used_bits, slot_bits);
      index[j] = static_cast<uint32_t>(slot);
      unmatched[num_unmatched] = static_cast<uint32_t>(j);
      num_unmatched += table[slot] != keys[j];
    }
    for (size_t m = 0; m < num_unmatched; ++m) {
      const size_t j = unmatched[m];
      const int64_t key = keys[j];
      size_t slot = index[j];
      while (table[slot] != key && table[slot] != kFree) slot = (slot + 1) & mask;
      if (table[slot] == kFree) {
        table[slot] = key;
        numbers[slot] = static_cast<uint32_t>(num_unique);
        keys[num_unique++] = key;  // no further than j
      }
      index[j] = static_cast<uint32_t>(slot);
    }
  }
  for (size_t j = 0; j < n; ++j) index[j] = numbers[index[j]];
  return num_unique;
}

// Counting sort of places by index, stable: order[starts[u]..) are those of u. `starts` has num_unique + 1 elements.
void group(const uint32_t* index, const uint32_t* places, size_t n, size_t num_unique, uint32_t* starts,
           uint32_t* order) {
  std::fill_n(starts, num_unique + 1, 0u);
  for (size_t j = 0; j < n; ++j) ++starts[index[j] + 1];
  for (size_t u = 0; u < num_unique; ++u) starts[u + 1] += starts[u];
  // They serve as the write cursors and are shifted back afterwards.
  for (size_t j = 0; j < n; ++j) order[starts[index[j]]++] = places[j];
  for (size_t u = num_unique; u > 0; --u) starts[u] = starts[u - 1];
  starts[0] = 0;
}

}  // namespace

void Batch::assign(const int64_t* ids, size_t n, const uint32_t* members) {
  placement_.version = 0;
  if (n >= ~uint32_t{0}) {
    throw Error(ErrorKind::kInvalid, "a batch holds less than 2**32 - 1 ids, got " + std::to_string(n));
  }
  const auto id_at = [&](size_t i) { return members == nullptr ? ids[i] : ids[members[i]]; };
  const size_t num_partitions = partitions_of(n);
  const auto partition_bits = static_cast<unsigned>(std::countr_zero(num_partitions));
  const size_t num_chunks = (n + kChunkIds - 1) / kChunkIds;
  const auto chunk_end = [n](size_t chunk) { return std::min(n, (chunk + 1) * kChunkIds); };

  // 1. cursors[c][p]: where chunk c writes its ids of partition p.
  ArrayVector<uint32_t> cursors(num_chunks * num_partitions, 0u);
  parallel_for(num_chunks, 1, [&](size_t from, size_t to) {
    for (size_t c = from; c < to; ++c) {
      uint32_t* const counts = cursors.data() + c * num_partitions;
      for (size_t i = c * kChunkIds; i < chunk_end(c); ++i) ++counts[high_bits(spread(id_at(i)), partition_bits)];
    }
  });
  ArrayVector<uint32_t> begins(num_partitions + 1);
  uint32_t at = 0;
  for (size_t p = 0; p < num_partitions; ++p) {
    begins[p] = at;
    for (size_t c = 0; c < num_chunks; ++c) {
      const uint32_t count = cursors[c * num_partitions + p];
      cursors[c * num_partitions + p] = at;
      at += count;
    }
  }
  begins[num_partitions] = at;
  ArrayVector<int64_t> keys(n);
  ArrayVector<uint32_t> places(n);
  parallel_for(num_chunks, 1, [&](size_t from, size_t to) {
    for (size_t c = from; c < to; ++c) {
      uint32_t* const cursor = cursors.data() + c * num_partitions;
      for (size_t i = c * kChunkIds; i < chunk_end(c); ++i) {
        const int64_t id = id_at(i);
        const uint32_t place = cursor[high_bits(spread(id), partition_bits)]++;
        keys[place] = id;
        places[place] = static_cast<uint32_t>(i);
      }
    }
  });

  // 2. Places of partition p, grouped, from grouped[begins[p]]; the starts of its groups from starts[begins[p] + p].
  // lengths[i]: how often the id at place i of the batch occurs, where it occurs first; elsewhere 0.
  ArrayVector<uint32_t> index(n);
  ArrayVector<uint32_t> grouped(n);
  ArrayVector<uint32_t> starts(n + num_partitions);
  ArrayVector<uint32_t> uniques(num_partitions);
  ArrayVector<uint32_t> lengths(n, 0u);
  parallel_for(num_partitions, 1, [&](size_t from, size_t to) {
    thread_local Table table;  // one that stays in the processor's first cache, whatever the partition
    for (size_t p = from; p < to; ++p) {
      const size_t begin = begins[p];
      const size_t count = begins[p + 1] - begin;
      uniques[p] = static_cast<uint32_t>(dedupe(keys.data() + begin, count, partition_bits, &table, index.data() + begin));
      uint32_t* const start = starts.data() + begin + p;
      uint32_t* const group_of = grouped.data() + begin;
      group(index.data() + begin, places.data() + begin, count, uniques[p], start, group_of);
      for (size_t u = 0; u < uniques[p]; ++u) lengths[group_of[start[u]]] = start[u + 1] - start[u];
    }
    if (table.keys.capacity() > kKeptSlots) table = Table();
  });

  // 3. Rows are numbered by first occurrence: lengths[i] becomes the number of the row that occurs first at place i.
  const size_t total = std::accumulate(uniques.begin(), uniques.end(), size_t{0});
  unique_.resize(total + 1);  // one more than there are: see below
  offsets_.resize(total + 1);
  uint32_t number = 0;
  uint32_t offset = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t length = lengths[i];
    // Written for every place, kept for first ones: a branch would be guessed wrong for a third of the ids.
    unique_[number] = id_at(i);
    offsets_[number] = offset;
    lengths[i] = number;
    number += length != 0;
    offset += length;
  }
  unique_.pop_back();
  offsets_[total] = offset;
  order_.resize(n);
  inverse_.resize(members == nullptr ? n : 0);
  parallel_for(num_partitions, 1, [&](size_t from, size_t to) {
    for (size_t p = from; p < to; ++p) {
      const uint32_t* const start = starts.data() + begins[p] + p;
      const uint32_t* const group_of = grouped.data() + begins[p];
      for (uint32_t u = 0; u < uniques[p]; ++u) {
        const uint32_t row = lengths[group_of[start[u]]];
        uint32_t* out = order_.data() + offsets_[row];
        for (uint32_t o = start[u]; o < start[u + 1]; ++o) {
          const uint32_t i = group_of[o];
          *out++ = members == nullptr ? i : members[i];
          if (members == nullptr) inverse_[i] = row;
        }
      }
    }
  });
}

}  // namespace bunkbed
