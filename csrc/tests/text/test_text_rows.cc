// Rows as text and as word2vec's records: every float32 is read back, and doubtful input is refused.
#include "text/text_rows.h"

#include <bit>
#include <charconv>
#include <limits>
#include <string>
#include <vector>

#include "base/workers.h"
#include "tests/check.h"
#include "tests/sample.h"

namespace bunkbed {
namespace {

using test::Sampler;

class Threads {
 public:
  explicit Threads(size_t n) : before_(num_threads()) { set_num_threads(n); }
  ~Threads() { set_num_threads(before_); }

 private:
  size_t before_;
};

std::vector<float> any_floats(uint64_t seed, size_t count) {
  Sampler sampler(seed);
  std::vector<float> values = {0.0f,        -0.0f, 1e-45f, -3.4028235e38f, 1.17549435e-38f,
                               16777217.0f, 0.1f,  1e10f,  9.999999e-5f};
  for (const uint32_t bits : {0x15ae43fdu, 0x95ae43fdu}) values.push_back(std::bit_cast<float>(bits));
  while (values.size() < count) {
    values.push_back(sampler.finite());
    values.push_back(sampler.mixed());
  }
  values.resize(count);
  return values;
}

template <typename Make>
std::string made(const Make& make) {
  std::string out;
  make([&out](size_t bytes) {
    out.resize(bytes);
    return out.data();
  });
  return out;
}

WordsView view(const Words& words) { return {words.text, words.ends.data(), words.ends.size()}; }

std::string formatted(const std::vector<float>& values, size_t dim, char separator, const Words* words) {
  return made([&](const Room& room) {
    if (words == nullptr) return format_rows(values.data(), values.size() / dim, dim, separator, nullptr, room);
    const WordsView named = view(*words);
    format_rows(values.data(), values.size() / dim, dim, separator, &named, room);
  });
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) return false;
  }
  return true;
}

// Refused lines of a text; `out` gets the others.
std::vector<int64_t> parse(const std::string& text, size_t dim, std::vector<float>* out) {
  const std::vector<int64_t> ends = line_ends(text, text.size() + 1, true);
  std::vector<int64_t> begins = {0};
  begins.insert(begins.end(), ends.begin(), ends.end());
  out->assign(ends.size() * dim, -7.0f);
  return parse_rows(text, begins.data(), ends.data(), ends.size(), dim, out->data());
}

}  // namespace

