#include "state/table_lock.h"

#include <unistd.h>

#include "base/error.h"
#include "base/mutex.h"

namespace bunkbed {

TableLock::TableLock(std::string name) : name_(std::move(name)), owner_pid_(::getpid()) {}

TableLock::~TableLock() {
  if (!is_own_process()) (void)on_.release();
}

bool TableLock::is_own_process() const { return ::getpid() == owner_pid_; }

void TableLock::require_own_process() const {
  if (is_own_process()) return;
  throw Error(ErrorKind::kClosed, "table '" + name_ +
                                      "' was opened before this process was forked; open it in the process that uses "
                                      "it (a DataLoader worker should pass ids on, not look them up)");
}

// ---- The three modes

void TableLock::enter() {
  calls_waiting_.fetch_add(1, std::memory_order_relaxed);
  enter_lock(LockLevel::kTable);
  mutex_.lock();
  calls_waiting_.fetch_sub(1, std::memory_order_relaxed);
}

// Every unlock, and every wait, wakes the first waiting slice when it may enter: its condition changes only then.
void TableLock::leave(bool is_call) {
  calls_left_ += is_call;
  if (may_slice_enter()) on_->turn.notify_all();  // before the unlock, after which the table may be destroyed
  mutex_.unlock();
  leave_lock(LockLevel::kTable);
}

bool TableLock::may_slice_enter() const {
  if (first_ == nullptr) return false;
  return calls_waiting_.load(std::memory_order_relaxed) == 0 || calls_left_ >= first_->calls_left;
}

TableLock::Guard TableLock::work() {
  require_own_process();
  enter();
  return Guard(this, true);
}

TableLock::Guard TableLock::exclusive(Commits commits) {
  Guard guard = work();
  if (commits == Commits::kMayRun) {
    settle(guard);
    return guard;
  }
  wait_for_turn(guard);
  settle(guard);  // no commit starts meanwhile: this call has the ticket
  end_turn();
  return guard;
}

TableLock::Guard TableLock::slice() {
  require_own_process();
  enter_lock(LockLevel::kTable);
  std::unique_lock held(mutex_);
  Turn turn{calls_left_ + calls_waiting_.load(std::memory_order_relaxed)};
  *last_ = &turn;
  last_ = &turn.next;
  on_->turn.wait(held, [&] { return first_ == &turn && may_slice_enter(); });
  first_ = turn.next;
  if (first_ == nullptr) last_ = &first_;
  held.release();
  return Guard(this, false);
}

// ---- Waiting with the lock

template <typename Wait>
void TableLock::wait_without_lock(Guard& guard, const Wait& wait) {
  calls_left_ += guard.is_call_;
  if (may_slice_enter()) on_->turn.notify_all();
  std::unique_lock held(mutex_, std::adopt_lock);
  wait(held);
  held.release();
}

template <typename Claim>
void TableLock::wait(Guard& guard, std::condition_variable& changed, const Claim& claim) {
  if (!claim()) wait_without_lock(guard, [&](auto& held) { changed.wait(held, claim); });
}

void TableLock::settle(Guard& guard) {
  ++settling_;
  wait(guard, on_->rest, [this] { return batches_staging_ == 0 && !is_compacting_; });
  if (--settling_ == 0) on_->rest.notify_all();
}

// Each notifies with the lock held: the table may be destroyed as soon as a waiter sees the new state.

void TableLock::end_batch() {
  --batches_staging_;
  ++batches_ended_;
  on_->rest.notify_all();
}

void TableLock::wait_for_batch(Guard& guard) {
  const uint64_t ended = batches_ended_;
  wait(guard, on_->rest, [&] { return batches_ended_ != ended; });
}

TableLock::WaitsForRows::~WaitsForRows() {
  if (--lock_->waiting_for_rows_ == 0) lock_->on_->rest.notify_all();
}

void TableLock::wait_until_not_waited_for(Guard& guard) {
  wait(guard, on_->rest, [this]() REQUIRES(this) { return !is_waited_for(); });
}

void TableLock::end_compaction() {
  is_compacting_ = false;
  on_->rest.notify_all();
}

void TableLock::end_compaction_slice() {
  if (waiting_for_compaction_ > 0) on_->rest.notify_all();
}

void TableLock::wait_for_compaction(Guard& guard, const std::function<bool()>& is_enough) {
  ++waiting_for_compaction_;
  wait(guard, on_->rest, [&]() REQUIRES(this) { return !is_compacting_ || is_enough(); });
  --waiting_for_compaction_;
}

void TableLock::end_commit() {
  is_committing_ = false;
  on_->commit.notify_all();
}

void TableLock::pause_commit(Guard& guard, std::chrono::milliseconds most) {
  const auto is_waited_for = [this] { return serving_ != next_ticket_; };
  if (is_waited_for()) return;
  wait_without_lock(guard, [&](auto& held) { on_->commit.wait_for(held, most, is_waited_for); });
}

void TableLock::wait_for_commit(Guard& guard) {
  wait_for_turn(guard);
  end_turn();
}

void TableLock::wait_for_turn(Guard& guard) {
  const uint64_t ticket = next_ticket_++;
  if (is_committing_) on_->commit.notify_all();  // it may pause
  wait(guard, on_->commit, [&] { return ticket == serving_ && !is_committing_; });
}

void TableLock::end_turn() {
  if (++serving_ != next_ticket_) on_->commit.notify_all();
}

}  // namespace bunkbed
