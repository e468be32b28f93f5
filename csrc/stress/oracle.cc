#include "stress/oracle.h"

#include <cmath>
#include <unordered_map>

namespace bunkbed::stress {

std::vector<int32_t> Reading::check(const float* values, size_t dim, const std::string& call, Tally* tally,
                                    const Bounds* highs) const {
  const Bounds& upper = highs == nullptr ? bounds_ : *highs;
  const size_t pairs = bounds_.size() / 2;
  std::vector<int32_t> found(rows_.size(), -1);
  std::unordered_map<size_t, int32_t> of_pair;
  const auto say = [&](size_t i, const std::string& what) {
    tally->fail(call + ": row " + std::to_string(rows_[i]) + " at position " + std::to_string(i) + " of " +
                std::to_string(rows_.size()) + " " + what);
  };
  tally->rows += rows_.size();
  for (size_t i = 0; i < rows_.size(); ++i) {
    const float first = values[i * dim];
    bool is_whole = first >= 0.0f && first < 1e7f && first == std::floor(first);
    for (size_t j = 0; is_whole && j < dim; ++j) {
      is_whole = values[i * dim + j] == element(static_cast<int32_t>(first), j);
    }
    if (!is_whole) {
      std::string text = "is torn:";
      for (size_t j = 0; j < dim && j < 8; ++j) text += " " + std::to_string(values[i * dim + j]);
      say(i, text);
      continue;
    }
    const auto count = static_cast<int32_t>(first);
    const int32_t high = upper.high(rows_[i]);
    found[i] = count;
    if (count < lows_[i] || count > high) {
      say(i,
          "holds " + std::to_string(count) + ", expected " + std::to_string(lows_[i]) + " to " + std::to_string(high));
    }
    const auto [place, is_new] = of_pair.emplace(rows_[i] % pairs, count);
    if (!is_new && place->second != count) {
      say(i, "holds " + std::to_string(count) + ", and a row that changes with it, or the row itself, " +
                 std::to_string(place->second) + " in the same call");
    }
  }
  return found;
}

}  // namespace bunkbed::stress
