#include "state/device_link.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace bunkbed {

namespace {

constexpr int kMostAsked = 100;  // the most write-backs that one call requests

class NoDeviceCache final : public DeviceCache {
 public:
  size_t num_held() const override { return 0; }
  size_t max_held() const override { return 0; }
  size_t num_in_use() const override { return 0; }
  size_t first_held(const int64_t*, size_t n) const override { return n; }
  size_t first_not_held(const int64_t*, size_t) const override { return 0; }
  size_t give_up(const int64_t*, size_t n) override { return n; }
  size_t give_up_all() override { return 0; }
  void arrived(const int64_t*, size_t) override {}
};

std::shared_ptr<DeviceCache> no_device_cache() {
  static const auto none = std::make_shared<NoDeviceCache>();
  return none;
}

}  // namespace

DeviceLink::DeviceLink(TableState& table) : table_(table), cache_(no_device_cache()) {}

void DeviceLink::attach(std::shared_ptr<DeviceCache> cache, std::function<void()> write_back) {
  if (is_attached_) {
    throw Error(ErrorKind::kInvalid,
                "table '" + table_.name + "' has a device cache already; a table has one at a time");
  }
  is_attached_ = true;
  cache_ = std::move(cache);
  write_back_ = std::move(write_back);
  table_.store->disk().reserve_held(max_rows());
}

void DeviceLink::detach(std::shared_ptr<DeviceCache>* cache, std::function<void()>* write_back) {
  is_attached_ = false;
  *cache = std::exchange(cache_, no_device_cache());
  *write_back = std::exchange(write_back_, nullptr);
  if (table_.store != nullptr) table_.store->disk().reserve_held(0);
}

size_t DeviceLink::max_rows() const { return std::min<uint64_t>(cache_->max_held(), table_.max_rows()); }

// Another thread may take a step on the device cache between the write-back and the lock. If the cache then evicted
// some rows to the table, the table would have half a step. So this checks under the lock and repeats the write-back.
TableLock::Guard DeviceLink::lock_written_back(const std::function<TableLock::Guard()>& take) {
  for (int asked = 0;; ++asked) {
    auto guard = take();
    const size_t held = cache_->num_held();
    if (held == 0) return guard;
    if (asked == kMostAsked) {
      throw Error(ErrorKind::kBroken, "table '" + table_.name + "': " + std::to_string(held) +
                                          " rows are still held by a device cache after it was asked " +
                                          std::to_string(asked) +
                                          " times to write them back; end the steps that other threads take first");
    }
    const std::function<void()> write_back = write_back_;
    guard.unlock();
    if (write_back) write_back();
  }
}

Error DeviceLink::refused(int64_t id, size_t position, const char* why) const {
  return Error(ErrorKind::kBroken, "table '" + table_.name + "': id " + std::to_string(id) + " at position " +
                                       std::to_string(position) + why);
}

void DeviceLink::check_not_held(const int64_t* ids, size_t n) const {
  const size_t i = cache_->first_held(ids, n);
  if (i == n) return;
  throw refused(ids[i], i,
                " is held by a device cache, which has its newest value; use the layer that owns the cache, or let it "
                "write back first");
}

void DeviceLink::require_not_in_use() const {
  if (cache_->num_in_use() == 0) return;
  throw rows_in_use(cache_->num_in_use());
}

void DeviceLink::give_up_all() {
  if (const size_t rows = cache_->give_up_all(); rows > 0) throw rows_in_use(rows);
}

Error DeviceLink::rows_in_use(size_t rows) const {
  return Error(ErrorKind::kBroken, "table '" + table_.name + "': " + std::to_string(rows) +
                                       " rows are in use by a device cache; end the step under way first");
}

void DeviceLink::release_for_change(const int64_t* ids, size_t n) {
  check_not_held(ids, n);
  const size_t i = cache_->give_up(ids, n);
  if (i == n) return;
  throw refused(ids[i], i,
                " is in use by a device cache; use the layer that owns the cache, or end the step under way first");
}

void DeviceLink::require_disk(const int64_t* ids, size_t n) const {
  if (!is_attached_) return;
  if (const uint64_t stored = table_.store->disk().rows_beyond(ids, n, max_rows(), table_.max_rows())) {
    throw table_.out_of_disk(std::to_string(stored) +
                                 " stored rows, those of its device cache included, are more than its limit of disk=" +
                                 std::to_string(table_.store->disk().limit()) + " bytes has room for",
                             table_.store->disk().needed(stored));
  }
}

void DeviceLink::require_directory(const int64_t* ids, size_t n) const {
  const MemoryPlan& plan = table_.store->plan();
  if (!is_attached_ || plan.total_bytes == 0 || !table_.store->directory().grows()) return;
  const uint64_t stored = std::min(table_.max_rows(), table_.store->directory().stored_rows() + max_rows());
  const size_t directory = table_.store->directory().bytes_for(stored);
  if (directory <= most_directory_bytes(plan, table_.payload_bytes)) return;
  Entry entries[256];
  for (size_t begin = 0; begin < n; begin += 256) {
    const size_t count = std::min<size_t>(256, n - begin);
    table_.store->directory().locate(ids + begin, count, entries);
    if (std::find(entries, entries + count, kAbsent) == entries + count) continue;
    throw Error(ErrorKind::kMemory,
                "table '" + table_.name + "': with the " + std::to_string(max_rows()) + " rows of its device cache " +
                    std::to_string(stored) + " rows may be stored, whose directory of " + std::to_string(directory) +
                    " bytes is more than its RAM budget of " + std::to_string(plan.total_bytes) +
                    " bytes allows; nothing was changed; open it with ram=" +
                    std::to_string(table_.store->budget_for(directory)) + " or more, or make the device cache smaller");
  }
}

}  // namespace bunkbed
