// A device cache of a table, with memory of this process instead of a device's. DeviceMap plans the frames.
//
// As in the layers, plans are made and executed one at a time under `mutex_`, and `frames_mutex_` is held while frames
// are read, changed or written back. `mutex_` is taken before `frames_mutex_`.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/device_map.h"
#include "stress/subject.h"
#include "stress/worker.h"

namespace bunkbed::stress {

class Device {
 public:
  Device(Subject& subject, size_t frames);
  ~Device() { detach(); }
  void attach();
  // Writes back every dirty row first.
  void detach();
  // Makes a random call. Returns true: no table with a device is closed during an episode.
  bool call(Worker* worker, bool is_quiet);
  // Checks every row that is in a frame. Requires that no other thread is at work.
  void verify(const std::string& when, Tally* tally);

 private:
  std::unique_ptr<DeviceMap::Plan> place(const Batch& batch);
  void write_back();
  void step(Worker* worker, const Batch& batch, const std::map<size_t, int32_t>& amounts);
  float* frame(int64_t number) { return memory_.data() + static_cast<size_t>(number) * floats_; }

  Subject& subject_;
  const size_t num_frames_;
  const size_t floats_;  // of a record
  std::recursive_mutex mutex_;
  std::recursive_mutex frames_mutex_;
  std::shared_ptr<DeviceMap> map_;
  std::vector<float> memory_;
};

}  // namespace bunkbed::stress
