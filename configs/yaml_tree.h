#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace heddle::config {

// Where a value starts, 1-based.
struct Place {
  int line = 1;
  int column = 1;
};

// One value of a YAML document, with the text as written.
struct YamlValue {
  enum class Kind {
    null,    // nothing, ~ or null
    plain,   // text without quotes: a number, a boolean or a string, as its reader decides
    quoted,  // always a string
    list,
    map,
    alias,   // *name
    tagged,  // !!type value; `text` holds the tag
  };

  Kind kind = Kind::null;
  std::string text;
  Place place;
  std::vector<YamlValue> keys;   // of a map, in file order, duplicates included
  std::vector<YamlValue> items;  // of a list, or the values of a map's keys
};

// A place in a document that is not YAML, or not the part of it that configs use.
struct YamlSyntaxError {
  Place place;
  std::string expected;
  std::string got;
};

// Parses one document; an empty one is null. Refuses what YAML would let through to the reader's surprise: tabs as
// indentation, control characters, a second document, a quote that is never closed. Throws YamlSyntaxError.
YamlValue parse_yaml(std::string_view text);

}  // namespace heddle::config
