// The states after power loss: durable bytes are never lost, and all others may be.
#include <set>

#include "tests/check.h"
#include "tests/sandbox.h"
#include "vfs/powerloss.h"

using namespace bunkbed;
using namespace bunkbed::test;
using vfs::Names;
using vfs::Sectors;

namespace {

struct Found {
  bool exists = false;
  std::string text;
};

Found look(const vfs::CrashState& state, const std::string& name) {
  const Sandbox sandbox;
  state.write(sandbox / "disk");
  if (!vfs::posix().exists(sandbox / ("disk/" + name))) return {};
  const auto file = vfs::posix().open(sandbox / ("disk/" + name), false);
  std::string text(file->size(), '\0');
  file->read(text.data(), text.size(), 0);
  return {true, text};
}

// The texts of a file after many power losses; "-" where the file does not exist.
std::set<std::string> outcomes(vfs::PowerlossVfs& disk, const std::string& name, uint64_t moment, Names names,
                               Sectors sectors) {
  std::set<std::string> found;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const Found file = look(disk.crash(moment, names, sectors, seed), name);
    found.insert(file.exists ? file.text : "-");
  }
  return found;
}

}  // namespace

TEST(powerloss_what_was_synced_stays) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "d");
  vfs::PowerlossVfs disk(sandbox / "d");
  const std::string text(1000, 'x');
  const auto file = disk.create_small(sandbox / "d/a");
  file->write(text.data(), text.size(), 0);
  const uint64_t written = disk.now();
  file->sync();
  const uint64_t synced = disk.now();
  disk.sync_directory(sandbox / "d");
  const uint64_t named = disk.now();
  disk.link(sandbox / "d/a", sandbox / "d/b");
  disk.remove(sandbox / "d/a");
  const uint64_t removed = disk.now();

  for (const Sectors sectors : {Sectors::kKept, Sectors::kDropped, Sectors::kTrashed, Sectors::kMixed}) {
    CHECK(outcomes(disk, "a", named, Names::kNone, sectors) == std::set<std::string>{text});
    CHECK((outcomes(disk, "a", synced, Names::kSubset, sectors) == std::set<std::string>{"-", text}));
  }
  CHECK(outcomes(disk, "a", synced, Names::kNone, Sectors::kKept) == std::set<std::string>{"-"});
  CHECK(outcomes(disk, "a", 0, Names::kAll, Sectors::kKept) == std::set<std::string>{"-"});
  CHECK(outcomes(disk, "a", written, Names::kAll, Sectors::kKept) == std::set<std::string>{text});
  // Either empty, or as many zeros.
  const std::string zeros(1000, '\0');
  CHECK((outcomes(disk, "a", written, Names::kAll, Sectors::kDropped) == std::set<std::string>{"", zeros}));
  for (const std::string& left : outcomes(disk, "a", written, Names::kAll, Sectors::kTrashed)) CHECK(left != text);
  CHECK(outcomes(disk, "a", written, Names::kAll, Sectors::kMixed).size() > 8);

  // The link comes before the removal: no prefix has the second alone.
  size_t both = 0, neither = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const auto prefix = disk.crash(removed, Names::kPrefix, Sectors::kKept, seed);
    CHECK(look(prefix, "a").exists || look(prefix, "b").exists);
    const auto subset = disk.crash(removed, Names::kSubset, Sectors::kKept, seed);
    both += look(subset, "a").exists && look(subset, "b").exists;
    neither += !look(subset, "a").exists && !look(subset, "b").exists;
  }
  CHECK(both > 5);
  CHECK(neither > 5);
}

