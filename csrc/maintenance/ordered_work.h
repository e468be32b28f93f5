// Items of work for a few threads, whose results are taken in order, whatever the number of threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>

namespace bunkbed {

// Calls work(i) for each i < n on `threads` threads of its own. Calls take(i), in order, on the calling thread after
// work(i), and meanwhile() there a few times a second. If a call throws, no further item starts, `stop` is set for the
// items under way, and the exception is thrown here; of several, the one of the lowest item.
void work_in_order(size_t n, size_t threads, std::atomic<bool>* stop, const std::function<void(size_t)>& work,
                   const std::function<void(size_t)>& take, const std::function<void()>& meanwhile);

}  // namespace bunkbed
