#include "tests/support/allocation_watch.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace {
std::size_t g_largest = 0;
}  // namespace

void* operator new(std::size_t nbytes, const std::nothrow_t&) noexcept {
  g_largest = std::max(g_largest, nbytes);
  return std::malloc(std::max<std::size_t>(nbytes, 1));
}
void* operator new(std::size_t nbytes) {
  if (void* memory = operator new(nbytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace heddle::test {

AllocationWatch::AllocationWatch() { g_largest = 0; }
std::size_t AllocationWatch::largest() const { return g_largest; }

}  // namespace heddle::test
