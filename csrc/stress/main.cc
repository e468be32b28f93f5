// bunkbed_stress [--kind NAME] [--seconds S] [--episodes N] [--seed N] [--threads N] [--calls N]
//                [--backend threads|uring] [--fault NAME]
//
// Prints the calls and the wrong results. The exit status is 1 where a result was wrong, 2 where an argument is, and 77
// where the backend is not available.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/fault.h"
#include "stress/stress.h"
#include "vfs/batch_reads.h"

namespace {

using bunkbed::stress::Outcome;

void give_up(int) {
  constexpr char kText[] = "bunkbed_stress: it hangs\n";
  if (::write(STDERR_FILENO, kText, sizeof(kText) - 1) > 0) std::abort();
  std::abort();
}

void show(const std::string& kind, const std::string& backend, const Outcome& outcome) {
  uint64_t calls = 0;
  for (const auto& [name, count] : outcome.tally.calls) calls += count;
  std::printf(
      "%s, %s: %llu calls, %llu rows checked, %llu wrong; %llu lives, %llu episodes; reads: %llu uring, %llu threads\n",
      kind.c_str(), backend.c_str(), static_cast<unsigned long long>(calls),
      static_cast<unsigned long long>(outcome.tally.rows), static_cast<unsigned long long>(outcome.tally.num_wrong),
      static_cast<unsigned long long>(outcome.lives), static_cast<unsigned long long>(outcome.episodes),
      static_cast<unsigned long long>(outcome.uring_reads), static_cast<unsigned long long>(outcome.thread_reads));
  for (const auto& [name, count] : outcome.tally.calls) {
    std::printf("  %10llu  %s\n", static_cast<unsigned long long>(count), name.c_str());
  }
  for (const auto& [name, count] : outcome.tally.refused) {
    std::printf("  %10llu  refused: %s\n", static_cast<unsigned long long>(count), name.c_str());
  }
  for (const std::string& what : outcome.tally.wrong) std::printf("  wrong: %s\n", what.c_str());
  std::fflush(stdout);
}

int usage(const char* what) {
  std::fprintf(stderr, "bunkbed_stress: %s\n", what);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  bunkbed::stress::Options options;
  std::vector<std::string> kinds = bunkbed::stress::kinds();
  std::string backend = "threads";
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) return usage("an option takes a value");
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--kind") {
      if (value != "all") kinds = {value};
    } else if (name == "--seconds") {
      options.seconds = std::strtod(value.c_str(), nullptr);
    } else if (name == "--episodes") {
      options.episodes = std::strtoull(value.c_str(), nullptr, 10);
    } else if (name == "--seed") {
      options.seed = std::strtoull(value.c_str(), nullptr, 10);
    } else if (name == "--threads") {
      options.threads = std::max<size_t>(1, std::strtoull(value.c_str(), nullptr, 10));
    } else if (name == "--calls") {
      options.calls = std::max<size_t>(1, std::strtoull(value.c_str(), nullptr, 10));
    } else if (name == "--backend") {
      backend = value;
    } else if (name == "--fault") {
      if (!bunkbed::set_fault(value.c_str())) return usage("there is no such fault");
      options.stops_at_wrong = true;
    } else {
      return usage(("there is no option " + name).c_str());
    }
  }
  try {
    bunkbed::vfs::set_io(backend);
  } catch (const bunkbed::Error& error) {
    std::printf("%s: skipped: %s\n", backend.c_str(), error.what());
    return 77;
  }
  ::signal(SIGALRM, give_up);
  bool is_sound = true;
  for (const std::string& kind : kinds) {
    options.kind = kind;
    // A test gives a number of episodes and ends after ten minutes itself: the alarm must come before that.
    ::alarm(options.episodes > 0 ? 240 : static_cast<unsigned>(options.seconds) + 600);
    try {
      const Outcome outcome = bunkbed::stress::run(options);
      show(kind, backend, outcome);
      is_sound &= outcome.tally.num_wrong == 0;
    } catch (const bunkbed::Error& error) {
      return usage(error.what());
    }
  }
  return is_sound ? 0 : 1;
}
