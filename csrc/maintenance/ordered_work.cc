#include "maintenance/ordered_work.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace bunkbed {

namespace {

constexpr auto kBetweenCalls = std::chrono::milliseconds(100);

struct Item {
  bool is_over = false;
  std::exception_ptr error;
};

}  // namespace

void work_in_order(size_t n, size_t threads, std::atomic<bool>* stop, const std::function<void(size_t)>& work,
                   const std::function<void(size_t)>& take, const std::function<void()>& meanwhile) {
  std::vector<Item> items(n);
  Mutex mutex{LockLevel::kLocal};  // guards items
  std::condition_variable one_over;
  std::atomic<size_t> next{0};
  const auto body = [&] {
    for (size_t i; !*stop && (i = next.fetch_add(1)) < n;) {
      std::exception_ptr error;
      try {
        work(i);
      } catch (...) {
        error = std::current_exception();
      }
      const MutexLock guard(mutex);
      items[i] = {true, error};
      one_over.notify_all();
    }
  };
  std::vector<std::thread> workers;
  const struct Join {  // in every case: the workers use variables of this call
    std::vector<std::thread>& workers;
    std::atomic<bool>* stop;
    ~Join() {
      *stop = true;
      for (std::thread& worker : workers) worker.join();
    }
  } join{workers, stop};
  workers.reserve(threads);
  for (size_t t = 0; t < std::max<size_t>(1, std::min(threads, n)); ++t) {
    try {
      workers.emplace_back(body);
    } catch (const std::exception&) {  // no more threads can be started
      if (workers.empty()) throw;
      break;
    }
  }
  for (size_t i = 0; i < n; ++i) {
    std::exception_ptr error;
    for (bool is_over = false; !is_over;) {
      {
        MutexLock lock(mutex);
        if (!items[i].is_over) lock.wait_for(one_over, kBetweenCalls);
        is_over = items[i].is_over;
        error = items[i].error;
      }
      meanwhile();
    }
    if (error) std::rethrow_exception(error);
    take(i);
  }
}

}  // namespace bunkbed
