#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "configs/run_config.h"
#include "kernels/attention/attention.h"
#include "lora/adapter.h"
#include "nn/checkpoint.h"
#include "nn/data.h"
#include "nn/transformer.h"

// What the commands that run a model share.

namespace heddle::examples {

// The device a command line asks for; "auto" is a CUDA device where there is one, else the CPU. Throws
// heddle::ConfigError with the reason if a named device cannot be used.
Device choose_device(const std::string& name);

// The same for a command that runs attention of this form (its device is ignored). Where "auto" finds a CUDA device on which
// no kernel can run the passes, it is the CPU, and one line on standard error says why. Throws heddle::Error if `kernel`
// cannot run them on the device.
Device choose_attention_device(const std::string& name, AttentionProblem problem, std::span<const AttentionPass> passes,
                               const std::string& kernel);

// What a training step needs, from a config file.
struct TrainingSetup {
  config::RunConfig run;
  Device device;
  std::unique_ptr<nn::Dataset> data;
};

// Reads a config file and what it names. Throws heddle::ConfigError listing every mistake: those of keys and values, a
// device or attention kernel that cannot train the model, missing data, and what `checks` refuse.
TrainingSetup load_training(const std::string& path, const std::vector<std::string>& overrides,
                            std::vector<config::RunCheck> checks = {});

// Lets CPU kernels use `wanted` threads, but no more than there are cores: those would wait for each other. One line on
// standard error says so, with the `source` of the wish.
void use_threads(std::int64_t wanted, std::string_view source);

// Puts a config's thread count, its wish for deterministic kernels and train.allow_tf32 into effect.
void apply_settings(const config::RunConfig& run, Device device);

// The model of a config on a device, with weights drawn from the config's seed, or of 0 where others are loaded next.
enum class Weights { drawn, loaded_next };
nn::CausalLM make_model(const config::RunConfig& run, Device device, Weights weights);

// The config of a checkpoint or adapter, whose machine need not be this one: without what it says of devices, its base, and quantize.compute,
// of which standard error then tells.
config::RunConfig stored_config(const std::filesystem::path& folder);

// An adapter belongs on its base as that was in training: where the config in the adapter's folder quantises the base, whose folder holds
// the plain model, `run` is to do so too, from weights of the same precision. Throws heddle::Error, before anything is quantised, for a
// base that is another model.
void follow_adapter(const std::filesystem::path& adapter, const std::filesystem::path& base, config::RunConfig& run);

// Loads the weights that a path of the user's stands for into the model, and returns whether they are quantised: stored so, or by the
// config's section quantize from weights of its precision. Standard error then says what they cost and are computed in, and what the
// file has beside them.
bool load_model_weights(const std::string& path, const config::RunConfig& run, nn::CausalLM& model, nn::Dtypes dtypes = nn::Dtypes::equal);

// Fills the model from the config's base, if it has one, quantised where the config says so, and attaches the adapter. Standard error
// names the adapted layers whose weights are all zero.
std::optional<lora::Adapter> start_from_base(const config::RunConfig& run, nn::CausalLM& model);

// Has the model train in FP8 where the config says so.
void use_precision(const config::RunConfig& run, nn::CausalLM& model);

// The attention of a config's model.
AttentionProblem attention_problem(const config::RunConfig& run);

}  // namespace heddle::examples
