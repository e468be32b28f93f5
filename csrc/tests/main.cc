// Runs every test case, or those whose name contains one of the arguments. With `--apart` as the first argument each
// runs in a process of its own and is named when it starts: an emulator that gives no memory back runs them all so.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
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

bool passes(const bunkbed::test::Case& test) {
  running = test.name;
  ::alarm(kLongestS);
  try {
    test.run();
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED %s\n  %s\n", test.name, error.what());
    return false;
  }
}

bool passes_apart(const bunkbed::test::Case& test) {
  std::fprintf(stderr, "%s\n", test.name);
  const pid_t child = ::fork();
  if (child < 0) {
    std::fprintf(stderr, "FAILED %s\n  no process for it: %s\n", test.name, std::strerror(errno));
    return false;
  }
  if (child == 0) ::_exit(passes(test) ? 0 : 1);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (WIFSIGNALED(status)) std::fprintf(stderr, "FAILED %s\n  signal %d ended it\n", test.name, WTERMSIG(status));
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  ::signal(SIGALRM, give_up);
  const bool apart = argc > 1 && std::strcmp(argv[1], "--apart") == 0;
  if (apart) {
    --argc;
    ++argv;
  }
  int num_run = 0;
  int num_failed = 0;
  for (const bunkbed::test::Case& test : bunkbed::test::cases()) {
    if (!is_wanted(test.name, argc, argv)) continue;
    ++num_run;
    if (!(apart ? passes_apart(test) : passes(test))) ++num_failed;
  }
  std::fprintf(stderr, "%d of %d tests passed\n", num_run - num_failed, num_run);
  return num_failed == 0 && num_run > 0 ? 0 : 1;
}
