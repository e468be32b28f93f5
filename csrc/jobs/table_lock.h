// The lock of a table, and what goes on beside the calls that take it. It is taken in one of three ways:
//
//   work()     by a call. Staging, compaction and a commit go on beside it: each takes the lock for a slice at a time.
//   alone()    by a call that needs the table at rest: once no batch is being staged, no compaction goes on and, unless it
//              says that one may, no commit. While one waits for that, compaction ends early and no batch begins. Calls
//              that wait for a commit go in the order they came in, and so does the call that begins the next one.
//   slice()    by background work: after all calls that wait for the lock when it comes, and after the slices that came
//              before it. So calls wait for one slice at most, and background work comes to its end beside any number of
//              them. A mutex alone would not do: whoever gives it up and takes it at once gets it before a thread that has
//              to be woken.
//
// Calls among themselves take the lock in the order that the system wakes them in. Nothing sleeps to let others go first:
// whoever leaves wakes who is next.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace bunkbed {

class TableLock {
 public:
  // Has the lock until it goes, or gives it up; one made of nothing has none.
  class Guard {
   public:
    Guard() = default;
    Guard(Guard&& other) noexcept : lock_(std::exchange(other.lock_, nullptr)), is_call_(other.is_call_) {}
    Guard& operator=(Guard&& other) noexcept {
      unlock();
      lock_ = std::exchange(other.lock_, nullptr);
      is_call_ = other.is_call_;
      return *this;
    }
    ~Guard() { unlock(); }
    void unlock() {
      if (lock_ != nullptr) std::exchange(lock_, nullptr)->leave(is_call_);
    }
    explicit operator bool() const { return lock_ != nullptr; }

   private:
    friend class TableLock;
    Guard(TableLock* lock, bool is_call) : lock_(lock), is_call_(is_call) {}
    TableLock* lock_ = nullptr;
    bool is_call_ = false;
  };
  enum class Beside { kNothing, kCommit };

  // `name`: of the table, as errors give it.
  explicit TableLock(std::string name);
  ~TableLock();
  TableLock(const TableLock&) = delete;
  TableLock& operator=(const TableLock&) = delete;

  // All three throw kClosed in a process that was forked from the one that made the lock: another thread of that one may
  // have had it.
  Guard work();
  Guard alone(Beside beside = Beside::kNothing);
  Guard slice();
  bool is_own_process() const;
  void require_own_process() const;
  // Calls that wait for the lock now; without it.
  size_t calls_waiting() const { return calls_waiting_.load(std::memory_order_relaxed); }

  // ---- All below: with the lock. What takes a guard gives the lock up while it waits.

  // A call that has the lock for work needs the table at rest, but for a commit.
  void settle(Guard& guard);

  // Staging: batches of rows that are being read.
  bool is_staging() const { return batches_staging_ > 0; }
  void begin_batch() { ++batches_staging_; }
  void end_batch();
  // Until another batch ends. `WaitsForRows` says that a call does so, once or again and again.
  void wait_for_batch(Guard& guard);
  class WaitsForRows {
   public:
    explicit WaitsForRows(TableLock* lock) : lock_(lock) { ++lock_->waiting_for_rows_; }
    ~WaitsForRows();
    WaitsForRows(const WaitsForRows&) = delete;
    WaitsForRows& operator=(const WaitsForRows&) = delete;

   private:
    TableLock* lock_;
  };
  // Whether a call waits for staging: no other batch begins before that has gone on.
  bool is_waited_for() const { return settling_ + waiting_for_rows_ > 0; }
  void wait_for_the_waiting(Guard& guard);

  // Compaction beside calls.
  bool is_compacting() const { return is_compacting_; }
  // Whether a call waits for the table to be at rest: compaction ends, unless the log would outgrow it.
  bool should_rest() const { return settling_ > 0; }
  void begin_compaction() { is_compacting_ = true; }
  void end_compaction();
  void wait_for_compaction(Guard& guard);

  // A commit beside calls, or a collection of what commits left.
  bool is_committing() const { return is_committing_; }
  void begin_commit() { is_committing_ = true; }
  void end_commit();
  // In turn. Who is to begin a commit, and is not alone, waits here and gives the lock up only afterwards.
  void wait_for_commit(Guard& guard);

 private:
  // A slice that waits, on its thread's stack: it goes once so many calls have left the lock, or none waits for it.
  struct Turn {
    uint64_t calls_left;
    Turn* next = nullptr;
  };

  void enter();
  void leave(bool is_call);
  bool may_slice_enter() const;
  void wait_for_turn(Guard& guard);
  void end_turn();
  template <typename Claim>
  void wait(Guard& guard, std::condition_variable& changed, const Claim& claim);

  const std::string name_;
  const int owner_pid_;
  std::mutex mutex_;  // guards all below but calls_waiting_, and what the table says that its lock guards
  std::atomic<size_t> calls_waiting_{0};  // for the mutex
  uint64_t calls_left_ = 0;
  Turn* first_ = nullptr;          // of the slices that wait, in their order
  Turn** last_ = &first_;          // where the next one is entered
  struct Conditions {
    std::condition_variable turn;    // a slice may enter
    std::condition_variable rest;    // staging, compaction or who waits for them changed
    std::condition_variable commit;  // the commit is over
  };
  // Left behind in a forked child, where destroying one would wait for threads that are the parent's.
  std::unique_ptr<Conditions> on_ = std::make_unique<Conditions>();
  size_t batches_staging_ = 0;
  uint64_t batches_ended_ = 0;
  bool is_compacting_ = false;
  bool is_committing_ = false;
  uint64_t next_ticket_ = 0;  // of a call that waits for the commit
  uint64_t serving_ = 0;
  size_t settling_ = 0;
  size_t waiting_for_rows_ = 0;
};

}  // namespace bunkbed
