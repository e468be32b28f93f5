#include "recsys/seen_pairs.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"

namespace bunkbed {

SeenPairs::SeenPairs(const int64_t* keys, size_t n, int64_t num_items) : num_items_(num_items) {
  if (num_items <= 0) throw Error(ErrorKind::kInvalid, "num_items must be positive, got " + std::to_string(num_items));
  for (size_t i = 0; i < n; ++i) {
    if (keys[i] < 0 || (i > 0 && keys[i] < keys[i - 1])) {
      throw Error(ErrorKind::kInvalid, "keys of pairs must ascend from 0, got " + std::to_string(keys[i]) +
                                           " at position " + std::to_string(i));
    }
  }
  if (n > 0 && keys[n - 1] / num_items >= std::numeric_limits<int32_t>::max()) {
    const int64_t user = keys[n - 1] / num_items;
    throw Error(ErrorKind::kInvalid, "user numbers must be below 2^31 - 1, got " + std::to_string(user));
  }
  keys_.resize(n);
  keys_.resize(static_cast<size_t>(std::unique_copy(keys, keys + n, keys_.begin()) - keys_.begin()));
  const uint64_t span = n > 0 ? static_cast<uint64_t>(keys_.back()) + 2 : 1;
  is_exact_ = span <= 32 * uint64_t{keys_.size()} + 64;
  last_bit_ = span - 1;
  const uint64_t num_bits = is_exact_ ? span + 7 : std::bit_ceil(uint64_t{keys_.size()} * 16);
  shift_ = 64 - static_cast<unsigned>(std::bit_width(num_bits) - 1);
  bits_.assign(num_bits / 8, 0);
  for (const int64_t key : keys_) {
    const uint64_t bit = hash(key);
    bits_[bit / 8] = static_cast<uint8_t>(bits_[bit / 8] | (1u << (bit % 8)));
  }
}

uint64_t SeenPairs::hash(int64_t key) const {
  auto mixed = static_cast<uint64_t>(key);
  if (is_exact_) return std::min(mixed, last_bit_);
  mixed *= 0x9E3779B97F4A7C15u;
  mixed ^= mixed >> 32;
  mixed *= 0xD6E8FEB86659FD93u;
  return mixed >> shift_;
}

void SeenPairs::contains(size_t n, const int64_t* users, const int64_t* items, bool* found) const {
  for (size_t i = 0; i < n; ++i) {
    const int64_t key = users[i] * num_items_ + items[i];
    const uint64_t bit = hash(key);
    found[i] = (bits_[bit / 8] >> (bit % 8) & 1) != 0;
  }
  if (is_exact_) return;
  for (size_t i = 0; i < n; ++i) {
    if (found[i]) found[i] = std::binary_search(keys_.begin(), keys_.end(), users[i] * num_items_ + items[i]);
  }
}

void SeenPairs::make_lists() {
  const auto num_users = static_cast<size_t>(keys_.empty() ? 0 : keys_.back() / num_items_ + 1);
  user_starts_.assign(num_users + 1, 0);
  item_starts_.assign(static_cast<size_t>(num_items_) + 1, 0);
  for (const int64_t key : keys_) {
    ++user_starts_[static_cast<size_t>(key / num_items_) + 1];
    ++item_starts_[static_cast<size_t>(key % num_items_) + 1];
  }
  for (size_t u = 0; u < num_users; ++u) user_starts_[u + 1] += user_starts_[u];
  for (size_t i = 0; i < static_cast<size_t>(num_items_); ++i) item_starts_[i + 1] += item_starts_[i];
  owners_.resize(keys_.size());
  BlockVector<int64_t> next(item_starts_.begin(), item_starts_.end());
  for (const int64_t key : keys_) {
    owners_[static_cast<size_t>(next[static_cast<size_t>(key % num_items_)]++)] =
        static_cast<int32_t>(key / num_items_);
  }
  columns_.assign(static_cast<size_t>(num_items_), -1);
  rows_.assign(num_users, -1);
}

size_t SeenPairs::items_asked(size_t num_users, const int64_t* users) const {
  size_t sum = 0;
  for (size_t b = 0; b < num_users; ++b) {
    const auto user = static_cast<size_t>(users[b]);
    if (user < rows_.size()) sum += static_cast<size_t>(user_starts_[user + 1] - user_starts_[user]);
  }
  return sum;
}

size_t SeenPairs::owners_asked(size_t num_items, const int64_t* items) const {
  size_t sum = 0;
  for (size_t j = 0; j < num_items; ++j) {
    const auto item = static_cast<size_t>(items[j]);
    sum += static_cast<size_t>(item_starts_[item + 1] - item_starts_[item]);
  }
  return sum;
}

size_t SeenPairs::most_clashes(size_t num_users, const int64_t* users, size_t num_items, const int64_t* items) {
  if (columns_.empty()) make_lists();
  for (size_t b = 0; b < num_users; ++b) {
    if (users[b] < 0) throw Error(ErrorKind::kIndex, "user " + std::to_string(users[b]) + " is negative");
  }
  for (size_t j = 0; j < num_items; ++j) {
    if (items[j] < 0 || items[j] >= num_items_) {
      throw Error(ErrorKind::kIndex,
                  "item " + std::to_string(items[j]) + " is outside [0, " + std::to_string(num_items_) + ")");
    }
  }
  size_t different = 0;
  for (size_t j = 0; j < num_items; ++j) different += std::exchange(columns_[static_cast<size_t>(items[j])], 0) < 0;
  for (size_t j = 0; j < num_items; ++j) columns_[static_cast<size_t>(items[j])] = -1;
  if (different < num_items) throw Error(ErrorKind::kInvalid, "the items asked for must be different");
  return std::min(items_asked(num_users, users), num_users * num_items);
}

size_t SeenPairs::clashes(size_t num_users, const int64_t* users, size_t num_items, const int64_t* items,
                          int64_t* places) {
  if (columns_.empty()) make_lists();
  const auto width = static_cast<int64_t>(num_items);
  // Goes through the owners of the items, or through the items of the users, whichever are fewer.
  if (owners_asked(num_items, items) < items_asked(num_users, users)) {
    before_.resize(num_users);
    for (size_t b = 0; b < num_users; ++b) {
      const auto user = static_cast<size_t>(users[b]);
      if (user >= rows_.size()) continue;
      before_[b] = rows_[user];
      rows_[user] = static_cast<int32_t>(b);
    }
    found_.clear();
    ends_.assign(num_users + 1, 0);
    for (size_t j = 0; j < num_items; ++j) {
      const auto item = static_cast<size_t>(items[j]);
      for (int64_t at = item_starts_[item]; at < item_starts_[item + 1]; ++at) {
        for (int32_t b = rows_[static_cast<size_t>(owners_[static_cast<size_t>(at)])]; b >= 0;
             b = before_[static_cast<size_t>(b)]) {
          found_.push_back({b, static_cast<int32_t>(j)});
          ++ends_[static_cast<size_t>(b) + 1];
        }
      }
    }
    for (size_t b = 0; b < num_users; ++b) ends_[b + 1] += ends_[b];
    for (const Place& place : found_)
      places[ends_[static_cast<size_t>(place.row)]++] = place.row * width + place.column;
    for (size_t b = 0; b < num_users; ++b) {
      if (static_cast<size_t>(users[b]) < rows_.size()) rows_[static_cast<size_t>(users[b])] = -1;
    }
    return found_.size();
  }
  size_t n = 0;
  for (size_t j = 0; j < num_items; ++j) columns_[static_cast<size_t>(items[j])] = static_cast<int32_t>(j);
  for (size_t b = 0; b < num_users; ++b) {
    const Items own = items_of(users[b]);
    for (size_t k = 0; k < own.n; ++k) {
      const int32_t column = columns_[static_cast<size_t>(own.keys[k] - users[b] * num_items_)];
      places[n] = static_cast<int64_t>(b) * width + column;  // counted by the next line, or overwritten
      n += column >= 0;
    }
  }
  for (size_t j = 0; j < num_items; ++j) columns_[static_cast<size_t>(items[j])] = -1;
  return n;
}

SeenPairs::Items SeenPairs::items_of(int64_t user) const {
  if (!user_starts_.empty()) {
    const auto at = static_cast<size_t>(user);
    if (at >= rows_.size()) return {nullptr, 0};
    return {keys_.data() + user_starts_[at], static_cast<size_t>(user_starts_[at + 1] - user_starts_[at])};
  }
  const auto begin = std::lower_bound(keys_.begin(), keys_.end(), user * num_items_);
  const auto end = std::lower_bound(begin, keys_.end(), (user + 1) * num_items_);
  return {keys_.data() + (begin - keys_.begin()), static_cast<size_t>(end - begin)};
}

}  // namespace bunkbed
