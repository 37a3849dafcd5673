#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "configs/yaml_tree.h"
#include "nn/config_field.h"

namespace heddle::config {

// Fills config structs from a YAML file and `section.key=value` overrides, strictly, and collects every mistake:
//   YamlReader reader(path, {"train.max_steps=200"});
//   reader.read("train", fields(train));
//   reader.check("train", conflicts(train));
//   reader.finish();
// A mistake in the file reads `file:line:col: train.seed: expected ..., got ...`, one in an override
// `--set train.seed: expected ..., got ...`.
class YamlReader {
 public:
  // Throws heddle::ConfigError if the file cannot be read, is not YAML or does not hold a map.
  YamlReader(std::string path, const std::vector<std::string>& overrides);

  // Reads the fields of a section; "" is the top level. A key that is absent leaves its target as it is.
  void read(const std::string& section, const std::vector<nn::Field>& fields);

  // Records conflicts between keys of a section, or between full names such as data.source when section is "". A
  // conflict that involves a key already found wrong is left out: its value means nothing.
  void check(std::string_view section, const std::vector<nn::Conflict>& conflicts);

  // Records a value that a further check refused.
  void refuse(const nn::BadValue& value);

  // Whether the section is there and not null.
  bool has_section(std::string_view section) const;

  // Whether the section has this key and no other.
  bool has_only(std::string_view section, std::string_view key) const;

  // Whether the key, given by its full name, or its whole section is known to be wrong.
  bool is_wrong(const std::string& name) const;

  // Whether a key of the section is known to be wrong; "" is the top level.
  bool has_mistake(std::string_view section) const;

  // Reports every key that no read() asked for, then throws heddle::ConfigError with all mistakes in file order, if any.
  void finish();

 private:
  // The place of an override is line 0, its number as the column.
  struct Mistake {
    Place place;
    std::string text;
  };

  void apply_override(const std::string& text, Place place);
  void read_value(const std::string& name, const YamlValue& value, const nn::Field& field);
  void check_keys(const std::string& section, const YamlValue& map);
  std::string suggestion(const std::string& section, const std::string& key) const;
  const YamlValue* find_section(std::string_view section) const;
  Place start_of(std::string_view section) const;  // where a missing key would go
  void report(Place place, const std::string& name, const std::string& text);
  [[noreturn]] void throw_mistakes();

  std::string path_;
  YamlValue root_;
  std::vector<std::string> sections_{""};
  std::vector<std::pair<std::string, std::string>> known_;  // section and key of everything asked for
  std::map<std::string, Place> places_;                     // of every value read, by full name
  std::set<std::string> wrong_;                             // full names with a mistake
  std::vector<Mistake> mistakes_;
};

// A number by the YAML 1.2 core schema, whatever the locale: 1e-4, .5, +1. for double, and 0x10, 0o17 for integers.
// Nothing for anything else, values out of range, infinities and NaN.
std::optional<double> parse_number(std::string_view text);
std::optional<std::int64_t> parse_integer(std::string_view text);

}  // namespace heddle::config
