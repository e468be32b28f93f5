// A device cache above a table, with memory of this process for the device's: the frames that DeviceMap plans.
//
// As the layers use it: plans are made and carried out one at a time under `mutex_`; `frames_mutex_` is held while frames
// are read, changed or written back. Where both are held, `mutex_` was taken first.
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
  // Every row is written back first.
  void detach();
  // One call, whichever; false once the table is closed.
  bool call(Worker* worker, bool is_quiet);
  // While no other thread is at work: every row that is in a frame.
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
