// Runs every test case, or those whose name contains one of the arguments.
#include <cstdio>
#include <exception>
#include <string>

#include "check.h"

namespace {

bool is_wanted(const std::string& name, int argc, char** argv) {
  if (argc < 2) return true;
  for (int i = 1; i < argc; ++i) {
    if (name.find(argv[i]) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  int num_run = 0;
  int num_failed = 0;
  for (const bunkbed::test::Case& test : bunkbed::test::cases()) {
    if (!is_wanted(test.name, argc, argv)) continue;
    ++num_run;
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
