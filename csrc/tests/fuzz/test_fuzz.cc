// Runs the fuzz targets with a fixed set of mutations, without a fuzzer. Every parser must throw an Error or succeed.
// The sanitizers of the test build check memory access.
#include <vector>

#include "directory/directory_file.h"
#include "format/format.h"
#include "fuzz/targets.h"
#include "jobs/index_snapshots.h"
#include "table/table.h"
#include "tests/sample.h"
#include "tests/sandbox.h"

namespace bunkbed::test {

namespace {

std::vector<uint8_t> read_file(const std::string& path) {
  const auto file = vfs::posix().open(path, false);
  std::vector<uint8_t> bytes(file->size());
  file->read(bytes.data(), bytes.size(), 0);
  return bytes;
}

// The manifest and the segment of a small table's newest commit.
struct Files {
  std::vector<uint8_t> manifest, segment, directory;
};

Files files_of(OptimizerKind kind) {
  const Sandbox sandbox;
  TableSpec spec;
  spec.num_rows = 40;
  spec.dim = 3;
  spec.optimizer.kind = kind;
  auto table = Table::create(vfs::posix(), sandbox / "t", "t", spec, 1 << 20);
  const std::vector<int64_t> ids = {3, 5, 7};
  const std::vector<float> grads(9, 1.0f);
  table->update(ids.data(), ids.size(), grads.data(), std::nullopt, std::nullopt);
  index_snapshot_rows = 1;
  index_snapshots_in_line = true;
  table->commit("{\"a\":1}", "kept");  // takes an index snapshot
  index_snapshot_rows = 100'000;
  index_snapshots_in_line = false;
  const std::vector<uint8_t> directory = read_file(sandbox / ("t/" + directory_name(1)));
  table->close();
  return {read_file(sandbox / ("t/" + manifest_name(1))), read_file(sandbox / ("t/" + segment_name(1))), directory};
}

// Returns `data` with a few bytes changed, and a part removed or doubled.
std::vector<uint8_t> mutated(std::vector<uint8_t> data, Sampler* chance) {
  constexpr uint64_t kNumbers[] = {0, 1, 0xff, 0x7fffffff, 0x80000000, 0xffffffff, 1ull << 40, 1ull << 63, ~0ull};
  for (uint64_t n = 1 + chance->bits() % 4; n > 0 && !data.empty(); --n) {
    const size_t at = chance->bits() % data.size();
    switch (chance->bits() % 5) {
      case 0:
        data[at] ^= static_cast<uint8_t>(1u << chance->bits() % 8);
        break;
      case 1:
        data[at] = static_cast<uint8_t>(chance->bits());
        break;
      case 2:
      case 3: {
        const uint64_t number = kNumbers[chance->bits() % std::size(kNumbers)];
        for (size_t i = 0; i < (chance->bits() % 2 == 0 ? 4u : 8u) && at + i < data.size(); ++i) {
          data[at + i] = static_cast<uint8_t>(number >> 8 * i);
        }
        break;
      }
      case 4:
        if (chance->bits() % 8 == 0) data.resize(at);
        break;
    }
  }
  return data;
}

template <typename Target>
void bombard(const std::vector<uint8_t>& whole, int rounds, const Target& target) {
  Sampler chance(whole.size());
  constexpr uint8_t kMendings[] = {0, 1, 3, 7, 8, 15, 16, 24, 31};
  for (int round = 0; round < rounds; ++round) {
    std::vector<uint8_t> data = round == 0 ? whole : mutated(whole, &chance);
    data.insert(data.begin(), kMendings[static_cast<size_t>(round) % std::size(kMendings)]);
    target(data.data(), data.size());
  }
}

}  // namespace

TEST(fuzz_targets_take_anything) {
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdam}) {
    const Files files = files_of(kind);
    bombard(files.manifest, 20000, fuzz::manifest);
    bombard(files.segment, 5000, fuzz::segment);
    bombard(files.directory, 5000, fuzz::directory);
    std::vector<uint8_t> both = {static_cast<uint8_t>(files.manifest.size()),
                                 static_cast<uint8_t>(files.manifest.size() >> 8)};
    both.insert(both.end(), files.manifest.begin(), files.manifest.end());
    both.insert(both.end(), files.segment.begin(), files.segment.end());
    bombard(both, 1500, fuzz::table);
  }
}

}  // namespace bunkbed::test
