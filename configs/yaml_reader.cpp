#include "configs/yaml_reader.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <tuple>

#include "kernels/runtime/check.h"
#include "nn/posix_file.h"

namespace heddle::config {
namespace {

// The number that fills the whole text.
template <typename T, typename... Format>
std::optional<T> parse_all(std::string_view text, Format... format) {
  T value{};
  const char* last = text.data() + text.size();
  const auto [end, status] = std::from_chars(text.data(), last, value, format...);
  return status == std::errc{} && end == last ? std::optional(value) : std::nullopt;
}

// from_chars knows no plus sign.
std::string_view without_plus(std::string_view text) {
  return text.starts_with('+') && !text.starts_with("+-") ? text.substr(1) : text;
}

}  // namespace

std::optional<double> parse_number(std::string_view text) {
  const auto value = parse_all<double>(without_plus(text));
  return value && std::isfinite(*value) ? value : std::nullopt;
}

std::optional<std::int64_t> parse_integer(std::string_view text) {
  if (text.starts_with("0x") && !text.starts_with("0x-")) return parse_all<std::int64_t>(text.substr(2), 16);
  if (text.starts_with("0o") && !text.starts_with("0o-")) return parse_all<std::int64_t>(text.substr(2), 8);
  return parse_all<std::int64_t>(without_plus(text));
}

namespace {

using Kind = YamlValue::Kind;

constexpr std::string_view kMap = "a map of keys";

bool is_text(const YamlValue& value) { return value.kind == Kind::plain || value.kind == Kind::quoted; }

std::string quoted(const std::string& text) { return nn::quoted_text(nn::shortened(text)); }

// The value as an error message names it.
std::string describe(const YamlValue& value) {
  const bool is_boolean = value.text == "true" || value.text == "false";
  const bool reads_as_other = is_boolean || parse_number(value.text) || parse_integer(value.text);
  switch (value.kind) {
    case Kind::null: return "null";
    case Kind::plain: return reads_as_other ? nn::shortened(value.text) : quoted(value.text);
    case Kind::quoted: return (reads_as_other ? "the quoted string " : "") + quoted(value.text);
    case Kind::list: {
      const auto no_text = [](const YamlValue& item) { return !is_text(item) || item.text.empty(); };
      const auto odd = std::ranges::find_if(value.items, no_text);
      if (odd != value.items.end()) return "a list holding " + describe(*odd);
      return value.items.empty() ? "an empty list" : "a list";
    }
    case Kind::map: {
      std::set<std::string> seen;
      for (const YamlValue& key : value.keys)
        if (!seen.insert(key.text).second) return "a map holding " + quoted(key.text) + " twice";
      return value.items.empty() ? "an empty map" : "a map";
    }
    case Kind::alias: return "an alias; aliases are not supported, write the value out";
    case Kind::tagged: return "the type tag " + quoted(value.text) + "; type tags are not supported";
  }
  return {};
}

// One overload a target: store the value if it has the target's type, else return false.
bool store(const YamlValue& value, bool* out) {
  if (value.kind != Kind::plain || (value.text != "true" && value.text != "false")) return false;
  *out = value.text == "true";
  return true;
}

bool store(const YamlValue& value, std::int64_t* out) {
  const auto number = value.kind == Kind::plain ? parse_integer(value.text) : std::nullopt;
  if (number) *out = *number;
  return number.has_value();
}

bool store(const YamlValue& value, double* out) {
  const auto number = value.kind == Kind::plain ? parse_number(value.text) : std::nullopt;
  if (number) *out = *number;
  return number.has_value();
}

bool store(const YamlValue& value, std::string* out) {
  if (is_text(value)) *out = value.text;
  return is_text(value);
}

bool store(const YamlValue& value, std::vector<std::string>* out) {
  if (value.kind != Kind::list || !std::ranges::all_of(value.items, is_text)) return false;
  out->clear();
  for (const YamlValue& item : value.items) out->push_back(item.text);
  return true;
}

template <typename T>
bool store(const YamlValue& value, nn::ByName<T>* out) {
  if (value.kind != Kind::map) return false;
  out->clear();
  for (std::size_t i = 0; i < value.keys.size(); ++i) {
    const std::string& name = value.keys[i].text;
    T number{};
    const bool is_new = std::ranges::none_of(*out, [&](const auto& entry) { return entry.first == name; });
    if (!is_text(value.keys[i]) || !is_new || !store(value.items[i], &number)) return false;
    out->emplace_back(name, number);
  }
  return true;
}

bool store(const YamlValue& value, const nn::Choice& choice) {
  if (choice.clear && value.kind == Kind::null) {
    choice.clear();
    return true;
  }
  const auto name = std::ranges::find(choice.names, value.text);
  if (!is_text(value) || name == choice.names.end()) return false;
  choice.set(static_cast<std::size_t>(name - choice.names.begin()));
  return true;
}

template <typename T>
bool store(const YamlValue& value, std::optional<T>* out) {
  if (value.kind == Kind::null) {
    out->reset();
    return true;
  }
  return store(value, &out->emplace());
}

// The first entry of a map that its field does not take, ` holding "q_proj": 0`, or the name alone where that is what is wrong.
template <typename T>
std::string bad_entry(const YamlValue& map, nn::ByName<T>* const&, const nn::FieldRule& rule) {
  for (std::size_t i = 0; i < map.keys.size(); ++i) {
    const YamlValue &key = map.keys[i], &item = map.items[i];
    nn::ByName<T> one;
    if (store({Kind::map, {}, map.place, {key}, {item}}, &one) && nn::Field{{}, &one, rule}.in_bounds()) continue;
    const bool is_name = is_text(key) && !key.text.empty() && (rule.accepts == nullptr || rule.accepts(key.text));
    return " holding " + describe(key) + (is_name ? ": " + describe(item) : "");
  }
  return {};
}

// Of everything else.
template <typename Target>
std::string bad_entry(const YamlValue&, const Target&, const nn::FieldRule&) {
  return {};
}

// Replaces places in the text of an override by the place of the override itself.
void set_place(YamlValue& value, Place place) {
  value.place = place;
  for (YamlValue& key : value.keys) set_place(key, place);
  for (YamlValue& item : value.items) set_place(item, place);
}

std::string full_name(std::string_view section, std::string_view key) {
  return section.empty() ? std::string(key) : concat_text(section, '.', key);
}

// Index of a key of a map, or the number of keys.
std::size_t find_key(const YamlValue& map, std::string_view key) {
  const auto same = [key](const YamlValue& other) { return is_text(other) && other.text == key; };
  return static_cast<std::size_t>(std::ranges::find_if(map.keys, same) - map.keys.begin());
}

// The value of a key of a map, added at the given place if it is missing.
YamlValue& find_or_add(YamlValue& map, std::string_view key, Place place) {
  const std::size_t index = find_key(map, key);
  if (index == map.keys.size()) {
    map.keys.push_back({Kind::plain, std::string(key), place, {}, {}});
    map.items.push_back({Kind::null, {}, place, {}, {}});
  }
  return map.items[index];
}

}  // namespace

YamlReader::YamlReader(std::string path, const std::vector<std::string>& overrides) : path_(std::move(path)) {
  std::string text;
  try {
    text = nn::read_file(path_);
  } catch (const Error& error) {
    throw ConfigError(error.what());
  }
  try {
    root_ = parse_yaml(text);
  } catch (const YamlSyntaxError& error) {
    report(error.place, "", concat_text("expected ", error.expected, ", got ", error.got));
    throw_mistakes();
  }
  if (root_.kind != Kind::map) {
    const std::string got = root_.kind == Kind::null ? "an empty file" : describe(root_);
    report(root_.place, "", concat_text("expected ", kMap, ", got ", got));
    throw_mistakes();
  }
  for (std::size_t i = 0; i < overrides.size(); ++i) apply_override(overrides[i], {0, static_cast<int>(i) + 1});
}

void YamlReader::apply_override(const std::string& text, Place place) {
  const std::size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  if (equals == std::string::npos || equals == 0) {
    report(place, text, "expected KEY=VALUE, got " + quoted(text));
    return;
  }
  YamlValue value;
  try {
    value = parse_yaml(std::string_view(text).substr(equals + 1));
  } catch (const YamlSyntaxError& error) {
    report(place, name, concat_text("expected ", error.expected, ", got ", error.got));
    return;
  }
  set_place(value, place);
  const std::size_t dot = name.find('.');
  if (dot == std::string::npos) {
    find_or_add(root_, name, place) = std::move(value);
    return;
  }
  YamlValue& section = find_or_add(root_, name.substr(0, dot), place);
  if (section.kind == Kind::null) section.kind = Kind::map;
  if (section.kind == Kind::map) find_or_add(section, name.substr(dot + 1), place) = std::move(value);
}

const YamlValue* YamlReader::find_section(std::string_view section) const {
  if (section.empty()) return &root_;
  const std::size_t index = find_key(root_, section);
  return index == root_.keys.size() ? nullptr : &root_.items[index];
}

void YamlReader::read(const std::string& section, const std::vector<nn::Field>& fields) {
  if (!section.empty()) {
    sections_.push_back(section);
    known_.emplace_back("", section);
  }
  for (const nn::Field& field : fields) known_.emplace_back(section, field.key);

  static const YamlValue kAbsent;
  const YamlValue* found = find_section(section);
  const YamlValue& map = found == nullptr ? kAbsent : *found;
  if (map.kind != Kind::map && map.kind != Kind::null) {
    report(map.place, section, concat_text("expected ", kMap, ", got ", describe(map)));
    return;
  }
  for (const nn::Field& field : fields) {
    const std::string name = full_name(section, field.key);
    const std::size_t index = find_key(map, field.key);
    if (index < map.keys.size()) {
      read_value(name, map.items[index], field);
    } else if (field.rule.required) {
      report(start_of(section), name, concat_text("expected ", field.expected(), ", got nothing; the key is required"));
    }
  }
}

void YamlReader::read_value(const std::string& name, const YamlValue& value, const nn::Field& field) {
  places_[name] = value.place;
  const bool is_one = field.rule.takes_one && is_text(value);
  const YamlValue list = {Kind::list, {}, value.place, {}, {value}};
  const bool stored = std::visit([&](const auto& target) { return store(is_one ? list : value, target); }, field.target);
  if (!stored || !field.in_bounds()) {
    const std::string entry = std::visit([&](const auto& target) { return bad_entry(value, target, field.rule); }, field.target);
    report(value.place, name, concat_text("expected ", field.expected(), ", got ", describe(value), entry));
  }
}

void YamlReader::check(std::string_view section, const std::vector<nn::Conflict>& conflicts) {
  for (const nn::Conflict& conflict : conflicts) {
    const std::string key = full_name(section, conflict.key);
    const std::string other = full_name(section, conflict.other);
    if (is_wrong(key) || is_wrong(other)) continue;
    const auto key_place = places_.find(key);
    const auto other_place = places_.find(other);
    const bool key_given = key_place != places_.end();
    const bool other_given = other_place != places_.end();

    std::string where = "the default";
    if (other_given) where = other_place->second.line > 0 ? "line " + std::to_string(other_place->second.line) : "--set";
    const Place place = key_given ? key_place->second : other_given ? other_place->second : Place{};
    const std::string expected = concat_text(conflict.expected, ' ', other, " (", conflict.other_value, ", ", where, ")");
    report(place, key, concat_text("expected ", expected, ", got ", conflict.got, key_given ? "" : " (the default)"));
  }
}

void YamlReader::refuse(const nn::BadValue& value) {
  const auto given = places_.find(value.key());
  const bool is_given = given != places_.end();
  report(is_given ? given->second : start_of(value.key().substr(0, value.key().find('.'))), value.key(),
         concat_text("expected ", value.expected(), ", got ", value.got(), is_given ? "" : " (the default)"));
}

bool YamlReader::has_section(std::string_view section) const {
  const YamlValue* found = find_section(section);
  return found != nullptr && found->kind != Kind::null;
}

bool YamlReader::has_only(std::string_view section, std::string_view key) const {
  const YamlValue* found = find_section(section);
  return found != nullptr && found->keys.size() == 1 && find_key(*found, key) == 0;
}

bool YamlReader::has_mistake(std::string_view section) const {
  return std::ranges::any_of(wrong_, [section](const std::string& name) {
    const std::size_t dot = name.find('.');
    return section == name.substr(0, dot) || (section.empty() && dot == std::string::npos);
  });
}

bool YamlReader::is_wrong(const std::string& name) const {
  return wrong_.contains(name) || wrong_.contains(name.substr(0, name.find('.')));
}

Place YamlReader::start_of(std::string_view section) const {
  const std::size_t index = find_key(root_, section);
  if (index == root_.keys.size() || root_.keys[index].place.line == 0) return {};
  return root_.keys[index].place;
}

void YamlReader::check_keys(const std::string& section, const YamlValue& map) {
  std::map<std::string, const YamlValue*> seen;
  for (const YamlValue& key : map.keys) {
    const Place place = key.place;
    if (!is_text(key)) {
      report(place, section, "expected a key, got " + describe(key));
      continue;
    }
    const std::string name = full_name(section, key.text);
    const auto [first, is_new] = seen.emplace(key.text, &key);
    if (key.kind == Kind::plain && key.text == "<<") {
      report(place, name, "expected a key, got the merge key <<; merge keys are not supported, write its keys out");
    } else if (!is_new) {
      const std::string line = std::to_string(first->second->place.line);
      report(place, name, "expected the key once, got it again; the first is on line " + line);
    } else if (std::ranges::find(known_, std::pair(section, key.text)) == known_.end()) {
      const std::string got = quoted(key.text) + suggestion(section, key.text);
      report(place, name, "expected a known key, got " + got);
    }
  }
}

std::string YamlReader::suggestion(const std::string& section, const std::string& key) const {
  const std::pair<std::string, std::string>* nearest = nullptr;
  std::tuple<std::size_t, bool> best{std::max<std::size_t>(2, key.size() / 3) + 1, false};
  for (const auto& known : known_) {
    if (known.second == key) return "; it belongs " + (known.first.empty() ? "at the top level" : "under " + known.first);
    const std::tuple distance{nn::edit_distance(key, known.second), known.first != section};
    if (distance < best && std::get<0>(distance) < known.second.size()) {  // something of it is left
      best = distance;
      nearest = &known;
    }
  }
  if (nearest == nullptr) return "; configs/README.md lists the keys";
  if (nearest->first == section) return "; did you mean " + nearest->second + "?";
  if (nearest->first.empty()) return "; did you mean " + nearest->second + " at the top level?";
  return "; did you mean " + full_name(nearest->first, nearest->second) + "?";
}

void YamlReader::report(Place place, const std::string& name, const std::string& text) {
  std::string line;
  if (place.line > 0) {
    line = path_ + ":" + std::to_string(place.line) + ":" + std::to_string(place.column);
    if (!name.empty()) line += ": " + nn::shortened(name);
  } else {
    line = "--set " + nn::shortened(name);
  }
  wrong_.insert(name);
  mistakes_.push_back({place, nn::printable(line + ": " + text)});
}

void YamlReader::finish() {
  for (const std::string& section : sections_) {
    const YamlValue* map = find_section(section);
    if (map != nullptr && map->kind == Kind::map) check_keys(section, *map);
  }
  if (!mistakes_.empty()) throw_mistakes();
}

void YamlReader::throw_mistakes() {
  const auto order = [](const Mistake& m) { return std::tuple(m.place.line == 0, m.place.line, m.place.column); };
  std::ranges::stable_sort(mistakes_, {}, order);
  std::string text;
  for (const Mistake& mistake : mistakes_) text.append(text.empty() ? "" : "\n").append(mistake.text);
  throw ConfigError(text);
}

}  // namespace heddle::config
