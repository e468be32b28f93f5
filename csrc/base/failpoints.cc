#include "base/failpoints.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <map>
#include <thread>

#include "base/error.h"
#include "base/mutex.h"

namespace bunkbed {

namespace {

constexpr const char* kNames[] = {
    "commit.begin",
    "commit.frozen",
    "commit.flushed",
    "commit.drained",
    "commit.sealed",
    "commit.published",
    "manifest.written",
    "manifest.synced",
    "manifest.linked",
    "manifest.durable",
    "collect.manifests",
    "collect.durable",
    "collect.segment",
    "log.chunk",
    "log.chunk_written",
    "log.segment",
    "log.synced",
    "log.names",
    "evict",
    "compact.chosen",
    "compact.read",
    "compact.moved",
    "compact.dropped",
    "open.adopted",
    "open.rebuilt",
    "rewind.loaded",
    "run.tables",
    "run.files",
    "run.published",
    "reads.finished",
    "open.index_snapshot",
    "index_snapshot.started",
    "index_snapshot.part",
    "index_snapshot.written",
    "index_snapshot.synced",
    "index_snapshot.linked",
    "index_snapshot.durable",
};

struct Armed {
  Mutex mutex{LockLevel::kTesting};  // guards the rest
  std::map<std::string, uint64_t> counts;
  std::string name;
  uint64_t nth = 0;
  FailpointAction action = FailpointAction::kCount;
  double delay_s = 0.0;
};

Armed& armed() {
  static auto* instance = new Armed;  // leaked: threads may reach a failpoint at process exit
  return *instance;
}

}  // namespace

void reach_failpoint(const char* name) {
  double delay_s = 0.0;
  {
    Armed& state = armed();
    const MutexLock guard(state.mutex);
    const uint64_t count = ++state.counts[name];
    if (state.name != name || state.action == FailpointAction::kCount) return;
    if (state.nth != 0 && state.nth != count) return;
    if (state.action == FailpointAction::kDie) {
      for (;;) ::kill(::getpid(), SIGKILL);
    }
    if (state.action == FailpointAction::kError) {
      throw Error(ErrorKind::kSystem, std::string("injected failure at ") + name, EIO);
    }
    delay_s = state.delay_s;
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(delay_s));
}

void arm_failpoint(const std::string& name, uint64_t nth, FailpointAction action, double delay_s) {
  bool is_known = name.empty();
  for (const char* known : kNames) is_known |= name == known;
  if (!is_known) throw Error(ErrorKind::kInvalid, "there is no failpoint '" + name + "'");
  Armed& state = armed();
  const MutexLock guard(state.mutex);
  state.counts.clear();
  state.name = name;
  state.nth = nth;
  state.action = action;
  state.delay_s = delay_s;
  failpoints_armed = true;
}

void disarm_failpoints() { failpoints_armed = false; }

std::vector<std::pair<std::string, uint64_t>> failpoint_counts() {
  Armed& state = armed();
  const MutexLock guard(state.mutex);
  std::vector<std::pair<std::string, uint64_t>> found;
  for (const char* name : kNames) found.emplace_back(name, state.counts[name]);
  return found;
}

}  // namespace bunkbed
