#pragma once

#include <CLI/CLI.hpp>

#include "nn/config_field.h"

// Checks of numbers on the command line, by the rules of the numbers in a config file: the whole text must be the number,
// and a number that does not fit is refused rather than cut.

namespace heddle::examples {

CLI::Validator integer_in(std::int64_t low, std::int64_t high = std::numeric_limits<std::int64_t>::max());
CLI::Validator number_in(const nn::Range& range);

}  // namespace heddle::examples
