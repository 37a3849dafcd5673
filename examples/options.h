#pragma once

#include <CLI/CLI.hpp>

#include "nn/config_field.h"

// Checks of values on the command line.

namespace heddle::examples {

// By the rules of the numbers in a config file: the whole text must be the number, and a number that does not fit is refused rather than cut.
CLI::Validator integer_in(std::int64_t low, std::int64_t high = std::numeric_limits<std::int64_t>::max());
CLI::Validator number_in(const nn::Range& range);

// A path: "" would stand for the folder that the program runs in.
CLI::Validator non_empty();
// A path that a file can be written to, so that what cannot be is known before the work.
CLI::Validator writable_file();
// A path at which nothing is, not even a dangling link.
CLI::Validator new_folder();

// The option --device; `device` holds its default.
void add_device_option(CLI::App& command, std::string& device);

}  // namespace heddle::examples
