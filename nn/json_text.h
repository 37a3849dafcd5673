#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace heddle::nn {

// More than any file of ours or of Hugging Face has; the library recurses when it copies, compares or prints a value.
inline constexpr int kMaxJsonDepth = 64;

// The value of a text; discarded (is_discarded()) if that is not JSON or has lists and objects in more than kMaxJsonDepth levels.
// Json is nlohmann::json or nlohmann::ordered_json.
template <typename Json>
Json parse_json(std::string_view text) {
  bool fits = true;
  const auto keep = [&fits](int depth, typename Json::parse_event_t, const Json&) { return fits = fits && depth <= kMaxJsonDepth; };
  Json out = Json::parse(text, keep, /*allow_exceptions=*/false);
  return fits ? out : Json(Json::value_t::discarded);
}

}  // namespace heddle::nn
