#include "quant/quant_config.h"

namespace heddle::quant {
namespace {

constexpr nn::EnumNames<QuantFormat> kFormats{kFormatNames};
constexpr nn::EnumNames<ScaleGrain> kGrains{kGrainNames};
constexpr nn::EnumNames<ScaleRounding> kRoundings{kRoundingNames};
constexpr nn::EnumNames<ScaleSearch> kSearches{kSearchNames};
constexpr nn::EnumNames<MxRounding> kMxRoundings{kMxRoundingNames};
constexpr nn::EnumNames<ElementRounding> kElementRoundings{kElementRoundingNames};
constexpr nn::EnumNames<QuantCompute> kComputes{kComputeNames};

}  // namespace

QuantSpec QuantConfig::spec() const {
  return {.format = format,
          .grain = fp8_scale,
          .scale_rounding = nvfp4_scale_rounding,
          .scale_search = nvfp4_scale_search,
          .mx_rounding = mxfp4_scale};
}

std::vector<nn::Field> fields(QuantConfig& c) {
  return {
      {"format", nn::choice(c.format, kFormats), {.required = true}},
      {"fp8_scale", nn::choice(c.fp8_scale, kGrains), {}},
      {"nvfp4_scale_rounding", nn::choice(c.nvfp4_scale_rounding, kRoundings), {}},
      {"nvfp4_scale_search", nn::choice(c.nvfp4_scale_search, kSearches), {}},
      {"mxfp4_scale", nn::choice(c.mxfp4_scale, kMxRoundings), {}},
      {"rounding", nn::choice(c.rounding, kElementRoundings), {}},
      {"seed", &c.seed, {.range = nn::at_least(0), .derived = "train.seed"}},
      {"exclude", &c.exclude, {}},
  };
}

nn::Field compute_field(std::optional<QuantCompute>& compute) {
  return {"compute", nn::choice(compute, kComputes), {.derived = "fp8 for FP8 formats where the GPU has it, else bf16"}};
}

std::string_view compute_name(QuantCompute compute) { return nn::name_of(kComputes, compute); }

std::vector<nn::Conflict> conflicts(const QuantConfig& c) {
  const bool is_stochastic = c.rounding == ElementRounding::stochastic;
  const std::string rounding(nn::name_of(kElementRoundings, c.rounding));
  std::vector<nn::Conflict> out;
  if (is_stochastic && c.nvfp4_scale_search != ScaleSearch::none)
    out.push_back({"nvfp4_scale_search", "none beside", "rounding", rounding, std::string(nn::name_of(kSearches, c.nvfp4_scale_search))});
  if (!is_stochastic && c.seed) out.push_back({"seed", "null beside", "rounding", rounding, std::to_string(*c.seed)});
  return out;
}

}  // namespace heddle::quant
