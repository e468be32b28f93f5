#include "batch/batch.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/workers.h"

namespace bunkbed {

namespace {

// Up to so many ids, one thread dedupes the whole batch. Partitions on two threads took twice as long, because each of
// their passes costs nearly as much as the whole dedupe. With more threads partitions are faster from fewer ids on.
constexpr size_t kWholeIds = size_t{1} << 18;
constexpr size_t kWholeIdsOfMany = size_t{1} << 15;
constexpr size_t kFewThreads = 3;
constexpr size_t kPartitionIds = 2048;  // ids of a partition, approximately
constexpr size_t kMaxPartitions = 256;
constexpr size_t kChunkIds = 4096;     // ids of one block of a pass over the batch
constexpr uint32_t kFirst = 1u << 31;  // in an index: the key's first occurrence
constexpr size_t kKeptSlots = 16384;   // slots of a thread's hash table that are kept between batches

size_t partitions_of(size_t n) { return std::min(kMaxPartitions, std::bit_ceil(n / kPartitionIds)); }

// The highest bits choose the partition, the next ones the slot in its table.
uint64_t spread(int64_t id) {
  const auto x = static_cast<uint64_t>(id);
  return (x ^ (x >> 32)) * 0x9e3779b97f4a7c15ull;
}

// The highest `bits` bits of a hash. For 0 bits this is 0; one shift by 64 would be undefined.
uint64_t high_bits(uint64_t hash, unsigned bits) { return (hash >> 1) >> (63 - bits); }

// Writes the distinct keys to `unique` (room for n, may be `keys`), in order of first occurrence. index[j] is the
// number of keys[j] there. The highest `used_bits` bits of the hash are equal for all keys. Returns num_unique.
//
// The hash table is open. A slot holds the number of a key in `unique` plus one, or 0 if it is free. Lookups and
// inserts alternate in runs of keys: a load that may alias a store just before it stalls, and one loop over both took
// five times as long as the lookups alone.
size_t dedupe(const int64_t* keys, size_t n, unsigned used_bits, ArrayVector<uint32_t>* slots, int64_t* unique,
              uint32_t* index) {
  if (n == 0) return 0;
  constexpr size_t kRun = 64;
  const size_t capacity = std::bit_ceil(std::max<size_t>(16, 2 * n));
  const size_t mask = capacity - 1;
  const auto slot_bits = static_cast<unsigned>(std::countr_zero(capacity));
  slots->resize(capacity);
  uint32_t* const table = slots->data();
  std::memset(table, 0, capacity * sizeof(uint32_t));
  const auto home_of = [&](int64_t key) { return high_bits(spread(key) << used_bits, slot_bits); };
  // Inserts the first key before the others: a free slot then reads as its number and never matches another key.
  unique[0] = keys[0];
  table[home_of(keys[0])] = 1;
  size_t num_unique = 1;
  for (size_t begin = 0; begin < n; begin += kRun) {
    const size_t end = std::min(n, begin + kRun);
    uint32_t unmatched[kRun];
    size_t num_unmatched = 0;
    for (size_t j = begin; j < end; ++j) {
      const uint32_t at = table[home_of(keys[j])];
      const uint32_t number = at - (at != 0);
      index[j] = number;
      unmatched[num_unmatched] = static_cast<uint32_t>(j);
      num_unmatched += unique[number] != keys[j];
    }
    for (size_t m = 0; m < num_unmatched; ++m) {
      const size_t j = unmatched[m];
      const int64_t key = keys[j];
      size_t slot = home_of(key);
      while (table[slot] != 0 && unique[table[slot] - 1] != key) slot = (slot + 1) & mask;
      if (table[slot] == 0) {
        unique[num_unique++] = key;  // num_unique <= j: if `unique` is `keys`, every unread key stays
        table[slot] = static_cast<uint32_t>(num_unique);
      }
      index[j] = table[slot] - 1;
    }
  }
  return num_unique;
}

// Stable counting sort of places by index: order[starts[u] .. starts[u + 1]) are those of u. `starts` has num_unique +
// 1 elements. `places` null: 0, 1, ...
void group(const uint32_t* index, const uint32_t* places, size_t n, size_t num_unique, uint32_t* starts,
           uint32_t* order) {
  std::fill_n(starts, num_unique + 1, 0u);
  for (size_t j = 0; j < n; ++j) ++starts[index[j] + 1];
  for (size_t u = 0; u < num_unique; ++u) starts[u + 1] += starts[u];
  // `starts` serve as the write cursors and are shifted back afterwards.
  if (places == nullptr) {
    for (size_t j = 0; j < n; ++j) order[starts[index[j]]++] = static_cast<uint32_t>(j);
  } else {
    for (size_t j = 0; j < n; ++j) order[starts[index[j]]++] = places[j];
  }
  for (size_t u = num_unique; u > 0; --u) starts[u] = starts[u - 1];
  starts[0] = 0;
}

// Marks the first occurrence of each key. Keys are numbered in order of first occurrence.
void mark_firsts(uint32_t* index, size_t n) {
  uint32_t seen = 0;
  for (size_t j = 0; j < n; ++j) {
    const bool is_first = index[j] == seen;
    index[j] |= is_first ? kFirst : 0;
    seen += is_first;
  }
}

}  // namespace

void Batch::assign(const int64_t* ids, size_t n, const uint32_t* members) {
  placement_.version = 0;
  checked_end_ = 0;
  if (n >= kFirst) {
    throw Error(ErrorKind::kInvalid, "a batch holds less than 2**31 ids, got " + std::to_string(n));
  }
  if (n <= (num_threads() <= kFewThreads ? kWholeIds : kWholeIdsOfMany)) {
    assign_whole(ids, n, members);
  } else {
    assign_parts(ids, n, members);
  }
}

void Batch::assign_whole(const int64_t* ids, size_t n, const uint32_t* members) {
  ArrayVector<int64_t> keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = ids[members == nullptr ? i : members[i]];
  ArrayVector<uint32_t> slots;
  unique_.resize(n);
  inverse_.resize(n);
  const size_t num_unique = dedupe(keys.data(), n, 0, &slots, unique_.data(), inverse_.data());
  unique_.resize(num_unique);
  offsets_.resize(num_unique + 1);
  order_.resize(n);
  group(inverse_.data(), members, n, num_unique, offsets_.data(), order_.data());
  if (members != nullptr) inverse_.clear();
}

void Batch::assign_parts(const int64_t* ids, size_t n, const uint32_t* members) {
  ArrayVector<int64_t> copy(n);  // filled by step 1
  const auto id_at = [&](size_t i) { return copy[i]; };
  const size_t num_partitions = partitions_of(n);
  const auto partition_bits = static_cast<unsigned>(std::countr_zero(num_partitions));
  const size_t num_chunks = (n + kChunkIds - 1) / kChunkIds;
  const auto chunk_end = [n](size_t chunk) { return std::min(n, (chunk + 1) * kChunkIds); };

  // 1. cursors[c][p]: where chunk c writes its ids of partition p.
  ArrayVector<uint32_t> cursors(num_chunks * num_partitions, 0u);
  parallel_for(num_chunks, 1, [&](size_t from, size_t to) {
    for (size_t c = from; c < to; ++c) {
      uint32_t* const counts = cursors.data() + c * num_partitions;
      for (size_t i = c * kChunkIds; i < chunk_end(c); ++i) {
        copy[i] = ids[members == nullptr ? i : members[i]];
        ++counts[high_bits(spread(copy[i]), partition_bits)];
      }
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

  // 2. grouped[begins[p]] starts the places of partition p, grouped; starts[begins[p] + p] the starts of its groups.
  //    firsts: how many ids of partition p occur first in chunk c, and how often these occur in the whole batch.
  struct Count {
    uint32_t rows;
    uint32_t places;
  };
  ArrayVector<uint32_t> index(n);
  ArrayVector<uint32_t> grouped(n);
  ArrayVector<uint32_t> starts(n + num_partitions);
  ArrayVector<Count> firsts(num_chunks * num_partitions);
  // After the scatter a chunk's cursor is where the next chunk's ids start.
  const auto run_begin = [&](size_t c, size_t p) { return c == 0 ? begins[p] : cursors[(c - 1) * num_partitions + p]; };
  parallel_for(num_partitions, 1, [&](size_t from, size_t to) {
    thread_local ArrayVector<uint32_t> slots;  // reused by each partition, so that it stays in the first-level cache
    for (size_t p = from; p < to; ++p) {
      const size_t begin = begins[p];
      const size_t count = begins[p + 1] - begin;
      int64_t* const own_keys = keys.data() + begin;
      uint32_t* const own_index = index.data() + begin;
      const size_t num_unique = dedupe(own_keys, count, partition_bits, &slots, own_keys, own_index);
      uint32_t* const start = starts.data() + begin + p;
      group(own_index, places.data() + begin, count, num_unique, start, grouped.data() + begin);
      mark_firsts(own_index, count);
      uint32_t u = 0;
      for (size_t c = 0; c < num_chunks; ++c) {
        const uint32_t before = u;
        for (size_t j = run_begin(c, p); j < run_begin(c + 1, p); ++j) u += index[j] >> 31;
        firsts[c * num_partitions + p] = {u - before, start[u] - start[before]};
      }
    }
    if (slots.capacity() > kKeptSlots) slots = {};
  });

  // 3. Rows are numbered by first occurrence. The numbers before each chunk are known, so threads write to separate
  //    parts of the arrays: two cores that write to one cache line in turn are slower than one.
  ArrayVector<Count> before(num_chunks + 1);
  before[0] = {0, 0};
  for (size_t c = 0; c < num_chunks; ++c) {
    before[c + 1] = before[c];
    for (size_t p = 0; p < num_partitions; ++p) {
      before[c + 1].rows += firsts[c * num_partitions + p].rows;
      before[c + 1].places += firsts[c * num_partitions + p].places;
    }
  }
  const size_t total = before[num_chunks].rows;
  unique_.resize(total);
  offsets_.resize(total + 1);
  offsets_[total] = static_cast<uint32_t>(n);
  ArrayVector<uint32_t> numbers(n);     // numbers[begins[p] + u]: of the distinct key u of partition p
  ArrayVector<uint32_t> groups(total);  // of a row, by number: where in `starts` its group is
  // Visits the places of a chunk in order: visit(place, partition, the entry of `index`).
  const auto visit_chunk = [&](size_t c, auto&& visit) {
    uint32_t cursor[kMaxPartitions];
    for (size_t p = 0; p < num_partitions; ++p) cursor[p] = run_begin(c, p);
    for (size_t i = c * kChunkIds; i < chunk_end(c); ++i) {
      const size_t p = high_bits(spread(id_at(i)), partition_bits);
      visit(i, p, index[cursor[p]++]);
    }
  };
  parallel_for(num_chunks, 1, [&](size_t from, size_t to) {
    // Writes each place but keeps first ones only: a branch would be mispredicted for a third of the ids.
    uint32_t places_of_firsts[kChunkIds + 1];
    uint32_t keys_of_firsts[kChunkIds + 1];
    for (size_t c = from; c < to; ++c) {
      size_t count = 0;
      visit_chunk(c, [&](size_t i, size_t p, uint32_t at) {
        places_of_firsts[count] = static_cast<uint32_t>(i);
        keys_of_firsts[count] = static_cast<uint32_t>(begins[p] + (at & ~kFirst));
        count += at >> 31;
      });
      uint32_t offset = before[c].places;
      for (size_t k = 0; k < count; ++k) {
        const auto number = static_cast<uint32_t>(before[c].rows + k);
        const int64_t id = id_at(places_of_firsts[k]);
        const size_t group = keys_of_firsts[k] + high_bits(spread(id), partition_bits);
        numbers[keys_of_firsts[k]] = number;
        unique_[number] = id;
        offsets_[number] = offset;
        groups[number] = static_cast<uint32_t>(group);
        offset += starts[group + 1] - starts[group];
      }
    }
  });

  // 4. By chunk, the row of each place; by row, its places.
  order_.resize(n);
  inverse_.resize(members == nullptr ? n : 0);
  const size_t num_row_blocks = (total + kChunkIds - 1) / kChunkIds;
  const size_t num_place_blocks = members == nullptr ? num_chunks : 0;
  const size_t num_blocks = num_row_blocks + num_place_blocks;
  parallel_for(num_blocks, 1, [&](size_t from, size_t to) {
    for (size_t block = from; block < to; ++block) {
      if (block >= num_row_blocks) {
        visit_chunk(block - num_row_blocks,
                    [&](size_t i, size_t p, uint32_t at) { inverse_[i] = numbers[begins[p] + (at & ~kFirst)]; });
        continue;
      }
      for (size_t row = block * kChunkIds; row < std::min(total, (block + 1) * kChunkIds); ++row) {
        const uint32_t* const start = starts.data() + groups[row];
        const size_t p = high_bits(spread(unique_[row]), partition_bits);
        const uint32_t* const group_of = grouped.data() + begins[p];
        uint32_t* out = order_.data() + offsets_[row];
        for (uint32_t o = start[0]; o < start[1]; ++o) *out++ = members == nullptr ? group_of[o] : members[group_of[o]];
      }
    }
  });
}

size_t Batch::write_numbers(size_t most, int64_t* out) const {
  const size_t rows = num_unique();
  int64_t* const order = std::copy(inverse_.begin(), inverse_.end(), out);
  int64_t* const starts = std::copy(order_.begin(), order_.end(), order);
  int64_t* const firsts = std::copy(offsets_.begin(), offsets_.begin() + static_cast<std::ptrdiff_t>(rows), starts);
  size_t pieces = 0;
  for (size_t u = 0; u < rows; ++u) pieces += (offsets_[u + 1] - offsets_[u] + most - 1) / most;
  if (pieces == rows) return 0;
  int64_t* piece = firsts + rows;
  for (size_t u = 0, first = 0; u < rows; ++u) {
    firsts[u] = static_cast<int64_t>(first);
    for (size_t place = offsets_[u]; place < offsets_[u + 1]; place += most, ++first)
      *piece++ = static_cast<int64_t>(place);
  }
  return pieces;
}

}  // namespace bunkbed
