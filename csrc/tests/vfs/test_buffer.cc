// Memory of direct I/O: blocks of their own, aligned, and at huge pages where it is large enough.
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "vfs/vfs.h"

using namespace bunkbed;
using vfs::Buffer;

namespace {

bool is_aligned(const Buffer& buffer, uintptr_t unit) { return reinterpret_cast<uintptr_t>(buffer.data()) % unit == 0; }

}  // namespace

TEST(buffer_is_aligned_and_moves) {
  for (const size_t bytes : {size_t{1}, size_t{5000}, size_t{2} << 20, (size_t{3} << 20) + 1}) {
    Buffer buffer(bytes);
    CHECK(is_aligned(buffer, bytes < size_t{2} << 20 ? 4096 : size_t{2} << 20));
    CHECK_EQ(buffer.size(), vfs::round_up(bytes, 4096));
    std::memset(buffer.data(), 7, buffer.size());
    Buffer moved(std::move(buffer));
    CHECK(buffer.data() == nullptr && buffer.size() == 0);  // NOLINT: what a move leaves
    buffer = std::move(moved);
    CHECK(buffer.data()[bytes - 1] == std::byte{7});
  }
}

TEST(buffers_side_by_side_outlive_each_other) {
  std::vector<Buffer> buffers = Buffer::side_by_side(5, 1'000'000);
  CHECK_EQ(buffers.size(), size_t{5});
  CHECK(is_aligned(buffers[0], size_t{2} << 20));
  for (size_t i = 0; i < 5; ++i) {
    CHECK_EQ(buffers[i].size(), size_t{1'003'520});
    CHECK(buffers[i].data() == buffers[0].data() + i * buffers[0].size());
    std::memset(buffers[i].data(), static_cast<int>(i), buffers[i].size());
  }
  Buffer last = std::move(buffers[4]);
  buffers.clear();
  for (size_t at = 0; at < last.size(); ++at) CHECK(last.data()[at] == std::byte{4});
}
