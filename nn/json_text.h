#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/runtime/check.h"
#include "nn/posix_file.h"

namespace heddle::nn {

// More than any file of ours or of Hugging Face has; the library recurses when it copies, compares or prints a value.
inline constexpr int kMaxJsonDepth = 64;

// The value of a text; discarded (is_discarded()) if that is not JSON, has lists and objects in more than kMaxJsonDepth levels, or an
// object with a key twice, of which readers take different ones; that key is then `repeated`. Json is nlohmann::json or nlohmann::ordered_json.
template <typename Json>
Json parse_json(std::string_view text, std::string* repeated = nullptr) {
  using Event = typename Json::parse_event_t;
  bool fits = true;
  std::vector<std::set<std::string>> keys(kMaxJsonDepth + 2);  // of the open object at each depth
  const auto keep = [&](int depth, Event event, const Json& value) {
    fits = fits && depth <= kMaxJsonDepth;
    if (fits && event == Event::object_start) keys[static_cast<std::size_t>(depth) + 1].clear();
    if (fits && event == Event::key) {
      const auto key = value.template get<std::string>();
      fits = keys[static_cast<std::size_t>(depth)].insert(key).second;
      if (!fits && repeated != nullptr) *repeated = key;
    }
    return fits;
  };
  Json out = Json::parse(text, keep, /*allow_exceptions=*/false);
  return fits ? out : Json(Json::value_t::discarded);
}

// The value of a file. Throws heddle::Error naming the file where parse_json discards.
inline nlohmann::json read_json(const std::filesystem::path& path) {
  std::string repeated;
  auto out = parse_json<nlohmann::json>(read_file(path), &repeated);
  HEDDLE_CHECK(repeated.empty(), printable_path(path), ": the key \"", printable(shortened(repeated)), "\" is there twice; mend or remove it");
  HEDDLE_CHECK(!out.is_discarded(), printable_path(path), ": not JSON of at most ", kMaxJsonDepth, " levels; mend or remove it");
  return out;
}

// A member of an object; null if there is none, or no object.
inline nlohmann::json member(const nlohmann::json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return found != object.end() ? *found : nlohmann::json();
}

// A string of an object; "" if there is none.
inline std::string text_at(const nlohmann::json& object, const char* key) {
  const nlohmann::json value = member(object, key);
  return value.is_string() ? value.get<std::string>() : std::string();
}

}  // namespace heddle::nn
