#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace heddle {

// Anything a user can cause: wrong shapes, bad files, missing devices. The text names the operation, what was wrong,
// what was given and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A mistake in a configuration file or on the command line, found before any work started.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// Joins printable parts into one string.
template <typename... Parts>
std::string concat_text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace heddle

// Throws heddle::Error with the joined parts when `condition` is false.
#define HEDDLE_CHECK(condition, ...)                                \
  do {                                                              \
    if (!(condition)) [[unlikely]]                                  \
      throw ::heddle::Error(::heddle::concat_text(__VA_ARGS__));    \
  } while (false)
