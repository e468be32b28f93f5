#include "text/text_rows.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/float_mode.h"
#include "base/mutex.h"
#include "base/workers.h"

namespace bunkbed {

namespace {

// Work that one thread takes at a time: text for a few hundred microseconds, records enough to be worth a thread.
constexpr size_t kTextValues = 4096;
constexpr size_t kRecordBytes = 256 << 10;

// The longest "%.9g" of a float32, -1.17549435e-38, and a separator. The shortest digits are never longer.
constexpr size_t kMostDigits = 16;

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

size_t rows_at_once(size_t wanted, size_t each) { return std::max<size_t>(1, wanted / std::max<size_t>(1, each)); }

// Returns where a line ends without the line feeds and carriage returns at its end.
size_t end_of_content(std::string_view text, size_t begin, size_t end) {
  while (end > begin && (text[end - 1] == '\n' || text[end - 1] == '\r')) --end;
  return end;
}

void require_lines(std::string_view text, const int64_t* ends, size_t lines) {
  int64_t before = 0;
  for (size_t i = 0; i < lines; ++i) {
    if (ends[i] < before || static_cast<size_t>(ends[i]) > text.size()) {
      throw Error(ErrorKind::kInvalid, "line " + std::to_string(i) + " ends outside the text");
    }
    before = ends[i];
  }
}

bool parse_row(const char* at, const char* end, size_t dim, float* out) {
  for (size_t i = 0;; ++i) {
    while (at != end && is_space(*at)) ++at;
    if (at == end) return i == dim;
    if (i == dim) return false;
    const auto [next, error] = std::from_chars(at, end, out[i]);
    if (error != std::errc() || (next != end && !is_space(*next)) || !std::isfinite(out[i])) return false;
    at = next;
  }
}

// Most readers convert text to float64 and then round to float32. The result is wrong if the float64 is exactly the
// midpoint m of two float32 and the text is not: for a few numbers the shortest digits are so near m (7.038531e-26).
// Nine digits never are. Text without an exponent has k <= 12 decimals: it is w / 10^k, and m is M / 2^s with M < 2^25;
// unless equal these differ by at least m / (M 5^k), and the float64 is within m 2^-53 of the text.
char* format(float value, char* at) {
  char* const limit = at + kMostDigits;
  char* const end = std::to_chars(at, limit, value).ptr;
  if (end - at < 5 || end[-4] != 'e') return end;  // an exponent has a sign and two digits
  double wide = 0.0;
  std::from_chars(at, end, wide);
  if (static_cast<float>(wide) == value) return end;
  return std::to_chars(at, limit, value, std::chars_format::general, 9).ptr;
}

}  // namespace

WordsView::WordsView(std::string_view text, const int64_t* ends, size_t count)
    : text_(text), ends_(ends), count_(count) {
  int64_t before = -1;
  for (size_t i = 0; i < count; ++i) {
    if (ends[i] <= before || static_cast<size_t>(ends[i]) >= text.size()) {
      throw Error(ErrorKind::kInvalid, "word " + std::to_string(i) + " ends outside the text");
    }
    before = ends[i];
  }
}

Words words_of_ids(const int64_t* ids, size_t n) {
  Words words;
  words.ends.reserve(n);
  char digits[24];
  for (size_t i = 0; i < n; ++i) {
    const char* const end = std::to_chars(digits, digits + sizeof(digits), ids[i]).ptr;
    words.add({digits, static_cast<size_t>(end - digits)});
  }
  return words;
}

std::optional<std::vector<int64_t>> ids_of_words(const WordsView& words) {
  std::vector<int64_t> ids(words.size());
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string_view word = words[i];
    if (word.empty() || word[0] == '-') return std::nullopt;
    const char* const end = word.data() + word.size();
    const auto [next, error] = std::from_chars(word.data(), end, ids[i]);
    if (error != std::errc() || next != end) return std::nullopt;
  }
  return ids;
}

std::vector<int64_t> line_ends(std::string_view text, size_t most, bool is_last) {
  std::vector<int64_t> ends;
  size_t at = 0;
  while (ends.size() < most && at < text.size()) {
    const size_t feed = text.find('\n', at);
    if (feed == std::string_view::npos && !is_last) break;
    at = feed == std::string_view::npos ? text.size() : feed + 1;
    ends.push_back(static_cast<int64_t>(at));
  }
  return ends;
}

Fields fields(std::string_view text, const int64_t* ends, size_t lines, char separator, size_t column) {
  require_lines(text, ends, lines);
  Fields found;
  found.words.ends.reserve(lines);
  found.behind.reserve(lines);
  size_t begin = 0;
  for (size_t i = 0; i < lines; ++i) {
    const size_t end = static_cast<size_t>(ends[i]);
    std::string_view line = text.substr(begin, end_of_content(text, begin, end) - begin);
    size_t field = 0;
    for (; field < column; ++field) {
      const size_t cut = line.find(separator);
      if (cut == std::string_view::npos) break;
      line.remove_prefix(cut + 1);
    }
    const bool is_there = field == column;
    const size_t cut = line.find(separator);
    found.words.add(is_there ? line.substr(0, cut) : std::string_view());
    const size_t behind =
        cut == std::string_view::npos ? end : static_cast<size_t>(line.data() - text.data()) + cut + 1;
    found.behind.push_back(is_there ? static_cast<int64_t>(behind) : -1);
    begin = end;
  }
  return found;
}

