// Mirrors text_rows.h.
#include "text/text_rows.h"

#include <nanobind/stl/optional.h>

#include <utility>

#include "base/error.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

namespace {

using BytesIn = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MadeIds = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

std::string_view view(const BytesIn& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.shape(0)}; }

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

MadeIds array(std::vector<int64_t> values) {
  auto* kept = new std::vector<int64_t>(std::move(values));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return MadeIds(kept->data(), {kept->size()}, owner);
}

nb::bytes text_of(const Words& words) { return nb::bytes(words.text.data(), words.text.size()); }

void require_same(size_t got, size_t wanted, const char* what) {
  if (got == wanted) return;
  throw Error(ErrorKind::kInvalid,
              std::to_string(got) + " " + what + " were given for " + std::to_string(wanted) + " rows");
}

// A bytes object that is filled before Python code sees it. Takes the GIL only to make the object.
class NewBytes {
 public:
  char* room(size_t bytes) {
    const nb::gil_scoped_acquire acquire;
    made_ = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
    if (!made_.is_valid()) {
      PyErr_Clear();
      throw Error(ErrorKind::kMemory, "no memory for " + std::to_string(bytes) + " bytes");
    }
    return PyBytes_AsString(made_.ptr());
  }
  nb::bytes take() { return std::move(made_); }

 private:
  nb::bytes made_ = nb::steal<nb::bytes>(nb::handle());
};

}  // namespace

void bind_text_rows(nb::module_& m) {
  m.def(
      "words_of_ids",
      [](const Ids& ids) {
        Words words;
        {
          const WithoutGil without_gil;
          words = words_of_ids(ids.data(), ids.shape(0));
        }
        return nb::make_tuple(text_of(words), array(std::move(words.ends)));
      },
      "ids"_a,
      "Return ids int64[N] in decimal: (bytes with a line feed after each id, int64[N] offsets of these line feeds).");
  m.def(
      "ids_of_words",
      [](const nb::bytes& text, const Ids& ends) -> std::optional<MadeIds> {
        std::optional<std::vector<int64_t>> ids;
        {
          const std::string_view words = view(text);
          const WithoutGil without_gil;
          ids = ids_of_words({words, ends.data(), ends.shape(0)});
        }
        if (!ids.has_value()) return std::nullopt;
        return array(std::move(*ids));
      },
      "text"_a, "ends"_a, "Return int64[N] of words that are ids in decimal, or None if one is not.");
  m.def(
      "line_ends",
      [](const BytesIn& text, size_t most, bool is_last) {
        std::vector<int64_t> ends;
        {
          const WithoutGil without_gil;
          ends = line_ends(view(text), most, is_last);
        }
        return array(std::move(ends));
      },
      "text"_a, "most"_a, "is_last"_a,
      "Return where the next lines of uint8[N] end, at most `most`; with is_last also a line without a line feed.");
  m.def(
      "fields",
      [](const BytesIn& text, const Ids& ends, const nb::bytes& separator, size_t column) {
        if (separator.size() != 1) throw Error(ErrorKind::kInvalid, "a separator is one byte");
        const char byte = separator.c_str()[0];
        Fields found;
        {
          const WithoutGil without_gil;
          found = fields(view(text), ends.data(), ends.shape(0), byte, column);
        }
        return nb::make_tuple(text_of(found.words), array(std::move(found.words.ends)), array(std::move(found.behind)));
      },
      "text"_a, "ends"_a, "separator"_a, "column"_a,
      "Return one field of each line, in the form of words_of_ids, and int64[N]: the offset after the field, -1 if the "
      "line has too few fields.");
  m.def(
      "parse_rows",
      [](const BytesIn& text, const Ids& begins, const Ids& ends, const FloatsOut& out) {
        require_same(begins.shape(0), out.shape(0), "begins of lines");
        require_same(ends.shape(0), out.shape(0), "ends of lines");
        std::vector<int64_t> refused;
        {
          const WithoutGil without_gil;
          refused = parse_rows(view(text), begins.data(), ends.data(), out.shape(0), out.shape(1), out.data());
        }
        return array(std::move(refused));
      },
      "text"_a, "begins"_a, "ends"_a, "out"_a,
      "Parse numbers between white space into float32[N, dim]. Return the lines that it did not parse, for a slower "
      "parser.");
  m.def(
      "format_rows",
      [](const FloatsIn& rows, const nb::bytes& separator, const std::optional<nb::bytes>& text,
         const std::optional<Ids>& ends) {
        if (separator.size() != 1) throw Error(ErrorKind::kInvalid, "a separator is one byte");
        if (text.has_value() != ends.has_value()) throw Error(ErrorKind::kInvalid, "words are text and ends");
        const char byte = separator.c_str()[0];
        const std::string_view words = text.has_value() ? view(*text) : std::string_view();
        NewBytes made;
        {
          const WithoutGil without_gil;
          const WordsView named(words, ends.has_value() ? ends->data() : nullptr,
                                ends.has_value() ? ends->shape(0) : 0);
          format_rows(rows.data(), rows.shape(0), rows.shape(1), byte, ends.has_value() ? &named : nullptr,
                      [&made](size_t bytes) { return made.room(bytes); });
        }
        return made.take();
      },
      "rows"_a, "separator"_a, "text"_a = nb::none(), "ends"_a = nb::none(),
      "Format a line for each row of float32[N, dim], after its word if words are given.");
  m.def(
      "join_records",
      [](const FloatsIn& rows, const nb::bytes& text, const Ids& ends) {
        require_same(ends.shape(0), rows.shape(0), "words");
        const std::string_view words = view(text);
        NewBytes made;
        {
          const WithoutGil without_gil;
          join_records(rows.data(), rows.shape(1), {words, ends.data(), ends.shape(0)},
                       [&made](size_t bytes) { return made.room(bytes); });
        }
        return made.take();
      },
      "rows"_a, "text"_a, "ends"_a, "Return word2vec's binary records of float32[N, dim] and their words.");
  m.def(
      "split_records",
      [](const BytesIn& bytes, const FloatsOut& out) {
        Records records;
        {
          const WithoutGil without_gil;
          records = split_records(view(bytes), out.shape(0), out.shape(1), out.data());
        }
        return nb::make_tuple(text_of(records.words), array(std::move(records.words.ends)), records.used);
      },
      "bytes"_a, "out"_a,
      "Parse the next records of uint8[N] into float32[most, dim]. Return their words, in the form of words_of_ids, "
      "and the number of bytes.");
}

}  // namespace bunkbed
