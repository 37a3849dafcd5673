#pragma once

#include "kernels/runtime/parallel.h"

namespace heddle::test {

// Restores the number of threads on destruction.
class ThreadsGuard {
 public:
  ~ThreadsGuard() { set_num_threads(before_); }

 private:
  int before_ = num_threads();
};

}  // namespace heddle::test
