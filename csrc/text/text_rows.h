// Rows in files that name them by words: decimal numbers, and word2vec's binary records. The functions convert bytes.
// The caller knows the meaning of the bytes for a table and writes all messages.
//
// A function converts only unambiguous input. It reports input that it does not take; the caller then decides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bunkbed {

// Words of a chunk of rows, each followed by a line feed.
struct Words {
  std::string text;
  std::vector<int64_t> ends;  // positions of these line feeds: a word may contain others

  void add(std::string_view word) {
    text.append(word);
    ends.push_back(static_cast<int64_t>(text.size()));
    text.push_back('\n');
  }
};

// Words in memory of the caller. Throws kInvalid when the ends are not ascending positions within the text.
class WordsView {
 public:
  WordsView(std::string_view text, const int64_t* ends, size_t count);
  size_t size() const { return count_; }
  size_t begin(size_t i) const { return i == 0 ? 0 : static_cast<size_t>(ends_[i - 1]) + 1; }
  std::string_view operator[](size_t i) const {
    return text_.substr(begin(i), static_cast<size_t>(ends_[i]) - begin(i));
  }

 private:
  std::string_view text_;
  const int64_t* ends_;
  size_t count_;
};

// Ids in decimal.
Words words_of_ids(const int64_t* ids, size_t n);
// Returns the ids, or nothing where a word has other characters than decimal digits, or exceeds int64.
std::optional<std::vector<int64_t>> ids_of_words(const WordsView& words);

// Returns the ends of the next lines, at most `most`: the positions after line feeds. With `is_last` a last line
// without a line feed counts too.
std::vector<int64_t> line_ends(std::string_view text, size_t most, bool is_last);

// One field of each line.
struct Fields {
  Words words;
  std::vector<int64_t> behind;  // where the line continues after the field and its separator; -1: too few fields
};
// Separators divide a line into fields; its line feed and a carriage return before it belong to no field.
Fields fields(std::string_view text, const int64_t* ends, size_t lines, char separator, size_t column);

// Converts numbers between white space to float32, rounded once: text[begins[i] .. ends[i]) becomes row i of `out`.
// Returns the refused lines, ascending: another count of numbers, or a number that std::from_chars does not read to its
// end (a plus sign, underflow) or that is not finite.
std::vector<int64_t> parse_rows(std::string_view text, const int64_t* begins, const int64_t* ends, size_t rows,
                                size_t dim,
                                float* out);  // (rows, dim)

// Returns memory for so many bytes, which are then written.
using Room = std::function<char*(size_t bytes)>;

// Writes a line for each row: its word and a separator, if there are words, then its numbers between separators. A
// number has the shortest digits that give this float32 again, or nine where those fail for readers through float64.
void format_rows(const float* values,  // (rows, dim)
                 size_t rows, size_t dim, char separator, const WordsView* words, const Room& room);

// Writes word2vec's binary records: a word, a space, float32[dim], a line feed.
void join_records(const float* values,  // (rows, dim)
                  size_t dim, const WordsView& words, const Room& room);

struct Records {
  Words words;
  size_t used = 0;  // bytes of the whole records
};
// Reads at most `most` records, up to the first one that is not whole. The original tool ends each with a line feed,
// others do not: line feeds before a word are not part of it.
Records split_records(std::string_view bytes, size_t most, size_t dim,
                      float* out);  // (most, dim)

}  // namespace bunkbed
