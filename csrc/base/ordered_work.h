// Items of work for a few threads, taken up in order: for what takes long and must not show how it was divided.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>

namespace bunkbed {

// Does work(i) for each i < n on `threads` threads of its own, and on the caller take(i), in order, once work(i) is done.
// meanwhile() is called there a few times a second. When one of them throws, no further item begins, `stop` is set for
// those under way, and what was thrown is thrown here, of several the one of the lowest item.
void work_in_order(size_t n, size_t threads, std::atomic<bool>* stop, const std::function<void(size_t)>& work,
                   const std::function<void(size_t)>& take, const std::function<void()>& meanwhile);

}  // namespace bunkbed
