#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/runtime/dtype.h"
#include "nn/config_field.h"

namespace heddle::nn {

enum class DataSource { text, arithmetic };
enum class Operation { addition, subtraction };
enum class Schedule { cosine, linear, constant };
enum class Precision { fp32, bf16, fp8 };
enum class Fp8Scaling { current, delayed };

inline constexpr std::array<std::pair<std::string_view, DataSource>, 2> kDataSourceNames{
    {{"text", DataSource::text}, {"arithmetic", DataSource::arithmetic}}};
inline constexpr std::array<std::pair<std::string_view, Operation>, 2> kOperationNames{
    {{"addition", Operation::addition}, {"subtraction", Operation::subtraction}}};
inline constexpr std::array<std::pair<std::string_view, Schedule>, 3> kScheduleNames{
    {{"cosine", Schedule::cosine}, {"linear", Schedule::linear}, {"constant", Schedule::constant}}};
inline constexpr std::array<std::pair<std::string_view, Precision>, 3> kPrecisionNames{
    {{"fp32", Precision::fp32}, {"bf16", Precision::bf16}, {"fp8", Precision::fp8}}};
inline constexpr std::array<std::pair<std::string_view, Fp8Scaling>, 2> kFp8ScalingNames{
    {{"current", Fp8Scaling::current}, {"delayed", Fp8Scaling::delayed}}};

// What the model reads. Both sources are bytes: ids 0 to 255.
struct DataConfig {
  DataSource source = DataSource::text;
  std::vector<std::string> files{"**/*.h", "**/*.cpp", "**/*.md"};  // text: globs, from the working directory
  Operation operation = Operation::addition;                        // arithmetic
  std::int64_t digits = 2;                                          // arithmetic: digits of each operand
  std::int64_t sequence_length = 128;  // a config file without it takes the model's longest
  double validation_fraction = 0.05;

  friend bool operator==(const DataConfig&, const DataConfig&) = default;
};

struct TrainConfig {
  std::string output_dir;  // must be set; a config file's default is runs/<config name>
  std::int64_t max_steps = 0;
  std::int64_t micro_batch_size = 16;
  std::int64_t gradient_accumulation_steps = 1;
  double learning_rate = 1e-3;
  double min_learning_rate = 0;
  Schedule lr_scheduler_type = Schedule::cosine;
  std::int64_t warmup_steps = 0;
  double weight_decay = 0.1;
  // 0.95 rather than 0.999: the usual choice for language models, whose runs are short against a memory of 1000 steps.
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.95;
  double adam_epsilon = 1e-8;
  double max_grad_norm = 1;              // 0: no clipping
  std::int64_t max_nonfinite_steps = 5;  // skipped steps in a row that end the run
  Precision precision = Precision::fp32;
  Fp8Scaling fp8_scaling = Fp8Scaling::current;
  std::int64_t fp8_history = 16;  // delayed scaling: steps
  bool allow_tf32 = false;  // fp32 products on CUDA may round their operands to 10 bits of mantissa
  bool cuda_graph = false;  // starts each step as one recorded whole (nn/train_step.h)
  std::int64_t seed = 1337;
  std::int64_t num_threads = 0;  // 0: OMP_NUM_THREADS, else every core
  std::int64_t logging_steps = 10;
  std::int64_t eval_steps = 100;  // 0: only after the last step
  std::int64_t eval_iters = 20;   // batches an evaluation of text reads
  std::int64_t save_steps = 200;  // 0: only after the last step
  std::int64_t save_total_limit = 3;
  std::optional<std::string> resume_from_checkpoint = {};  // a checkpoint folder, or "auto": the last one in output_dir

  friend bool operator==(const TrainConfig&, const TrainConfig&) = default;
};

// What weights and activations are held in: FP8 is what linear layers multiply in (quant/fp8_training.h), beside bfloat16.
constexpr DType dtype_of(Precision precision) { return precision == Precision::fp32 ? DType::f32 : DType::bf16; }

struct AttentionConfig {
  std::string kernel = "auto";  // or the name of a variant
  bool deterministic = false;

  friend bool operator==(const AttentionConfig&, const AttentionConfig&) = default;
};

// The fields point into `config`.
std::vector<Field> fields(DataConfig& config);
std::vector<Field> fields(TrainConfig& config);
std::vector<Field> fields(AttentionConfig& config);

// Rules between keys of the optimiser's schedule.
std::vector<Conflict> conflicts(const TrainConfig& config);

// Throws heddle::ConfigError naming every key out of bounds and every conflict.
void validate(const DataConfig& config);
void validate(const TrainConfig& config);

}  // namespace heddle::nn
