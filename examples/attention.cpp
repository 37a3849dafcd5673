#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "examples/commands.h"
#include "examples/options.h"
#include "examples/run_setup.h"
#include "kernels/attention/attention.h"
#include "nn/safetensors.h"

namespace heddle::examples {
namespace {

struct AttentionCommand {
  std::string input, output, kernel = "auto", device = "auto";
  bool is_causal = false;
  std::optional<double> scale;
};

Tensor read_input(const nn::SafetensorsFile& file, const std::string& name) {
  const Tensor tensor = file.read(name);
  HEDDLE_CHECK(tensor.rank() == 4 && is_floating(tensor.dtype()), "attention: '", name,
               "' must be a floating tensor [B, S, H, D], got ", tensor.describe());
  return tensor;
}

// The ends of the sequences, and the length of the longest. Without them in the file: nothing.
struct SequenceEnds {
  Tensor cu_seqlens;
  std::int64_t max_seqlen = 0;
};

SequenceEnds read_ends(const nn::SafetensorsFile& file, const std::string& name) {
  if (!file.contains(name)) return {};
  const Tensor ends = file.read(name);
  HEDDLE_CHECK(ends.rank() == 1 && ends.dtype() == DType::i32, "attention: '", name, "' must be an int32 tensor [n + 1], got ",
               ends.describe());
  const std::vector<std::int32_t> values = ends.to_vector<std::int32_t>();
  std::int64_t longest = 0;
  for (std::size_t i = 1; i < values.size(); ++i) longest = std::max<std::int64_t>(longest, std::int64_t{values[i]} - values[i - 1]);
  return {ends, longest};
}

AttentionProblem problem_of(const Tensor& q, const Tensor& k, const SequenceEnds& ends_q, const SequenceEnds& ends_k,
                            bool is_causal) {
  AttentionProblem problem{.B = q.size(0), .Sq = q.size(1), .Sk = k.size(1), .Hq = q.size(2), .Hkv = k.size(2),
                           .D = q.size(3), .dtype = q.dtype(), .is_causal = is_causal};
  if (!ends_q.cu_seqlens.defined()) return problem;
  problem.is_varlen = true;
  problem.B = ends_q.cu_seqlens.size(0) - 1;
  problem.Tq = std::exchange(problem.Sq, ends_q.max_seqlen), problem.Tk = std::exchange(problem.Sk, ends_k.max_seqlen);
  return problem;
}

int run_attention(const AttentionCommand& command) {
  std::error_code missing;
  if (std::filesystem::equivalent(command.input, command.output, missing))
    throw ConfigError("--output: expected another file than --input, got " + nn::printable(command.output));
  const nn::SafetensorsFile file(command.input);
  Tensor q = read_input(file, "q"), k = read_input(file, "k"), v = read_input(file, "v");
  const bool has_gradient = file.contains("do");
  SequenceEnds ends_q = read_ends(file, "cu_seqlens_q"), ends_k = read_ends(file, "cu_seqlens_k");
  std::vector<AttentionPass> passes = {AttentionPass::forward};
  if (has_gradient) passes.push_back(AttentionPass::backward);
  const Device device =
      choose_attention_device(command.device, problem_of(q, k, ends_q, ends_k, command.is_causal), passes, command.kernel);
  for (Tensor* input : {&q, &k, &v}) *input = input->to(device).set_requires_grad(has_gradient);
  for (SequenceEnds* ends : {&ends_q, &ends_k})
    if (ends->cu_seqlens.defined()) ends->cu_seqlens = ends->cu_seqlens.to(device);

  const AttentionResult result =
      attention_with_lse(q, k, v, {.is_causal = command.is_causal, .scale = command.scale, .kernel = command.kernel,
                                   .cu_seqlens_q = ends_q.cu_seqlens, .cu_seqlens_k = ends_k.cu_seqlens,
                                   .max_seqlen_q = ends_q.max_seqlen, .max_seqlen_k = ends_k.max_seqlen});
  std::vector<std::pair<std::string, Tensor>> outputs = {{"o", result.out.detach()}, {"lse", result.lse.detach()}};
  if (has_gradient) {
    result.out.backward(read_input(file, "do").to(device));
    outputs.insert(outputs.end(), {{"dq", q.grad()}, {"dk", k.grad()}, {"dv", v.grad()}});
  }
  for (auto& [name, tensor] : outputs) tensor = tensor.to(kCpu);
  nn::write_safetensors(command.output, outputs);
  for (const auto& [name, tensor] : outputs) std::cout << name << "  " << tensor.describe() << '\n';
  for (const AttentionChoice& choice : attention_choices()) std::cout << choice << '\n';
  return 0;
}

}  // namespace

void add_attention_command(CLI::App& app, int& exit_code) {
  CLI::App* sub = app.add_subcommand("attention", "Run heddle's attention on tensors from a safetensors file");
  const auto command = std::make_shared<AttentionCommand>();
  sub->add_option("--input", command->input, "File with q, k, v [B, S, H, D]; for gradients, do; for sequences end to end, cu_seqlens_q and _k")->required()->check(non_empty());
  sub->add_option("--output", command->output, "File to write: o, lse and, if do was given, dq, dk, dv")->required()->check(writable_file());
  sub->add_flag("--causal", command->is_causal, "Query i sees keys j <= i + Sk - Sq (bottom-right aligned)");
  sub->add_option("--scale", command->scale, "Factor of the scores; 1/sqrt(D) if not given")->check(number_in(nn::above(0)));
  sub->add_option("--kernel", command->kernel, "auto, or the name of a variant")->capture_default_str();
  add_device_option(*sub, command->device);
  sub->footer("Example: heddle attention --input qkv.safetensors --output out.safetensors --causal");
  sub->callback([command, &exit_code] { exit_code = run_attention(*command); });
}

}  // namespace heddle::examples
