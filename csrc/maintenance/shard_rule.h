// Which shard of a table has a row: version 1 of the rule in FORMAT.md, which bunkbed/files/sharding.py has too.
#pragma once

#include <cstdint>

namespace bunkbed {

inline uint32_t shard_of(int64_t id, uint32_t shards) {
  uint64_t x = static_cast<uint64_t>(id) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>(((x >> 32) * shards) >> 32);
}

// A table's place among the shards of one; of a table that is no shard, the one shard of itself.
struct ShardPlace {
  uint32_t index = 0;
  uint32_t shards = 1;
  bool owns(int64_t id) const { return shards == 1 || shard_of(id, shards) == index; }
};

}  // namespace bunkbed
