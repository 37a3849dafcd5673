#include "quant/quant_config.h"

namespace heddle::quant {
namespace {

constexpr nn::EnumNames<QuantFormat> kFormats{kFormatNames};
constexpr nn::EnumNames<ScaleGrain> kGrains{kGrainNames};
constexpr nn::EnumNames<ScaleRounding> kRoundings{kRoundingNames};
constexpr nn::EnumNames<ScaleSearch> kSearches{kSearchNames};
constexpr nn::EnumNames<MxRounding> kMxRoundings{kMxRoundingNames};
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
      {"compute", nn::choice(c.compute, kComputes), {}},
      {"exclude", &c.exclude, {}},
  };
}

}  // namespace heddle::quant
