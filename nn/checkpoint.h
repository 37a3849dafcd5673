#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "autograd/random.h"
#include "nn/optim.h"
#include "nn/transformer.h"

namespace heddle::nn {

// A checkpoint is a folder checkpoint-<step> with the weights (Note: Weights in files, tensor_files.h; or of a run that trains an adapter only
// adapter_model.safetensors), optimizer.safetensors, trainer_state.json and config.yaml. It appears whole or not at all (Note: Safe writing).
inline constexpr const char* kAdapterFile = "adapter_model.safetensors";
inline constexpr const char* kAdapterConfigFile = "adapter_config.json";

// Where a run stands, beside its weights and moments.
struct TrainerState {
  std::int64_t step = 0;      // updates attempted
  std::int64_t tokens = 0;    // input tokens read
  std::int64_t examples = 0;  // training examples used: the position in the data
  std::string data;           // what they were taken from, Dataset::describe()
  Generator dropout;
  std::optional<double> best_eval_loss;
  std::int64_t best_step = 0;  // the checkpoint with best_eval_loss
};

// What a run that trains an adapter keeps of its model: the frozen base is not in its checkpoints.
struct AdapterState {
  std::vector<NamedTensor> tensors;  // what is trained; kept exactly in optimizer.safetensors, as weight.NAME
  // Writes adapter_model.safetensors and what belongs to it, which other programs read, as a new folder in place of this one.
  std::function<void(const std::filesystem::path& folder)> write_files;
  std::string base;  // tells bases apart: a run goes on only with the one it began with
};

// Writes output_dir/checkpoint-<state.step>, replacing an older one of that step; returns its path. Throws heddle::Error
// without writing if a weight or a moment holds NaN or infinity.
std::filesystem::path save_checkpoint(const std::filesystem::path& output_dir, const CausalLM& model,
                                      const AdamW& optimizer, const TrainerState& state, const std::string& config_yaml,
                                      const std::optional<AdapterState>& adapter = std::nullopt);

// Restores weights and optimiser bit for bit. Throws heddle::Error naming every tensor that is missing, unexpected, of
// another shape or dtype or not finite, in both files, and for a trainer_state.json that no run can have written or that
// contradicts the folder's name; model and optimiser are then unchanged.
TrainerState load_checkpoint(const std::filesystem::path& folder, const CausalLM& model, const AdamW& optimizer,
                             const std::optional<AdapterState>& adapter = std::nullopt);

// Restores the weights alone from those in a folder, with the same errors; weights of another floating dtype are converted where
// `dtypes` allows it. With a tied head the embedding may be there once, or also as lm_head.weight with equal values; with an
// untied head lm_head.weight must be there.
enum class Dtypes { equal, converted };
void load_weights(const std::filesystem::path& folder, const CausalLM& model, Dtypes dtypes = Dtypes::equal);

// Writes weights of `dtype` to one file in a folder, replacing an older one. Throws heddle::Error without writing if a weight holds NaN or
// infinity.
void save_weights(const std::filesystem::path& folder, const CausalLM& model, DType dtype);

struct Checkpoint {
  std::filesystem::path folder;
  TrainerState state;
};

// The checkpoints of a folder by rising step. Folders that are incomplete or damaged are left out, with one line each
// on `warnings` if given.
std::vector<Checkpoint> find_checkpoints(const std::filesystem::path& output_dir, std::ostream* warnings = nullptr);
std::optional<Checkpoint> find_last_checkpoint(const std::filesystem::path& output_dir, std::ostream* warnings = nullptr);

// The checkpoint with the lowest evaluation loss, as recorded by the last one; the last one if that is gone or there
// was no evaluation.
std::optional<Checkpoint> find_best_checkpoint(const std::filesystem::path& output_dir);

// The checkpoint meant by a path: the folder of one, or the output folder of a run, which stands for its last or best.
// Throws heddle::Error if there is none.
enum class Pick { last, best };
Checkpoint open_checkpoint(const std::filesystem::path& path, Pick pick);

// The folder of the weights meant by a path: one that holds weights and config.yaml, whatever else it lacks, or
// the best checkpoint of a run's output folder. Throws heddle::Error naming what is missing, also for that of an adapter.
std::filesystem::path open_weights(const std::filesystem::path& path);

// The folder of the adapter meant by a path: one that holds adapter_model.safetensors, or the best checkpoint of a run that trained one.
// Throws heddle::Error if there is none.
std::filesystem::path open_adapter(const std::filesystem::path& path);

// Moves what a run would overwrite to a new folder output_dir/old-<n>: the checkpoints after `step` with a copy of
// metrics.jsonl, or with `step` -1 (a run from scratch) every checkpoint and every other file of an earlier run. Returns
// that folder; nothing if there was nothing to move.
std::optional<std::filesystem::path> set_aside(const std::filesystem::path& output_dir, std::int64_t step);

// Removes the oldest checkpoints until `limit` are left. The last and the best are always kept, so a limit of 1 may leave
// two.
void prune_checkpoints(const std::filesystem::path& output_dir, std::int64_t limit);

}  // namespace heddle::nn
