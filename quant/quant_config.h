#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/quantize/quant_gemm.h"
#include "nn/config_field.h"

namespace heddle::quant {

inline constexpr std::array<std::pair<std::string_view, QuantFormat>, 5> kFormatNames{{{"fp8_e4m3", QuantFormat::fp8_e4m3},
                                                                                      {"fp8_e5m2", QuantFormat::fp8_e5m2},
                                                                                      {"fp4", QuantFormat::fp4},
                                                                                      {"mxfp4", QuantFormat::mxfp4},
                                                                                      {"nvfp4", QuantFormat::nvfp4}}};
inline constexpr std::array<std::pair<std::string_view, ScaleGrain>, 3> kGrainNames{
    {{"tensor", ScaleGrain::tensor}, {"channel", ScaleGrain::channel}, {"block", ScaleGrain::block}}};
inline constexpr std::array<std::pair<std::string_view, ScaleRounding>, 2> kRoundingNames{
    {{"nearest", ScaleRounding::nearest}, {"up", ScaleRounding::up}}};
inline constexpr std::array<std::pair<std::string_view, ScaleSearch>, 3> kSearchNames{
    {{"none", ScaleSearch::none}, {"four_over_six", ScaleSearch::four_over_six}, {"mse", ScaleSearch::mse}}};
inline constexpr std::array<std::pair<std::string_view, MxRounding>, 2> kMxRoundingNames{
    {{"floor", MxRounding::floor}, {"ceil", MxRounding::ceil}}};

// How an element becomes one of the two codes beside it. Drawn by chance, it reads as itself on average, with about twice the squared error.
enum class ElementRounding { nearest, stochastic };
inline constexpr std::array<std::pair<std::string_view, ElementRounding>, 2> kElementRoundingNames{
    {{"nearest", ElementRounding::nearest}, {"stochastic", ElementRounding::stochastic}}};

inline constexpr std::array<std::pair<std::string_view, QuantCompute>, 2> kComputeNames{{{"fp8", QuantCompute::fp8}, {"bf16", QuantCompute::wide}}};

// Which layers of a model are quantised, and to what. What they are multiplied in is no part of it: each machine has its own.
struct QuantConfig {
  QuantFormat format = QuantFormat::nvfp4;
  ScaleGrain fp8_scale = ScaleGrain::channel;
  ScaleRounding nvfp4_scale_rounding = ScaleRounding::nearest;
  ScaleSearch nvfp4_scale_search = ScaleSearch::none;
  MxRounding mxfp4_scale = MxRounding::floor;
  ElementRounding rounding = ElementRounding::nearest;
  std::optional<std::int64_t> seed;  // of stochastic rounding, and only there
  // Layers that stay as they are: names or their ends after a dot ("o_proj", "layers.0.mlp.*"), with the wildcards of fnmatch.
  // Embeddings and norms always stay.
  std::vector<std::string> exclude{"lm_head"};

  QuantSpec spec() const;

  friend bool operator==(const QuantConfig&, const QuantConfig&) = default;
};

// The keys of a `quantize` section, and the one beside them that says how this machine multiplies: left open, FP8 weights in FP8 on a GPU
// that does so, and others in the dtype of activations.
std::vector<nn::Field> fields(QuantConfig& config);
nn::Field compute_field(std::optional<QuantCompute>& compute);
std::string_view compute_name(QuantCompute compute);
// Scale searches look for the least error of rounding to nearest.
std::vector<nn::Conflict> conflicts(const QuantConfig& config);

}  // namespace heddle::quant
