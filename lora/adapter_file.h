#pragma once

#include <filesystem>
#include <string>

#include "lora/adapter.h"
#include "nn/transformer.h"

namespace heddle::lora {

// Note: Adapter files
// A folder with adapter_config.json and adapter_model.safetensors, as PEFT writes them for the Hugging Face model of the same
// architecture: its module names, tensors in float32 whatever the factors are (which is exact).
// GPT-2's c_attn is one layer there, with one A and one B. Adapters of q_proj, k_proj and v_proj by themselves become one of the sum
// of their ranks: their A lie one after another, their B on the diagonal of a B that is zero elsewhere. Where their scales differ, the
// ratio to the first goes into B. PiSSA, whose base is not the model's, is written as plain LoRA of twice the rank: what has been learned
// beside the model's own weights, as PEFT converts it on request; what it writes otherwise is read as well. The metadata of the tensors
// hold the ranks, so that reading takes them apart again, and a fingerprint of the base. PEFT does not look at metadata; an adapter without
// a fingerprint is taken to fit. An adapted head has its own weight beside the factors, as PEFT has it, which must be the model's.

// Writes the folder, replacing an older one (Note: Safe writing, nn/atomic_file.h). `base_path` is recorded as where the model came from, and
// `fingerprint` as what it is; left out, it is found, which reads every weight of the model. Throws heddle::Error without writing if the model is not
// the adapter's or is merged (Adapter::check_base), or if a factor holds NaN or infinity.
void save_adapter(const std::filesystem::path& folder, const nn::CausalLM& model, const Adapter& adapter, const std::string& base_path,
                  const std::string& fingerprint = "");

// The adapter of a folder for a model. A and B have the model's dtype where that holds all of them exactly, as it does what was trained in
// it, else float32. Throws heddle::Error, and the model is unchanged, if it has an adapter attached, the folder's was trained on another base,
// touches no layer, or has tensors that are missing, unexpected, not finite, of another shape than its config and the model ask for, or
// of another dtype than float32, bfloat16 or float16: all are named.
Adapter load_adapter(const std::filesystem::path& folder, nn::CausalLM& model);

// 16 hexadecimal digits from the names, shapes and values of all parameters but those of adapters, and of the decoded weights of layers
// that keep them in another form: a quantised base is another one than it was made from. Values count as rounded to bfloat16,
// so that a base and its 16-bit copy are one; others are told apart but for one chance in 2^64. Not made against forgery.
std::string base_fingerprint(const nn::CausalLM& model);

}  // namespace heddle::lora
