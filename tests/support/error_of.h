#pragma once

#include <string>

#include "kernels/runtime/check.h"

namespace heddle::test {

// The text of the heddle::Error that fn throws; "no error" if it throws none.
template <typename Fn>
std::string error_of(const Fn& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace heddle::test
