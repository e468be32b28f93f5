// A process that may open few files.
#pragma once

#include <sys/resource.h>

#include "tests/check.h"

namespace bunkbed::test {

// During its lifetime at most `most` files of vfs::CachedFile are open: a quarter of the soft limit.
class FewDescriptors {
 public:
  explicit FewDescriptors(size_t most) {
    CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit few = before_;
    few.rlim_cur = 4 * most;
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

 private:
  rlimit before_{};
};

}  // namespace bunkbed::test
