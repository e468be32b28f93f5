// The stress of threads (csrc/stress) in short: a few episodes of every kind find nothing wrong, and seeded bugs are
// found. In processes of their own: one of the bugs may crash.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "stress/stress.h"
#include "tests/check.h"
#include "tests/sandbox.h"

using namespace bunkbed::test;

namespace {

constexpr int kUsage = 2, kSkipped = 77, kNotStarted = 127;

struct Ended {
  int status;  // or minus the signal
  std::string output;
};

// bunkbed_stress next to this program; BUNKBED_EMULATOR, words between blanks, comes before it.
Ended stress(std::vector<std::string> arguments) {
  const Sandbox sandbox;
  const std::string output = sandbox / "output";
  const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "bunkbed_stress";
  arguments.insert(arguments.begin(), program.string());
  if (const char* emulator = std::getenv("BUNKBED_EMULATOR")) {
    std::istringstream parts(emulator);
    arguments.insert(arguments.begin(), std::istream_iterator<std::string>(parts), {});
  }
  std::vector<char*> words;
  for (std::string& argument : arguments) words.push_back(argument.data());
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, words[0], &actions, nullptr, words.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  while (error == 0 && ::waitpid(child, &status, 0) < 0) CHECK(errno == EINTR);
  if (error != 0 || (WIFEXITED(status) && WEXITSTATUS(status) == kNotStarted)) {
    fail(__FILE__, __LINE__, program.string() + " does not start");
  }
  std::ostringstream text;
  text << std::ifstream(output).rdbuf();
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), text.str()};
}

void find(const std::string& fault, const std::string& kind) {
  const Ended ended = stress({"--kind", kind, "--fault", fault, "--episodes", "80", "--calls", "60", "--seed", "1"});
  if (ended.status != 0 && ended.status != kUsage && ended.status != kSkipped) return;
  fail(__FILE__, __LINE__, fault + " was not found: status " + std::to_string(ended.status) + "\n" + ended.output);
}

}  // namespace

TEST(stress_finds_nothing_wrong) {
  int seed = 0;
  for (const std::string& kind : bunkbed::stress::kinds()) {
    const std::string backend = ++seed % 2 == 0 ? "uring" : "threads";
    const Ended ended = stress(
        {"--kind", kind, "--backend", backend, "--episodes", "4", "--calls", "40", "--seed", std::to_string(seed)});
    if (ended.status == 0 || ended.status == kSkipped) continue;
    fail(__FILE__, __LINE__, kind + ": status " + std::to_string(ended.status) + "\n" + ended.output);
  }
}

TEST(stress_finds_a_scan_that_misses_a_change) { find("scan_misses_change", "fixed"); }
TEST(stress_finds_a_lookup_without_its_lock) { find("lookup_without_lock", "fixed"); }
TEST(stress_finds_a_descriptor_that_is_left_open) { find("descriptor_leak", "open"); }
TEST(stress_finds_a_lost_write_back) { find("lost_write_back", "fixed"); }
