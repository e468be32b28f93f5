// A test case is `TEST(name) { ... }` in any file of this folder; it registers itself with main.cc.
// A failed CHECK ends its case with the expression, the values and the place.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"

namespace bunkbed::test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::ostringstream text;
  text << file << ":" << line << ": " << what;
  throw Failure(text.str());
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  std::ostringstream text;
  text.precision(17);
  text << expression << ": " << +a << " != " << +b;
  fail(file, line, text.str());
}

inline void check_equal(const std::string& a, const std::string& b, const char* expression, const char* file,
                        int line) {
  if (a != b) fail(file, line, std::string(expression) + ": \"" + a + "\" != \"" + b + "\"");
}

// `run` must throw an Error of this kind whose message contains `part`.
template <typename Run>
void check_throws(Run run, ErrorKind kind, const std::string& part, const char* file, int line) {
  try {
    run();
  } catch (const Error& error) {
    const std::string message = error.what();
    if (error.kind() != kind) fail(file, line, "wrong kind of error: " + message);
    if (message.find(part) == std::string::npos) {
      fail(file, line, "message \"" + message + "\" lacks \"" + part + "\"");
    }
    return;
  }
  fail(file, line, "nothing was thrown; expected \"" + part + "\"");
}

}  // namespace bunkbed::test

#define TEST(name)                                                                    \
  static void test_##name();                                                          \
  static const ::bunkbed::test::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition) ((condition) ? (void)0 : ::bunkbed::test::fail(__FILE__, __LINE__, "CHECK(" #condition ")"))
#define CHECK_EQ(a, b) ::bunkbed::test::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(statement, kind, part) \
  ::bunkbed::test::check_throws([&] { statement; }, (kind), (part), __FILE__, __LINE__)
