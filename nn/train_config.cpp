#include "nn/train_config.h"

namespace heddle::nn {
namespace {

constexpr EnumNames<DataSource> kDataSources{kDataSourceNames};
constexpr EnumNames<Operation> kOperations{kOperationNames};
constexpr EnumNames<Schedule> kSchedules{kScheduleNames};
constexpr EnumNames<Precision> kPrecisions{kPrecisionNames};
constexpr EnumNames<Fp8Scaling> kFp8Scalings{kFp8ScalingNames};

}  // namespace

std::vector<Field> fields(DataConfig& c) {
  return {
      {"source", choice(c.source, kDataSources), {.required = true}},
      {"files", &c.files, {}},
      {"operation", choice(c.operation, kOperations), {}},
      {"digits", &c.digits, {.range = between(1, 9)}},
      {"sequence_length", &c.sequence_length, {.range = count_from(1), .derived = "model.max_position_embeddings"}},
      {"validation_fraction", &c.validation_fraction, {.range = strictly_between(0, 1)}},
  };
}

std::vector<Field> fields(TrainConfig& c) {
  const Range positive = count_from(1);
  const Range not_negative = count_from(0);
  return {
      {"output_dir", &c.output_dir, {.derived = "runs/<config name>"}},
      {"max_steps", &c.max_steps, {.range = positive, .required = true}},
      {"micro_batch_size", &c.micro_batch_size, {.range = positive}},
      {"gradient_accumulation_steps", &c.gradient_accumulation_steps, {.range = positive}},
      {"learning_rate", &c.learning_rate, {.range = above(0)}},
      {"min_learning_rate", &c.min_learning_rate, {.range = at_least(0)}},
      {"lr_scheduler_type", choice(c.lr_scheduler_type, kSchedules), {}},
      {"warmup_steps", &c.warmup_steps, {.range = not_negative}},
      {"weight_decay", &c.weight_decay, {.range = at_least(0)}},
      {"adam_beta1", &c.adam_beta1, {.range = from_below(0, 1)}},
      {"adam_beta2", &c.adam_beta2, {.range = from_below(0, 1)}},
      {"adam_epsilon", &c.adam_epsilon, {.range = above(0)}},
      {"max_grad_norm", &c.max_grad_norm, {.range = at_least(0)}},
      {"max_nonfinite_steps", &c.max_nonfinite_steps, {.range = positive}},
      {"precision", choice(c.precision, kPrecisions), {.form = "not fp16: without loss scaling its gradients underflow"}},
      {"fp8_scaling", choice(c.fp8_scaling, kFp8Scalings), {}},
      {"fp8_history", &c.fp8_history, {.range = between(1, 1024)}},
      {"allow_tf32", &c.allow_tf32, {}},
      {"cuda_graph", &c.cuda_graph, {}},
      {"seed", &c.seed, {.range = at_least(0)}},
      {"num_threads", &c.num_threads, {.range = between(0, 1024)}},
      {"logging_steps", &c.logging_steps, {.range = positive}},
      {"eval_steps", &c.eval_steps, {.range = not_negative}},
      {"eval_iters", &c.eval_iters, {.range = positive}},
      {"save_steps", &c.save_steps, {.range = not_negative}},
      {"save_total_limit", &c.save_total_limit, {.range = positive}},
      {"resume_from_checkpoint", &c.resume_from_checkpoint, {}},
  };
}

std::vector<Field> fields(AttentionConfig& c) {
  return {{"kernel", &c.kernel, {}}, {"deterministic", &c.deterministic, {}}};
}

std::vector<Conflict> conflicts(const TrainConfig& c) {
  std::vector<Conflict> out;
  if (c.min_learning_rate > c.learning_rate) {
    out.push_back({"min_learning_rate", "at most", "learning_rate", number_text(c.learning_rate),
                   number_text(c.min_learning_rate)});
  }
  return out;
}

void validate(const DataConfig& config) {
  DataConfig copy = config;
  require_valid("data", fields(copy), {});
}

void validate(const TrainConfig& config) {
  TrainConfig copy = config;
  require_valid("train", fields(copy), conflicts(copy));
}

}  // namespace heddle::nn
