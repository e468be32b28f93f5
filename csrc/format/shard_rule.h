// The rule that gives a row its shard: version 1 of FORMAT.md.
#pragma once

#include <cstdint>

namespace bunkbed {

inline uint32_t shard_of(int64_t id, uint32_t shards) {
  uint64_t x = static_cast<uint64_t>(id) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>(((x >> 32) * shards) >> 32);
}

// A shard's place in a sharded table. A plain table counts as its only shard.
struct ShardPlace {
  uint32_t index = 0;
  uint32_t shards = 1;
  bool owns(int64_t id) const { return shards == 1 || shard_of(id, shards) == index; }
};

}  // namespace bunkbed
