// Runs every test case, or those whose name contains one of the arguments.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "tests/check.h"

namespace {

bool is_wanted(const std::string& name, int argc, char** argv) {
  if (argc < 2) return true;
  for (int i = 1; i < argc; ++i) {
    if (name.find(argv[i]) != std::string::npos) return true;
  }
  return false;
}

// A test that hangs ends the run and is named. If the run were killed from outside, the test would be unknown.
constexpr unsigned kLongestS = 600;
const char* running = "";

void give_up(int) {
  for (const char* part : {"FAILED ", running, "\n  it hangs\n"}) {
    if (::write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  }
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  ::signal(SIGALRM, give_up);
  int num_run = 0;
  int num_failed = 0;
  for (const bunkbed::test::Case& test : bunkbed::test::cases()) {
    if (!is_wanted(test.name, argc, argv)) continue;
    ++num_run;
    running = test.name;
    ::alarm(kLongestS);
    try {
      test.run();
    } catch (const std::exception& error) {
      ++num_failed;
      std::fprintf(stderr, "FAILED %s\n  %s\n", test.name, error.what());
    }
  }
  std::fprintf(stderr, "%d of %d tests passed\n", num_run - num_failed, num_run);
  return num_failed == 0 && num_run > 0 ? 0 : 1;
}
