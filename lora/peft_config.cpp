#include "lora/peft_config.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <set>
#include <utility>

#include "kernels/runtime/check.h"
#include "lora/name_pattern.h"
#include "nn/json_text.h"
#include "nn/posix_file.h"

namespace heddle::lora {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;  // the order of a pattern's keys has a meaning

// A LoraConfig without options.
const char* const kDefaults = R"({
  "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
  "base_model_name_or_path": null, "bias": "none", "corda_config": null, "ensure_weight_tying": false, "eva_config": null,
  "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true, "kasa_config": null,
  "layer_replication": null, "layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 8,
  "lora_bias": false, "lora_dropout": 0.0, "lora_ga_config": null, "megatron_config": null, "megatron_core": "megatron.core",
  "modules_to_save": null, "monteclora_config": null, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16,
  "r": 8, "rank_pattern": {}, "revision": null, "target_modules": null, "target_parameters": null, "task_type": "CAUSAL_LM",
  "trainable_token_indices": null, "use_bdlora": null, "use_dora": false, "use_qalora": false, "use_rslora": false,
  "velora_config": null})";

// Keys that do not change what a trained adapter computes. `layers_pattern` names the list of layers, of which we have one.
const std::set<std::string> kNotes = {"auto_mapping", "base_model_name_or_path", "eva_config", "fan_in_fan_out", "inference_mode",
                                      "layers_pattern", "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type"};

// Ways to fill a new adapter that leave the base as it is, and "pissa", whose base can be made again.
const std::set<std::string> kInits = {"true", "false", "gaussian", "eva", "orthogonal", "pissa"};

// Reads the keys of one file; every error names the file.
class Reader {
 public:
  Reader(const fs::path& path, Json json) : path_(path), json_(std::move(json)) {}

  template <typename... Parts>
  void require(bool ok, const Parts&... parts) const {
    HEDDLE_CHECK(ok, nn::printable_path(path_), ": ", parts...);
  }

  const Json* find(const std::string& key) {
    seen_.insert(key);
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  const Json& need(const std::string& key) {
    const Json* value = find(key);
    require(value != nullptr, key, " is missing");
    return *value;
  }

  std::int64_t rank(const std::string& key, const Json& value) const {
    constexpr std::int64_t kMost = std::int64_t{1} << 31;  // keeps products of sizes in 64 bits
    require(value.is_number_integer() && value >= Json(1) && value <= Json(kMost), key, " must be an integer in [1, ", kMost, "], got ", start_of(value.dump()));
    return value.get<std::int64_t>();
  }
  double number(const std::string& key, const Json& value) const {
    require(value.is_number() && std::isfinite(value.get<double>()), key, " must be a number, got ", start_of(value.dump()));
    return value.get<double>();
  }
  bool flag(const std::string& key, bool otherwise = false) {
    const Json* value = find(key);
    require(value == nullptr || value->is_boolean(), key, " must be true or false");
    return value == nullptr ? otherwise : value->get<bool>();
  }
  std::string text(const std::string& key, const Json& value) const {
    require(value.is_string(), key, " must hold text, got ", start_of(value.dump()));
    return value.get<std::string>();
  }

  // A list of `item`s, or one of them.
  template <typename Value, typename Read>
  std::vector<Value> list(const std::string& key, const Read& read) {
    std::vector<Value> out;
    const Json* value = find(key);
    if (value == nullptr) return out;
    if (!value->is_array()) return {read(key, *value)};
    for (const Json& item : *value) out.push_back(read(key, item));
    return out;
  }
  template <typename Value, typename Read>
  std::vector<std::pair<std::string, Value>> pattern(const std::string& key, const Read& read) {
    std::vector<std::pair<std::string, Value>> out;
    const Json* value = find(key);
    if (value == nullptr) return out;
    require(value->is_object(), key, " must be an object");
    for (const auto& [name, item] : value->items()) {
      check_pattern(key, name);
      out.emplace_back(name, read(key + "." + start_of(name), item));
    }
    return out;
  }
  // Names, or one pattern.
  std::vector<std::string> names(const std::string& key, bool& are_pattern) {
    const Json* value = find(key);
    are_pattern = value != nullptr && value->is_string() && *value != Json("");
    if (are_pattern) check_pattern(key, value->get<std::string>());
    if (value == nullptr || *value == Json("")) return {};
    return list<std::string>(key, [this](const std::string& name, const Json& item) { return text(name, item); });
  }
  void check_pattern(const std::string& key, const std::string& pattern) const {
    const std::string_view problem = pattern_problem(pattern);
    require(problem.empty(), key, " holds '", start_of(pattern), "', which ", problem);
  }

  // A key that was not asked for must hold its default, or nothing at all where we do not know the key.
  void check_rest() const {
    static const Json defaults = Json::parse(kDefaults);
    for (const auto& [key, value] : json_.items()) {
      if (seen_.count(key) > 0 || kNotes.count(key) > 0) continue;
      const bool is_nothing = value.is_null() || value == Json(false) || value == Json::object() || value == Json::array();
      const bool is_default = defaults.contains(key) && defaults[key] == value;
      require(is_nothing || is_default, start_of(key), " is ", start_of(value.dump()), "; adapters with this option cannot be used here");
    }
  }

 private:
  const fs::path& path_;
  Json json_;
  std::set<std::string> seen_;
};

std::string init_name(Reader& in) {
  const Json* value = in.find("init_lora_weights");
  const std::string name = value == nullptr ? "true" : value->is_string() ? value->get<std::string>() : value->dump();
  in.require(kInits.count(name) > 0, "init_lora_weights is ", start_of(name), ", which changes the base; save the adapter as plain LoRA");
  return name;
}

// Whether one of the names is the module's or the end of it after a dot, or the one pattern fits it.
bool is_in(const std::vector<std::string>& names, bool are_pattern, const std::string& module) {
  if (are_pattern) return fits_name(names.front(), module);
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return module == name || module.ends_with("." + name); });
}