TEST(powerloss_a_sync_covers_what_ended_before_it) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "d");
  vfs::PowerlossVfs disk(sandbox / "d");
  const auto file = disk.create_small(sandbox / "d/a");
  disk.sync_directory(sandbox / "d");
  file->write("one", 3, 0);
  file->sync();
  file->write("two", 3, 0);
  const uint64_t end = disk.now();
  CHECK_EQ(look(disk.crash(end, Names::kNone, Sectors::kDropped, 1), "a").text, std::string("one"));
  CHECK_EQ(look(disk.crash(end, Names::kNone, Sectors::kKept, 1), "a").text, std::string("two"));
  CHECK_EQ(disk.describe(end), std::string("after write a"));
  CHECK_EQ(disk.describe(end - 1), std::string("during write a"));
  // As if neither the file nor its name had been synced.
  CHECK(look(disk.crash(end, Names::kNone, Sectors::kDropped, 1, {{"", "a"}}), "a").text != "one");
  CHECK(!look(disk.crash(end, Names::kNone, Sectors::kKept, 1, {{"create", "a"}}), "a").exists);
  CHECK(look(disk.crash(end, Names::kNone, Sectors::kKept, 1, {{"link", "a"}, {"", "b"}}), "a").exists);
}

TEST(powerloss_directories_and_what_was_there) {
  const Sandbox sandbox;
  vfs::posix().make_directories(sandbox / "d/old");
  vfs::posix().create_small(sandbox / "d/old/a")->write("old", 3, 0);
  vfs::PowerlossVfs disk(sandbox / "d");
  disk.make_directories(sandbox / "d/new/deep");
  const auto file = disk.create_small(sandbox / "d/new/deep/b");
  file->write("new", 3, 0);
  const uint64_t end = disk.now();
  CHECK_EQ(look(disk.crash(0, Names::kNone, Sectors::kDropped, 1), "old/a").text, std::string("old"));
  CHECK(!look(disk.crash(0, Names::kAll, Sectors::kKept, 1), "new").exists);
  CHECK_EQ(look(disk.crash(end, Names::kAll, Sectors::kKept, 1), "new/deep/b").text, std::string("new"));
  CHECK(!look(disk.crash(end, Names::kNone, Sectors::kKept, 1), "new/deep/b").exists);
  CHECK(disk.crash(end, Names::kNone, Sectors::kKept, 1).digest() ==
        disk.crash(end, Names::kNone, Sectors::kKept, 2).digest());
  CHECK(disk.crash(end, Names::kNone, Sectors::kKept, 1).digest() !=
        disk.crash(end, Names::kAll, Sectors::kKept, 1).digest());
  disk.truncate(sandbox / "d/old/a", 1);
  CHECK_EQ(look(disk.crash(disk.now(), Names::kNone, Sectors::kDropped, 1), "old/a").text, std::string("o"));
  CHECK_EQ(look(disk.crash(end, Names::kNone, Sectors::kDropped, 1), "old/a").text, std::string("old"));
  // A failed operation has no effect.
  CHECK_THROWS(disk.link(sandbox / "d/old/a", sandbox / "d/new/deep/b"), ErrorKind::kExists, "exists");
  CHECK_EQ(look(disk.crash(disk.now(), Names::kAll, Sectors::kKept, 1), "new/deep/b").text, std::string("new"));
}

TEST(fault_interrupted_and_short_calls_are_finished) {
  const Sandbox sandbox;
  vfs::FaultVfs faulty;
  const std::string text(20000, 'x');
  for (const vfs::Fault fault : {vfs::Fault::kInterrupt, vfs::Fault::kShort, vfs::Fault::kDelay}) {
    for (uint64_t at = 1; at <= 8; ++at) {
      const std::string folder = sandbox / std::to_string(static_cast<int>(fault) * 100 + static_cast<int>(at));
      faulty.set_fault(at, fault);
      faulty.make_directories(folder);
      const auto lock = faulty.lock(folder + "/lock");
      const auto file = faulty.create_small(folder + "/a");
      file->write(text.data(), text.size(), 0);
      file->sync();
      faulty.link(folder + "/a", folder + "/b");
      faulty.sync_directory(folder);
      std::string read(text.size(), '\0');
      file->read(read.data(), read.size(), 0);
      CHECK_EQ(faulty.count(), uint64_t{8});
      CHECK(read == text);
    }
  }
}
