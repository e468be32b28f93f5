// Rows in files that name them by words: decimal numbers, and word2vec's binary records. Bytes in, bytes out: what they
// mean for a table, and every message, is the caller's.
//
// Here is what can be taken at once and without doubt. What a function does not take, it says; the caller then decides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bunkbed {

// Words of a chunk of rows: each followed by a line feed, at which it ends.
struct Words {
  std::string text;
  std::vector<int64_t> ends;  // positions of those line feeds: a word may have others in it

  void add(std::string_view word) {
    text.append(word);
    ends.push_back(static_cast<int64_t>(text.size()));
    text.push_back('\n');
  }
};

// Words that others hold. Throws kInvalid when the ends are not ascending positions within the text.
class WordsView {
 public:
  WordsView(std::string_view text, const int64_t* ends, size_t count);
  size_t size() const { return count_; }
  size_t begin(size_t i) const { return i == 0 ? 0 : static_cast<size_t>(ends_[i - 1]) + 1; }
  std::string_view operator[](size_t i) const { return text_.substr(begin(i), static_cast<size_t>(ends_[i]) - begin(i)); }

 private:
  std::string_view text_;
  const int64_t* ends_;
  size_t count_;
};

// Ids in decimal.
Words words_of_ids(const int64_t* ids, size_t n);
// The ids that all words are, in decimal digits and nothing else; nothing where one is not, or passes int64.
std::optional<std::vector<int64_t>> ids_of_words(const WordsView& words);

// Where the next lines end: behind each line feed, `most` of them at most; where nothing follows, also a last line that
// has none.
std::vector<int64_t> line_ends(std::string_view text, size_t most, bool is_last);

// One field of every line.
struct Fields {
  Words words;
  std::vector<int64_t> behind;  // where the line goes on behind it and its separator; -1: it has not so many fields
};
// A line's fields stand between separators; its line feed and a carriage return before it belong to none.
Fields fields(std::string_view text, const int64_t* ends, size_t lines, char separator, size_t column);

// Numbers between white space to float32, rounded once: begins[i] .. ends[i] of the text are row i of `out`. Returns the
// lines it did not take, ascending: another count of numbers, or one that std::from_chars does not take to its end
// (a plus sign, what underflows) or that is not finite.
std::vector<int64_t> parse_rows(std::string_view text, const int64_t* begins, const int64_t* ends, size_t rows,
                                size_t dim,
                                float* out);  // (rows, dim)

// Gives a place for so many bytes, which are then written.
using Room = std::function<char*(size_t bytes)>;

// A line for each row: its word and a separator, where there are words, then its numbers with separators between them.
// Each number is the shortest that is this float32 again, whether it is read as float32 or through float64.
void format_rows(const float* values,  // (rows, dim)
                 size_t rows, size_t dim, char separator, const WordsView* words, const Room& room);

// word2vec's binary records: a word, a space, float32[dim], a line feed.
void join_records(const float* values,  // (rows, dim)
                  size_t dim, const WordsView& words, const Room& room);

struct Records {
  Words words;
  size_t used = 0;  // bytes of those that are whole
};
// At most `most` of them, until the bytes break off. The original tool ends each with a line feed, others do not: those
// before a word are none of it.
Records split_records(std::string_view bytes, size_t most, size_t dim,
                      float* out);  // (most, dim)

}  // namespace bunkbed