// The first number between dots in a name.
std::optional<std::int64_t> layer_of(const std::string& module) {
  static const std::regex number(R"(\.(\d{1,9})\.)");
  std::smatch match;
  if (!std::regex_search(module, match, number)) return std::nullopt;
  return std::stoll(match[1]);
}

Json number_json(double value) {
  const bool is_whole = value == std::trunc(value) && std::abs(value) < 0x1p53;
  return is_whole ? Json(static_cast<std::int64_t>(value)) : Json(value);
}

}  // namespace

bool PeftConfig::targets(const std::string& module) const {
  if (is_in(exclude_modules, excludes_are_pattern, module) || !is_in(target_modules, targets_are_pattern, module)) return false;
  if (targets_are_pattern || layers_to_transform.empty()) return true;
  const auto layer = layer_of(module);
  return layer && std::find(layers_to_transform.begin(), layers_to_transform.end(), *layer) != layers_to_transform.end();
}

PeftConfig read_peft_config(const fs::path& path) {
  const auto json = nn::parse_json<Json>(nn::read_file(path));
  HEDDLE_CHECK(json.is_object(), nn::printable_path(path), ": not a JSON object of at most ", nn::kMaxJsonDepth, " levels with each key once");
  Reader in(path, json);
  const auto number = [&in](const std::string& key, const Json& value) { return in.number(key, value); };
  const auto rank = [&in](const std::string& key, const Json& value) { return in.rank(key, value); };
  const auto index = [&in](const std::string& key, const Json& value) {
    in.require(value.is_number_unsigned(), key, " must hold numbers of layers, got ", start_of(value.dump()));
    return value.get<std::int64_t>();
  };

  const std::string type = in.text("peft_type", in.need("peft_type"));
  in.require(type == "LORA", "peft_type is ", start_of(type), "; only LORA adapters can be used here");
  PeftConfig out;
  if (const Json* base = in.find("base_model_name_or_path")) out.base_model_name_or_path = in.text("base_model_name_or_path", *base);
  out.r = in.rank("r", in.need("r"));
  out.lora_alpha = in.number("lora_alpha", in.need("lora_alpha"));
  if (const Json* dropout = in.find("lora_dropout")) out.lora_dropout = in.number("lora_dropout", *dropout);
  in.require(out.lora_dropout >= 0 && out.lora_dropout < 1, "lora_dropout must be in [0, 1), got ", out.lora_dropout);
  out.use_rslora = in.flag("use_rslora");
  out.use_dora = in.flag("use_dora");
  out.fan_in_fan_out = in.flag("fan_in_fan_out");
  out.init_lora_weights = init_name(in);
  in.need("target_modules");
  out.target_modules = in.names("target_modules", out.targets_are_pattern);
  in.require(!out.target_modules.empty(), "target_modules is empty");
  out.exclude_modules = in.names("exclude_modules", out.excludes_are_pattern);
  out.layers_to_transform = in.list<std::int64_t>("layers_to_transform", index);
  out.rank_pattern = in.pattern<std::int64_t>("rank_pattern", rank);
  out.alpha_pattern = in.pattern<double>("alpha_pattern", number);
  in.check_rest();
  return out;
}

std::string peft_config_text(const PeftConfig& config) {
  nlohmann::json out = nlohmann::json::parse(kDefaults);  // sorts keys
  if (!config.base_model_name_or_path.empty()) out["base_model_name_or_path"] = nn::printable(config.base_model_name_or_path);
  out["r"] = config.r;
  out["lora_alpha"] = number_json(config.lora_alpha);
  out["lora_dropout"] = config.lora_dropout;
  out["use_rslora"] = config.use_rslora;
  out["use_dora"] = config.use_dora;
  out["fan_in_fan_out"] = config.fan_in_fan_out;
  if (config.init_lora_weights == "true" || config.init_lora_weights == "false")
    out["init_lora_weights"] = config.init_lora_weights == "true";
  else
    out["init_lora_weights"] = config.init_lora_weights;
  if (config.targets_are_pattern) out["target_modules"] = config.target_modules.front();
  else out["target_modules"] = config.target_modules;
  if (config.excludes_are_pattern) out["exclude_modules"] = config.exclude_modules.front();
  else if (!config.exclude_modules.empty()) out["exclude_modules"] = config.exclude_modules;
  if (!config.layers_to_transform.empty()) out["layers_to_transform"] = config.layers_to_transform;
  for (const auto& [name, rank] : config.rank_pattern) out["rank_pattern"][name] = rank;
  for (const auto& [name, alpha] : config.alpha_pattern) out["alpha_pattern"][name] = number_json(alpha);
  return out.dump(2, ' ', /*ensure_ascii=*/true);
}

}  // namespace heddle::lora