std::vector<int64_t> parse_rows(std::string_view text, const int64_t* begins, const int64_t* ends, size_t rows,
                                size_t dim, float* out) {
  require_lines(text, ends, rows);
  for (size_t i = 0; i < rows; ++i) {
    if (begins[i] < 0 || begins[i] > ends[i]) {
      throw Error(ErrorKind::kInvalid, "line " + std::to_string(i) + " begins outside the text");
    }
  }
  Mutex mutex{LockLevel::kLocal};
  std::vector<int64_t> refused;
  parallel_for(rows, rows_at_once(kTextValues, dim), [&](size_t from, size_t to) {
    const DefaultFloatMode mode;
    for (size_t i = from; i < to; ++i) {
      if (parse_row(text.data() + begins[i], text.data() + ends[i], dim, out + i * dim)) continue;
      const MutexLock guard(mutex);
      refused.push_back(static_cast<int64_t>(i));
    }
  });
  std::sort(refused.begin(), refused.end());
  return refused;
}

void format_rows(const float* values, size_t rows, size_t dim, char separator, const WordsView* words,
                 const Room& room) {
  if (words != nullptr && words->size() != rows) throw Error(ErrorKind::kInvalid, "not a word for each row");
  const size_t grain = rows_at_once(kTextValues, dim);
  const size_t blocks = (rows + grain - 1) / grain;
  std::vector<std::string> parts(blocks);  // first of the greatest possible length, then of the real one
  std::vector<size_t> begins(blocks + 1);
  parallel_for(blocks, 1, [&](size_t first, size_t last) {
    const DefaultFloatMode mode;
    for (size_t block = first; block < last; ++block) {
      const size_t from = block * grain, to = std::min(rows, from + grain);
      size_t most = (to - from) * (dim * kMostDigits + 2);
      if (words != nullptr) most += words->begin(to - 1) + (*words)[to - 1].size() - words->begin(from) + (to - from);
      std::string& part = parts[block];
      part.resize(most);
      char* at = part.data();
      for (size_t row = from; row < to; ++row) {
        if (words != nullptr) {
          const std::string_view word = (*words)[row];
          at = std::copy(word.begin(), word.end(), at);
          if (dim > 0) *at++ = separator;
        }
        for (size_t i = 0; i < dim; ++i) {
          if (i > 0) *at++ = separator;
          at = format(values[row * dim + i], at);
        }
        *at++ = '\n';
      }
      part.resize(static_cast<size_t>(at - part.data()));
    }
  });
  for (size_t block = 0; block < blocks; ++block) begins[block + 1] = begins[block] + parts[block].size();
  char* const out = room(begins[blocks]);
  parallel_for(blocks, 8, [&](size_t first, size_t last) {
    for (size_t block = first; block < last; ++block) {
      std::memcpy(out + begins[block], parts[block].data(), parts[block].size());
    }
  });
}

void join_records(const float* values, size_t dim, const WordsView& words, const Room& room) {
  const size_t rows = words.size(), bytes = dim * sizeof(float);
  // One line feed follows each word in `words`, and one space in a record.
  const size_t total = rows == 0 ? 0 : words.begin(rows - 1) + words[rows - 1].size() + 1 + rows * (bytes + 1);
  char* const out = room(total);
  parallel_for(rows, rows_at_once(kRecordBytes, bytes), [&](size_t from, size_t to) {
    for (size_t row = from; row < to; ++row) {
      const std::string_view word = words[row];
      char* at = out + words.begin(row) + row * (bytes + 1);
      at = std::copy(word.begin(), word.end(), at);
      *at++ = ' ';
      std::memcpy(at, values + row * dim, bytes);
      at[bytes] = '\n';
    }
  });
}

Records split_records(std::string_view bytes, size_t most, size_t dim, float* out) {
  Records records;
  const size_t length = dim * sizeof(float);
  std::vector<const char*> values;
  values.reserve(most);
  records.words.ends.reserve(most);
  while (values.size() < most) {
    size_t begin = records.used;
    const size_t space = bytes.find(' ', begin);
    if (space == std::string_view::npos || bytes.size() - (space + 1) < length) break;
    while (begin < space && bytes[begin] == '\n') ++begin;
    records.words.add(bytes.substr(begin, space - begin));
    values.push_back(bytes.data() + space + 1);
    records.used = space + 1 + length;
  }
  parallel_for(values.size(), rows_at_once(kRecordBytes, length), [&](size_t from, size_t to) {
    for (size_t row = from; row < to; ++row) std::memcpy(out + row * dim, values[row], length);
  });
  return records;
}

}  // namespace bunkbed
