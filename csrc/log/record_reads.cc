#include "log/record_reads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "base/error.h"
#include "base/mutex.h"
#include "base/stall.h"
#include "base/workers.h"

namespace bunkbed {

using vfs::round_down;
using vfs::round_up;

void RecordReads::resize(size_t slice_bytes, size_t num_slices) {
  std::vector<vfs::Buffer> memory(2);
  if (slice_bytes * num_slices > 0) memory = vfs::Buffer::side_by_side(2, slice_bytes * num_slices);
  lane_.resize(slice_bytes, num_slices, ~size_t{0}, std::move(memory[0]));
  // Staging always has more to read. It leaves a quarter of the threads to calls that wait for their reads.
  staging_lane_.resize(slice_bytes, num_slices, std::max<size_t>(1, std::min(num_slices, kIoThreads) * 3 / 4),
                       std::move(memory[1]));
}

ReadPlan RecordReads::plan(std::vector<ReadRequest> requests) {
  ReadPlan plan;
  plan.requests = std::move(requests);
  std::sort(plan.requests.begin(), plan.requests.end(),
            [](const ReadRequest& a, const ReadRequest& b) { return a.position < b.position; });
  const size_t largest = lane_.largest_read();
  plan.extents.reserve(plan.requests.size());
  for (uint32_t i = 0; i < plan.requests.size(); ++i) {
    const Segment& segment = segments_.at(layout_, plan.requests[i].position);
    if (plan.held.empty() || plan.held.back() != segment.file) plan.held.push_back(segment.file);
    vfs::File* file = segment.file.get();
    const uint64_t unit = file->read_alignment();
    const uint64_t offset = layout_.slot_of(plan.requests[i].position) * layout_.stride;
    const uint64_t begin = round_down(offset, unit);
    const uint64_t end = round_up(offset + layout_.stride, unit);
    bool is_near = false;
    if (!plan.extents.empty()) {
      ReadPlan::Extent& last = plan.extents.back();
      is_near = last.file == file && begin <= last.offset + last.bytes + gap_bytes_;
      if (is_near && end - last.offset <= largest) {
        last.bytes = static_cast<uint32_t>(std::max<uint64_t>(last.bytes, end - last.offset));
        ++last.count;
        continue;
      }
    }
    plan.extents.push_back({file, begin, static_cast<uint32_t>(end - begin), i, 1, is_near});
  }
  for (const ReadPlan::Extent& extent : plan.extents) plan.bytes += extent.bytes;
  return plan;
}

void RecordReads::deliver(const ReadPlan& plan, size_t index, const std::byte* data, size_t read_bytes) const {
  const ReadPlan::Extent& extent = plan.extents[index];
  for (uint32_t r = extent.first; r < extent.first + extent.count; ++r) {
    const ReadRequest& request = plan.requests[r];
    const uint64_t slot = layout_.slot_of(request.position);
    const std::byte* record = data + (slot * layout_.stride - extent.offset);
    layout_.verify(request.id, record, *extent.file, slot);
    std::memcpy(request.payload, record, read_bytes);
  }
}

void RecordReads::read_alone(const ReadPlan& plan, size_t index, size_t read_bytes) const {
  const ReadPlan::Extent& extent = plan.extents[index];
  const uint64_t unit = extent.file->read_alignment();
  vfs::Buffer data(round_up(layout_.stride + unit, std::max<uint64_t>(unit, 512)));
  for (uint32_t r = extent.first; r < extent.first + extent.count; ++r) {
    const uint64_t offset = layout_.slot_of(plan.requests[r].position) * layout_.stride;
    const uint64_t begin = round_down(offset, unit);
    const auto bytes = static_cast<uint32_t>(round_up(offset + layout_.stride, unit) - begin);
    extent.file->read(data.data(), bytes, begin);
    ReadPlan one;
    one.requests = {plan.requests[r]};
    one.extents = {{extent.file, begin, bytes, 0, 1, false}};
    deliver(one, 0, data.data(), read_bytes);
  }
}

void RecordReads::execute(const ReadPlan& plan, size_t read_bytes, vfs::ReadLane* lane,
                          const std::function<void()>& meanwhile) const {
  // Hands out the extents; none after the first failure.
  class Source final : public vfs::ReadSource {
   public:
    Source(const RecordReads& reads, const ReadPlan& plan, size_t read_bytes)
        : reads_(reads), plan_(plan), read_bytes_(read_bytes) {}
    bool next(vfs::ReadOp* op) noexcept override {
      const size_t index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= plan_.extents.size()) return false;
      const ReadPlan::Extent& extent = plan_.extents[index];
      *op = {extent.file, extent.offset, extent.bytes, index};
      return true;
    }
    void done(const vfs::ReadOp& op, const std::byte* data, std::exception_ptr error) noexcept override {
      try {
        if (!error) {
          reads_.deliver(plan_, op.tag, data, read_bytes_);
        } else {
          reads_.read_alone(plan_, op.tag, read_bytes_);
        }
        return;
      } catch (...) {
        error = std::current_exception();
      }
      next_.store(plan_.extents.size(), std::memory_order_relaxed);
      const MutexLock guard(error_mutex_);
      if (!error_) error_ = error;
    }
    void rethrow() {  // once no read is under way
      if (error_) std::rethrow_exception(error_);
    }

   private:
    const RecordReads& reads_;
    const ReadPlan& plan_;
    const size_t read_bytes_;
    std::atomic<size_t> next_{0};
    Mutex error_mutex_{LockLevel::kLocal};  // guards error_
    std::exception_ptr error_;
  };
  Source source(*this, plan, read_bytes);
  vfs::read_all(source, plan.extents.size(), plan.bytes, *lane, meanwhile);
  source.rethrow();
}

void RecordReads::count(const ReadPlan& plan, double waited_s) {
  stats_->reads += plan.extents.size();
  for (const ReadPlan::Extent& extent : plan.extents) {
    uint64_t& records = extent.is_sweep    ? stats_->swept_records
                        : extent.count > 1 ? stats_->merged_records
                                           : stats_->single_records;
    records += extent.count;
  }
  stats_->read_bytes += plan.bytes;
  stats_->read_wait_s += waited_s;
}

void RecordReads::read(const ReadPlan& plan, size_t read_bytes, const std::function<void()>& meanwhile) {
  const Stall stall;
  const auto started = std::chrono::steady_clock::now();
  const auto count_them = [&] {
    count(plan, std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  };
  try {
    execute(plan, read_bytes, &lane_, meanwhile);
  } catch (...) {
    count_them();
    throw;
  }
  count_them();
}

}  // namespace bunkbed
