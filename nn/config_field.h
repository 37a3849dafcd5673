#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/runtime/check.h"

namespace heddle::nn {

// Note: One table a config struct
// Each config struct has a `fields(config)` function listing its keys once: name, target, bound, default. The YAML reader,
// the YAML writer, `validate` and the test of configs/README.md all walk that list, so none of them can forget a key.

// Numbers a key accepts; infinities and NaN never.
struct Range {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_included = true;
  bool high_included = true;

  bool contains(double value) const;
  std::string text() const;  // "", ">= 1", "> 0" or "in [0, 1)"
};

constexpr Range at_least(double low) { return {.low = low}; }
constexpr Range above(double low) { return {.low = low, .low_included = false}; }
constexpr Range between(double low, double high) { return {.low = low, .high = high}; }
constexpr Range from_below(double low, double high) { return {.low = low, .high = high, .high_included = false}; }
constexpr Range strictly_between(double low, double high) {
  return {.low = low, .high = high, .low_included = false, .high_included = false};
}

// Of steps, rows and sizes. The product of two of them, and every sum, fits 64 bits.
inline constexpr double kMaxCount = 1e9;
constexpr Range count_from(double low) { return between(low, kMaxCount); }

// An enum behind its names.
struct Choice {
  std::vector<std::string_view> names;
  std::function<std::optional<std::string_view>()> get;  // nothing for an unset optional
  std::function<void(std::size_t)> set;                  // takes an index of `names`
  std::function<void()> clear;                           // empty unless the target is optional
};

// Values by name, in the order in which they are written.
template <typename Value>
using ByName = std::vector<std::pair<std::string, Value>>;

// Where a value lives. An optional may be left out or null: it then takes a default that depends on other keys.
using FieldTarget = std::variant<bool*, std::int64_t*, double*, std::string*, std::vector<std::string>*, Choice,
                                 std::optional<bool>*, std::optional<std::int64_t>*, std::optional<std::string>*,
                                 ByName<std::int64_t>*, ByName<double>*>;

struct FieldRule {
  Range range = {};
  bool required = false;
  std::string_view derived = {};  // the default in words, where it depends on other keys
  std::string_view form = {};     // what `accepts` accepts, in words; of a choice: a note on its names; of names: what they are
  bool (*accepts)(const std::string&) = nullptr;  // further test of a string
  bool takes_one = false;         // of a list: a string alone is a list of it
};

struct Field {
  std::string key;
  FieldTarget target;
  FieldRule rule;

  bool in_bounds() const;          // whether the current value obeys the rule; an unset optional does
  std::string expected() const;    // "integer >= 1", "one of gpt2, llama", "non-empty string or null"
  std::string value_text() const;  // the current value as YAML: 0.001, "runs/tiny", ["a", "b"], null
};

// A rule between two keys that does not hold, read as `key: expected <expected> <other> (<other_value>), got <got>`.
struct Conflict {
  std::string key;
  std::string expected;  // "a multiple of"
  std::string other;
  std::string other_value;
  std::string got;
};

// Throws heddle::ConfigError with one line for every field out of bounds and every conflict.
void require_valid(std::string_view section, const std::vector<Field>& fields, const std::vector<Conflict>& conflicts);

// A value that is legal in itself but not here: with these data, on this machine, beside what is on the disk.
class BadValue : public ConfigError {
 public:
  BadValue(std::string key, std::string expected, std::string got)
      : ConfigError(key + ": expected " + expected + ", got " + got),
        key_(std::move(key)), expected_(std::move(expected)), got_(std::move(got)) {}

  const std::string& key() const { return key_; }  // "data.files"
  const std::string& expected() const { return expected_; }
  const std::string& got() const { return got_; }

 private:
  std::string key_, expected_, got_;
};

// Shortest text that reads back as the same number, whatever the locale.
std::string number_text(double value);

// Insertions, deletions and replacements of one character that turn one text into the other (Levenshtein).
std::size_t edit_distance(std::string_view a, std::string_view b);

// A double-quoted YAML and JSON-like string; control characters are escaped.
std::string quoted_text(std::string_view text);

template <typename Enum>
using EnumNames = std::span<const std::pair<std::string_view, Enum>>;

// The first name of an enum value.
template <typename Enum>
std::string_view name_of(EnumNames<Enum> names, Enum value) {
  for (const auto& [name, named] : names)
    if (named == value) return name;
  return {};
}

// A field holding an enum, or an optional enum. `names` must outlive the field.
template <typename Target, typename Enum>
Choice choice(Target& target, EnumNames<Enum> names) {
  Choice out;
  for (const auto& entry : names) out.names.push_back(entry.first);
  out.get = [&target, names]() -> std::optional<std::string_view> {
    const std::optional<Enum> value = target;
    return value ? std::optional(name_of(names, *value)) : std::nullopt;
  };
  out.set = [&target, names](std::size_t index) { target = names[index].second; };
  if constexpr (std::is_same_v<Target, std::optional<Enum>>) out.clear = [&target] { target.reset(); };
  return out;
}

}  // namespace heddle::nn
