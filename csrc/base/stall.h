// Tells profilers that a call waits for reads. A thread sets its `stall_watch` for the time of a call. Without one a
// stall costs a load of a thread-local pointer.
#pragma once

namespace bunkbed {

// Called at the stalls of one thread, in that thread, under the table's lock: it must not call the table or throw.
class StallWatch {
 public:
  virtual ~StallWatch() = default;
  virtual void began() noexcept = 0;
  virtual void ended() noexcept = 0;
};

inline thread_local StallWatch* stall_watch = nullptr;

// A stall: from construction to destruction.
class Stall {
 public:
  Stall() : watch_(stall_watch) {
    if (watch_ != nullptr) watch_->began();
  }
  ~Stall() {
    if (watch_ != nullptr) watch_->ended();
  }
  Stall(const Stall&) = delete;
  Stall& operator=(const Stall&) = delete;

 private:
  StallWatch* const watch_;
};

}  // namespace bunkbed
