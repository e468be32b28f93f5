// Copies that stop after each of their operations in turn. The destination is then at its former commit or at the
// copied one, and a repeated copy succeeds.
#include <filesystem>

#include "maintenance/check.h"
#include "maintenance/copy.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/sandbox.h"
#include "vfs/fault.h"

namespace bunkbed::test {

namespace {

struct Source {
  Rows first, second;
};

// Commits 1 and 2; `to` has the first already.
Source make_source(const std::string& from, const std::string& to, const TableSpec& spec, size_t ram) {
  Source source;
  auto table = Table::create(vfs::posix(), from, "t", spec, ram);
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < 40; ++id) ids.push_back(id);
  const std::vector<float> ones(ids.size(), 1.0f);
  update(table.get(), ids, ones);
  apply(&source.first, ids, ones);
  table->commit(std::nullopt, "");
  copy_table(vfs::posix(), from, to, {}, nullptr);
  source.second = source.first;
  for (int step = 0; step < 3; ++step) {  // only some rows, so segments of the first commit stay in use
    update(table.get(), {1, 2, 3}, {1.0f, 1.0f, 1.0f});
    apply(&source.second, {1, 2, 3}, {1.0f, 1.0f, 1.0f});
  }
  table->commit(std::nullopt, "second");
  return source;
}

}  // namespace

TEST(copy_may_stop_anywhere) {
  const TableSpec spec = whole_numbers(64, 30);
  const size_t ram = minimum_ram(spec, 64, true);
  for (const bool may_link : {true, false}) {
    CopyOptions options;
    options.may_link = may_link;
    uint64_t operations = 0;
    for (uint64_t at = 1; operations == 0 || at <= operations; ++at) {
      const Sandbox sandbox;
      const std::string from = sandbox / "from", to = sandbox / "to";
      const Source source = make_source(from, to, spec, ram);
      const std::string when = "operation " + std::to_string(at) + (may_link ? " of links" : " of copies");
      vfs::FaultVfs vfs;
      vfs.count_reads(false);
      vfs.fail_at(at == 1 ? 0 : at, EIO, true);
      bool has_failed = false;
      try {
        copy_table(vfs, from, to, options, nullptr);
      } catch (const Error&) {
        has_failed = true;
      }
      if (at == 1) operations = vfs.count();
      CHECK_EQ(inspect_table(vfs::posix(), to).problems.size(), 0u);
      {
        const auto reader = open_table(vfs::posix(), to, ram, false);
        const bool is_new = reader->epoch() == 2;
        if (!is_new) CHECK_EQ(has_failed, true);
        check_table_is(reader.get(), is_new ? source.second : source.first, when);
      }
      const CopyResult again = copy_table(vfs::posix(), from, to, options, nullptr);
      CHECK_EQ(again.epoch, 2u);
      const CheckedTable after = inspect_table(vfs::posix(), to);
      CHECK_EQ(after.problems.size(), 0u);
      CHECK_EQ(after.leftovers.size(), 0u);
      check_table_is(open_table(vfs::posix(), to, ram).get(), source.second, when);
      check_table_is(open_table(vfs::posix(), from, ram).get(), source.second, when);
    }
    if (operations < 6) fail(__FILE__, __LINE__, "a copy takes more operations");
  }
}

}  // namespace bunkbed::test