TEST(numbers_of_text_come_back_bit_for_bit_whatever_reads_them) {
  const size_t dim = 7;
  const std::vector<float> values = any_floats(1, dim * 20'000);
  const std::string text = formatted(values, dim, '\t', nullptr);
  std::vector<float> again;
  CHECK(parse(text, dim, &again).empty());
  CHECK(same_bits(again, values));
  const char* at = text.data();
  for (const float value : values) {
    double wide = 0.0;
    const auto [next, error] = std::from_chars(at, text.data() + text.size(), wide);
    CHECK(error == std::errc());
    CHECK_EQ(std::bit_cast<uint32_t>(static_cast<float>(wide)), std::bit_cast<uint32_t>(value));
    at = next + 1;
  }
}

TEST(numbers_are_short_but_where_float64_would_change_them) {
  const std::vector<float> values = {0.1f, -0.0f, 123456789.0f, 1e-45f, std::bit_cast<float>(0x15ae43fdu), 2.5e10f};
  const std::string text = formatted(values, 6, ' ', nullptr);
  CHECK_EQ(text, std::string("0.1 -0 123456792 1e-45 7.03853069e-26 2.5e+10\n"));
}

TEST(text_has_the_same_bytes_for_every_number_of_threads) {
  const size_t dim = 33;
  const std::vector<float> values = any_floats(2, dim * 3'000);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 3'000; ++i) ids.push_back(i * i * i);
  const Words words = words_of_ids(ids.data(), ids.size());
  std::string texts[2], records[2];
  std::vector<float> parsed[2];
  for (const size_t threads : {1, 3}) {
    const Threads setting(threads);
    const size_t at = threads == 1 ? 0 : 1;
    texts[at] = formatted(values, dim, ' ', &words);
    records[at] = made([&](const Room& room) { join_records(values.data(), dim, view(words), room); });
    CHECK(parse(formatted(values, dim, ' ', nullptr), dim, &parsed[at]).empty());
  }
  CHECK(texts[0] == texts[1] && records[0] == records[1] && same_bits(parsed[0], parsed[1]));
  CHECK_EQ(texts[0].substr(0, 2), std::string("0 "));
}

TEST(doubtful_lines_are_refused_and_the_others_taken) {
  std::vector<float> out;
  const std::string text =
      "1 2\n 1\t2 \r\n+1 2\n1_0 2\n0x10 2\n1e-50 2\n1e39 2\nnan 2\n1 inf\n\n1\n1 2 3\n1,2\n1 2x\n-.5e-3 5.\n1-2\n3 4";
  const std::vector<int64_t> refused = parse(text, 2, &out);
  const std::vector<int64_t> wanted = {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15};
  CHECK(refused == wanted);
  CHECK(same_bits({out[0], out[1], out[2], out[3], out[28], out[29], out[32], out[33]},
                  {1.0f, 2.0f, 1.0f, 2.0f, -0.0005f, 5.0f, 3.0f, 4.0f}));
  // The parser must not read past the end of a line, into the digits of the next one, or past the text.
  const std::string digits = "12345678";
  const int64_t begins[] = {0, 3}, ends[] = {3, 5};
  out.assign(2, 0.0f);
  CHECK(parse_rows(digits, begins, ends, 2, 1, out.data()).empty());
  CHECK(same_bits(out, {123.0f, 45.0f}));
}

TEST(places_outside_the_text_are_errors) {
  std::vector<float> out(4);
  const int64_t begins[] = {0, 2}, far[] = {2, 9}, back[] = {2, 1}, same[] = {1, 1}, before[] = {-1, 1};
  CHECK_THROWS(parse_rows("1\n2\n", begins, far, 2, 1, out.data()), ErrorKind::kInvalid, "line 1 ends outside");
  CHECK_THROWS(parse_rows("1\n2\n", begins, back, 2, 1, out.data()), ErrorKind::kInvalid, "line 1 ends outside");
  CHECK_THROWS(parse_rows("1\n2\n", before, begins, 1, 1, out.data()), ErrorKind::kInvalid, "line 0 begins outside");
  CHECK_THROWS(fields("1\n2\n", far, 2, ' ', 0), ErrorKind::kInvalid, "line 1 ends outside");
  CHECK_THROWS(WordsView("a\nb\n", far, 2), ErrorKind::kInvalid, "word 1 ends outside");
  CHECK_THROWS(WordsView("a\nb\n", same, 2), ErrorKind::kInvalid, "word 1 ends outside");
  CHECK_THROWS(WordsView("a\nb\n", before, 1), ErrorKind::kInvalid, "word 0 ends outside");
}

TEST(ids_are_decimal_digits_within_int64) {
  const int64_t ids[] = {0, 7, std::numeric_limits<int64_t>::max()};
  const Words words = words_of_ids(ids, 3);
  CHECK_EQ(words.text, std::string("0\n7\n9223372036854775807\n"));
  const auto again = ids_of_words(view(words));
  CHECK(again.has_value() && *again == std::vector<int64_t>(ids, ids + 3));
  Words zeros;
  zeros.add("0000000000000000000000012");
  CHECK_EQ((*ids_of_words(view(zeros)))[0], int64_t{12});
  for (const char* word :
       {"", "-1", "-0", "+1", " 1", "1 ", "1\n", "1_0", "0x1", "9223372036854775808", "1.0", "\xd9\xa1"}) {
    Words bad;
    bad.add("5");
    bad.add(word);
    CHECK(!ids_of_words(view(bad)).has_value());
  }
}

TEST(fields_stand_between_separators_and_before_the_line_end) {
  const std::string text = "a\tb c\td\r\nonly\n\te\n\tx";
  const std::vector<int64_t> ends = line_ends(text, 9, true);
  CHECK(ends == (std::vector<int64_t>{9, 14, 17, 19}));
  CHECK(line_ends(text, 9, false) == (std::vector<int64_t>{9, 14, 17}));
  CHECK(line_ends(text, 2, true) == (std::vector<int64_t>{9, 14}));
  const Fields second = fields(text, ends.data(), ends.size(), '\t', 1);
  CHECK_EQ(second.words.text, std::string("b c\n\ne\nx\n"));
  CHECK(second.behind == (std::vector<int64_t>{6, -1, 17, 19}));
  CHECK_EQ(fields(text, ends.data(), 1, '\t', 2).words.text, std::string("d\n"));
  const Fields first = fields(text, ends.data(), ends.size(), '\t', 0);
  CHECK_EQ(first.words.text, std::string("a\nonly\n\n\n"));
  CHECK(first.behind == (std::vector<int64_t>{2, 14, 15, 18}));
}

TEST(records_break_off_where_their_bytes_do) {
  const size_t dim = 3;
  const std::vector<float> values = any_floats(3, dim * 5);
  Words words;
  for (const char* word : {"", "one", "t\nwo", "\xff\xfe", "five"}) words.add(word);
  const std::string bytes = made([&](const Room& room) { join_records(values.data(), dim, view(words), room); });
  std::string wanted, without_feeds;
  for (size_t i = 0; i < 5; ++i) {
    const std::string record = std::string(view(words)[i]) + " " +
                               std::string(reinterpret_cast<const char*>(values.data() + i * dim), dim * sizeof(float));
    wanted += record + "\n";
    without_feeds += record;
  }
  CHECK(bytes == wanted);
  for (size_t n = 0; n <= bytes.size(); ++n) {
    std::vector<float> out(5 * dim, -7.0f);
    const Records records = split_records(std::string_view(bytes).substr(0, n), 5, dim, out.data());
    const size_t whole = records.words.ends.size();
    CHECK(records.used <= n && (whole == 5 || records.used + 14 + 5 > n));
    out.resize(whole * dim);
    CHECK(same_bits(out, {values.begin(), values.begin() + static_cast<long>(whole * dim)}));
    if (n == bytes.size()) CHECK(whole == 5 && records.words.text == words.text);
  }
  std::vector<float> out(5 * dim);
  CHECK_EQ(split_records(without_feeds, 5, dim, out.data()).words.text, words.text);
  CHECK(same_bits(out, values));
  CHECK_EQ(split_records(bytes, 2, dim, out.data()).words.text, std::string("\none\n"));
}

TEST(bytes_of_any_kind_are_split_parsed_or_refused) {
  Sampler sampler(4);
  const std::string kinds = "0123456789 \n\t\r.e+-xninf\xff";
  for (int round = 0; round < 4'000; ++round) {
    // On the heap, with the exact length, so that a sanitizer detects a read past its end.
    std::vector<char> bytes(sampler.bits() % 60);
    for (char& c : bytes) {
      c = round % 2 == 0 ? static_cast<char>(sampler.bits()) : kinds[sampler.bits() % kinds.size()];
    }
    const std::string_view text(bytes.data(), bytes.size());
    const size_t dim = 1 + sampler.bits() % 3;
    const std::vector<int64_t> ends = line_ends(text, 100, true);
    const Fields found = fields(text, ends.data(), ends.size(), ' ', 0);
    CHECK_EQ(found.words.ends.size(), ends.size());
    std::vector<float> out(ends.size() * dim);
    parse_rows(text, found.behind.data(), ends.data(), ends.size(), dim, out.data());
    (void)ids_of_words(view(found.words));
    std::vector<float> rows(10 * dim);
    CHECK(split_records(text, 10, dim, rows.data()).used <= text.size());
  }
}

}  // namespace bunkbed
