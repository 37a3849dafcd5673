#pragma once

#include <string>

#include "configs/run_config.h"
#include "nn/transformer.h"

// What the commands that run a model share.

namespace heddle::examples {

// The device a command line asks for; "auto" is a CUDA device where there is one, else the CPU. Throws
// heddle::ConfigError with the reason if a named device cannot be used.
Device choose_device(const std::string& name);

// The device that runs a config's model. Where "auto" finds a CUDA device on which no attention kernel can run the
// model forward and backward, it is the CPU, and one line says why.
Device choose_model_device(const config::RunConfig& run);

// The model of a config on a device, with weights drawn from the config's seed. Also applies the config's thread count
// and its wish for deterministic kernels.
nn::CausalLM make_model(const config::RunConfig& run, Device device);

}  // namespace heddle::examples
