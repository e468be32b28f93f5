// The lock of a table, and the background work that shares the table with calls. The lock has three modes:
//
//   work() A call takes it at once. Staging, compaction and a commit may be running. exclusive() A call takes it after
//   staging and compaction have ended, and the commit too unless the call allows one. While it waits, compaction stops
//   early and no batch starts staging. Calls that wait for a commit run in the order of their tickets, and the call
//   that starts the next commit takes a ticket too.
//   slice() Background work takes it after all calls and slices that were waiting before it. So a call waits for one
//   slice at most, and calls cannot starve background work. A plain mutex is not enough: a thread that unlocks and
//   relocks a mutex gets it before a thread that must be woken.
//
// The mutex decides the order of calls. No thread sleeps for a fixed time: an unlock wakes the next slice, and a call
// that waits for a commit ends its pause.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/mutex.h"

namespace bunkbed {

class CAPABILITY("table lock") TableLock {
 public:
  // Holds the lock until it is destroyed or unlock() is called. A default guard holds nothing.
  class SCOPED_CAPABILITY Guard {
   public:
    Guard() = default;
    Guard(Guard&& other) noexcept : lock_(std::exchange(other.lock_, nullptr)), is_call_(other.is_call_) {}
    Guard& operator=(Guard&& other) noexcept NO_THREAD_SAFETY_ANALYSIS {
      unlock();
      lock_ = std::exchange(other.lock_, nullptr);
      is_call_ = other.is_call_;
      return *this;
    }
    ~Guard() RELEASE() { unlock(); }
    void unlock() RELEASE() {
      if (lock_ != nullptr) std::exchange(lock_, nullptr)->leave(is_call_);
    }
    explicit operator bool() const { return lock_ != nullptr; }

   private:
    friend class TableLock;
    Guard(TableLock* lock, bool is_call) : lock_(lock), is_call_(is_call) {}
    TableLock* lock_ = nullptr;
    bool is_call_ = false;
  };
  enum class Commits { kEnded, kMayRun };

  // `name`: the table's name, for errors.
  explicit TableLock(std::string name);
  ~TableLock();
  TableLock(const TableLock&) = delete;
  TableLock& operator=(const TableLock&) = delete;

  // All three throw kClosed in a forked child: another thread of the parent may have held the lock at the fork.
  Guard work() RETURNS_LOCKED();
  Guard exclusive(Commits commits = Commits::kEnded) RETURNS_LOCKED();
  Guard slice() RETURNS_LOCKED();
  bool is_own_process() const;
  void require_own_process() const;
  // The number of calls that wait for the lock. Needs no lock.
  size_t calls_waiting() const { return calls_waiting_.load(std::memory_order_relaxed); }

  // ---- All below require the lock. A method that takes a guard releases the lock while it waits.

  // Waits until staging and compaction have ended, as exclusive(Commits::kMayRun) does.
  void settle(Guard& guard) REQUIRES(this);

  // Staging: batches of rows that are being read.
  bool is_staging() const REQUIRES(this) { return batches_staging_ > 0; }
  void begin_batch() REQUIRES(this) { ++batches_staging_; }
  void end_batch() REQUIRES(this);
  // Waits until one more batch has ended. A call that waits for rows holds a `WaitsForRows` meanwhile.
  void wait_for_batch(Guard& guard) REQUIRES(this);
  class WaitsForRows {
   public:
    explicit WaitsForRows(TableLock* lock) REQUIRES(lock) : lock_(lock) { ++lock_->waiting_for_rows_; }
    ~WaitsForRows();
    WaitsForRows(const WaitsForRows&) = delete;
    WaitsForRows& operator=(const WaitsForRows&) = delete;

   private:
    TableLock* lock_;
  };
  // Whether a call waits for staging. No batch starts before that call has continued.
  bool is_waited_for() const REQUIRES(this) { return settling_ + waiting_for_rows_ > 0; }
  void wait_until_not_waited_for(Guard& guard) REQUIRES(this);

  // Background compaction.
  bool is_compacting() const REQUIRES(this) { return is_compacting_; }
  // Whether a call waits in settle(). Compaction then stops, unless the log grows faster than compaction shrinks it.
  bool is_settling() const REQUIRES(this) { return settling_ > 0; }
  void begin_compaction() REQUIRES(this) { is_compacting_ = true; }
  void end_compaction() REQUIRES(this);
  void end_compaction_slice() REQUIRES(this);
  // Waits until compaction has ended or, at the end of a slice, `is_enough`.
  void wait_for_compaction(Guard& guard, const std::function<bool()>& is_enough) REQUIRES(this);

  // A commit, or a collection of the files that commits no longer need.
  bool is_committing() const REQUIRES(this) { return is_committing_; }
  void begin_commit() REQUIRES(this) { is_committing_ = true; }
  void end_commit() REQUIRES(this);
  // Waits for `most`, or until a call waits for the commit under way to end.
  void pause_commit(Guard& guard, std::chrono::milliseconds most) REQUIRES(this);
  // By ticket. A call that starts a commit without exclusive() calls this first and keeps the lock until
  // begin_commit().
  void wait_for_commit(Guard& guard) REQUIRES(this);

 private:
  // A waiting slice, on the stack of its thread. It enters after `calls_left` calls have unlocked, or when no call
  // waits.
  struct Turn {
    uint64_t calls_left;
    Turn* next = nullptr;
  };

  void enter();
  void leave(bool is_call);
  bool may_slice_enter() const;
  void wait_for_turn(Guard& guard);
  void end_turn();
  template <typename Wait>
  void wait_without_lock(Guard& guard, const Wait& wait) NO_THREAD_SAFETY_ANALYSIS;
  template <typename Claim>
  void wait(Guard& guard, std::condition_variable& changed, const Claim& claim) NO_THREAD_SAFETY_ANALYSIS;

  const std::string name_;
  const int owner_pid_;
  std::mutex mutex_;                      // guards all below except calls_waiting_, and the fields of the table
  std::atomic<size_t> calls_waiting_{0};  // for the mutex
  uint64_t calls_left_ = 0;
  Turn* first_ = nullptr;  // queue of the waiting slices
  Turn** last_ = &first_;  // end of the queue
  struct Conditions {
    std::condition_variable turn;    // a slice may enter
    std::condition_variable rest;    // staging or compaction ended, or a call that waited for them continued
    std::condition_variable commit;  // the commit is over, or a call waits for that
  };
  // Leaked in a forked child: destroying a condition variable would wait for threads of the parent.
  std::unique_ptr<Conditions> on_ = std::make_unique<Conditions>();
  size_t batches_staging_ = 0;
  uint64_t batches_ended_ = 0;
  bool is_compacting_ = false;
  size_t waiting_for_compaction_ = 0;
  bool is_committing_ = false;
  uint64_t next_ticket_ = 0;  // of the next call that waits for the commit
  uint64_t serving_ = 0;      // the ticket that may continue
  size_t settling_ = 0;
  size_t waiting_for_rows_ = 0;
};

}  // namespace bunkbed
