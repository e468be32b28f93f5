#include "probe/probe.h"

#include <vector>

#include "base/error.h"
#include "tests/check.h"
#include "tests/sandbox.h"

using namespace bunkbed;
using namespace bunkbed::test;

TEST(probe_memory_copies) { CHECK(probe_memory(2, 8u << 20, 0.01) > 0); }

TEST(probe_rows_takes_time_and_refuses_what_is_not_there) {
  RowProbe probe(100, 768);
  const std::vector<int64_t> rows(1000, 99);
  for (const RowWork work : {RowWork::kRead, RowWork::kCopy, RowWork::kChange}) {
    CHECK(probe.run(rows.data(), rows.size(), 256, work) > 0);
    CHECK(probe.run(rows.data(), 1, 768, work) > 0);
    CHECK(probe.run(rows.data(), 0, 768, work) >= 0);
  }
  for (const int64_t row : {int64_t{-1}, int64_t{100}}) {
    CHECK_THROWS(probe.run(&row, 1, 256, RowWork::kRead), ErrorKind::kIndex, "among 100");
  }
  for (const size_t bytes : {0, 6, 772}) {
    CHECK_THROWS(probe.run(rows.data(), 1, bytes, RowWork::kRead), ErrorKind::kInvalid,
                 "multiple of 4 and at most 768");
  }
}

TEST(probe_writes_and_reads_a_file) {
  const Sandbox box;
  const auto [rate, written] = probe_writes(vfs::posix(), box / "file", 3u << 20, 10.0);
  CHECK(rate > 0);
  CHECK_EQ(written, size_t{3} << 20);
  CHECK_EQ(vfs::posix().open(box / "file", false)->size(), uint64_t{3} << 20);
  const auto [reads, unit] = probe_reads(vfs::posix(), {box / "file"}, 3, 0.02, 4096);
  CHECK(reads > 0);
  CHECK(unit == 1 || unit % 512 == 0);
  CHECK_THROWS(probe_writes(vfs::posix(), box / "file", 1, 1.0), ErrorKind::kExists, "exists already");
}

TEST(probe_writes_stop_in_time) {
  const Sandbox box;
  const auto [rate, written] = probe_writes(vfs::posix(), box / "file", size_t{1} << 40, 0.01);
  CHECK(rate >= 0);
  CHECK_EQ(vfs::posix().open(box / "file", false)->size(), written);
}

TEST(probe_reads_need_something_to_read) {
  const Sandbox box;
  (void)vfs::posix().create(box / "empty");
  CHECK_THROWS(probe_reads(vfs::posix(), {box / "empty"}, 2, 0.01, 4096), ErrorKind::kInvalid, "no whole block");
  CHECK_THROWS(probe_reads(vfs::posix(), {}, 2, 0.01, 4096), ErrorKind::kInvalid, "no whole block");
  CHECK_THROWS(probe_reads(vfs::posix(), {box / "none"}, 2, 0.01, 4096), ErrorKind::kNotFound, "no such file");
}

TEST(probes_report_a_failing_disk) {
  const Sandbox box;
  FaultVfs vfs;
  (void)probe_writes(vfs, box / "file", 1u << 20, 10.0);
  vfs.fail_all(Op::kRead, EIO);
  CHECK_THROWS(probe_reads(vfs, {box / "file"}, 3, 0.05, 4096), ErrorKind::kSystem, "");
  vfs.fail_all(Op::kWrite, ENOSPC);
  CHECK_THROWS(probe_writes(vfs, box / "other", 1u << 20, 10.0), ErrorKind::kSystem, "");
}
