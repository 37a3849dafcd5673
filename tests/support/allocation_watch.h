#pragma once

#include <cstddef>

namespace heddle::test {

// The largest single request made to operator new since construction. Linking allocation_watch.cpp replaces operator
// new in the whole test program.
class AllocationWatch {
 public:
  AllocationWatch();
  std::size_t largest() const;
};

}  // namespace heddle::test
