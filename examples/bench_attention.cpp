#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "examples/attention_check.h"
#include "examples/bench_timer.h"
#include "examples/commands.h"
#include "examples/options.h"
#include "examples/run_setup.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/parallel.h"
#include "nn/atomic_file.h"

namespace heddle::examples {
namespace {

struct BenchCommand {
  std::int64_t batch = 4, heads = 8, kv_heads = 0, seq = 2048, head_dim = 64;
  bool is_causal = false, is_deterministic = false;
  std::string preset, dtype = "bfloat16", kernel = "all", pass = "both", device = "auto", json;
  int runs = 0;
  double ceiling = 0;  // TFLOP/s
};

// One row of the table: as many keys as queries.
struct BenchShape {
  std::int64_t B, Hq, Hkv, S, D;
  bool is_causal;

  // 4 D FLOP a score and head: two products forward. Half the scores count under a causal mask; the backward has five products.
  double flop(AttentionPass pass) const {
    const auto scores = static_cast<double>(B * Hq) * static_cast<double>(S) * static_cast<double>(S) * (is_causal ? 0.5 : 1.0);
    const double forward = 4.0 * scores * static_cast<double>(D);
    return pass == AttentionPass::forward ? forward : 2.5 * forward;
  }
  // Every input read and every output written once.
  double nbytes(AttentionPass pass, DType dtype) const {
    const double like_q = static_cast<double>(B * S * Hq * D), like_k = static_cast<double>(B * S * Hkv * D);
    const double tensors = pass == AttentionPass::forward ? 2 * like_q + 2 * like_k : 4 * like_q + 4 * like_k;
    return tensors * static_cast<double>(dtype_size(dtype)) + 4.0 * static_cast<double>(B * Hq * S);
  }
};

std::vector<BenchShape> with_both_masks(const std::vector<BenchShape>& shapes) {
  std::vector<BenchShape> out;
  for (BenchShape shape : shapes)
    for (const bool is_causal : {false, true}) shape.is_causal = is_causal, out.push_back(shape);
  return out;
}

std::vector<BenchShape> lengths(std::int64_t D) {
  std::vector<BenchShape> shapes;
  for (const std::int64_t S : {512, 1024, 2048, 4096}) shapes.push_back({4, 8, 8, S, D, false});
  return with_both_masks(shapes);
}

// 16384 tokens and 2048 columns in every shape.
std::vector<BenchShape> long_shapes(std::int64_t D) {
  const std::int64_t H = 2048 / D;
  std::vector<BenchShape> shapes;
  for (const std::int64_t S : {1024, 4096, 8192, 16384}) shapes.push_back({16384 / S, H, H, S, D, false});
  return with_both_masks(shapes);
}

std::vector<BenchShape> preset_shapes(const std::string& preset) {
  if (preset == "articles") return lengths(64);
  std::vector<BenchShape> shapes = preset == "bar" ? lengths(64) : std::vector<BenchShape>{};
  const auto append = [&](const std::vector<BenchShape>& more) { shapes.insert(shapes.end(), more.begin(), more.end()); };
  append(long_shapes(64));
  append(long_shapes(128));
  if (preset == "long") return shapes;
  append(lengths(128));
  append({{2, 32, 8, 4096, 128, true}, {1, 64, 8, 8192, 128, false}, {1, 64, 8, 8192, 128, true}});
  return shapes;
}

AttentionTensors make_tensors(const BenchShape& shape, DType dtype, Device device, RandomTable& random) {
  const Shape like_q{shape.B, shape.S, shape.Hq, shape.D}, like_k{shape.B, shape.S, shape.Hkv, shape.D};
  const auto empty = [&](const Shape& s) { return Tensor::empty(s, dtype, device); };
  AttentionTensors t;
  t.q = random.tensor(like_q), t.k = random.tensor(like_k), t.v = random.tensor(like_k), t.dout = random.tensor(like_q);
  t.out = empty(like_q), t.dq = empty(like_q), t.dk = empty(like_k), t.dv = empty(like_k);
  t.lse = Tensor::empty({shape.B, shape.Hq, shape.S}, dtype == DType::f64 ? dtype : DType::f32, device);
  t.is_causal = shape.is_causal;
  t.scale = 1.0 / std::sqrt(static_cast<double>(shape.D));
  return t;
}

std::string_view pass_name(AttentionPass pass) { return pass == AttentionPass::forward ? "fwd" : "bwd"; }

// Runs the command and gathers what it found.
class AttentionBench {
 public:
  AttentionBench(const BenchCommand& command, DType dtype, Device device)
      : command_(command), dtype_(dtype), ctx_(device_context(device)), random_(dtype, device),
        ceiling_(command.ceiling > 0 ? 1e12 * command.ceiling : gemm_ceiling(dtype, ctx_)) {
    ctx_.deterministic = command.is_deterministic;
  }

  void run() {
    print_head();
    const std::vector<BenchShape> shapes = command_.preset.empty() ? std::vector{asked_shape()} : preset_shapes(command_.preset);
    for (const BenchShape& shape : shapes) {
      const AttentionTensors tensors = make_tensors(shape, dtype_, ctx_.device, random_);
      for (const AttentionVariant& variant : attention_variants()) {
        if (command_.kernel != "all" && command_.kernel != variant.name) continue;
        for (const AttentionPass pass : {AttentionPass::forward, AttentionPass::backward})
          if (command_.pass == "both" || command_.pass == pass_name(pass)) run_one(shape, tensors, variant, pass);
      }
    }
    for (const auto& [reason, count] : skipped_)
      std::cout << "skipped " << reason << " (" << count << (count == 1 ? " shape)\n" : " shapes)\n");
    for (const std::string& fault : faults_) std::cout << "not timed, wrong: " << fault << '\n';
    if (!command_.json.empty()) write_json();
    HEDDLE_CHECK(faults_.empty(), "bench-attention: ", faults_.size(), " results are wrong");
    HEDDLE_CHECK(!results_.empty(), "bench-attention: no kernel ran");
  }

 private:
  BenchShape asked_shape() const {
    const std::int64_t kv_heads = command_.kv_heads > 0 ? command_.kv_heads : command_.heads;
    return {command_.batch, command_.heads, kv_heads, command_.seq, command_.head_dim, command_.is_causal};
  }

  void run_one(const BenchShape& shape, const AttentionTensors& tensors, const AttentionVariant& variant, AttentionPass pass) {
    const AttentionProblem problem{.B = shape.B, .Sq = shape.S, .Sk = shape.S, .Hq = shape.Hq, .Hkv = shape.Hkv, .D = shape.D,
                                   .dtype = dtype_, .is_causal = shape.is_causal, .scale = tensors.scale,
                                   .deterministic = ctx_.deterministic, .device = ctx_.device};
    const AttentionSupport support = variant.supports(problem, pass);
    if (!support.ok) {
      ++skipped_[concat_text(variant.name, ' ', pass_name(pass), ": ", support.reason)];
      return;
    }
    // The first call checks the contract; the timed ones are the variant alone.
    attention_forward(tensors.forward_args(), pass == AttentionPass::forward ? variant.name : "auto", ctx_);
    if (pass == AttentionPass::backward) attention_backward(tensors.backward_args(), variant.name, ctx_);
    const std::string fault = attention_fault(tensors, pass);
    if (!fault.empty()) {
      faults_.push_back(concat_text(variant.name, ' ', pass_name(pass), ", ", describe(shape), ": ", fault));
      return;
    }
    const Buffer workspace(variant.workspace_bytes(problem, pass), ctx_.device);
    const auto work = [&] {
      if (pass == AttentionPass::forward) variant.forward(tensors.forward_args(), workspace.data(), ctx_);
      else variant.backward(tensors.backward_args(), workspace.data(), ctx_);
    };
    print(shape, variant.name, pass, measure(work, command_.runs, ctx_));
  }

  static std::string describe(const BenchShape& shape) {
    return concat_text("B", shape.B, " H", shape.Hq, " Hkv", shape.Hkv, " N", shape.S, " D", shape.D,
                       shape.is_causal ? " causal" : " full");
  }

  void print_head() const {
    std::cout << dtype_ << " on " << ctx_.device;
    if (ctx_.device.is_cpu()) std::cout << ", " << num_threads() << " threads";
    if (ctx_.deterministic) std::cout << ", deterministic";
    std::printf("; matrix products reach %.4g TFLOP/s\n", ceiling_ / 1e12);
    std::cout << "FLOP: 4 B H N N D forward, 2.5 times that backward, half of both when causal. Bytes: every tensor read or written once.\n"
                 "Caches are cold. ms is the median, the spread its quartiles; * is timed inside a CUDA graph.\n";
    std::printf("%-7s %-4s %3s %3s %3s %6s %4s %-6s %10s  %-19s %9s %7s %9s %7s\n", "kernel", "pass", "B", "H", "Hkv", "N", "D",
                "mask", "ms", "spread", "TFLOP/s", "of GEMM", "MB", "GB/s");
    std::fflush(stdout);
  }

  void print(const BenchShape& s, std::string_view variant, AttentionPass pass, const Timing& timing) {
    const double rate = s.flop(pass) / timing.median, nbytes = s.nbytes(pass, dtype_);
    const auto number = [](std::int64_t value) { return static_cast<long long>(value); };
    std::printf("%-7s %-4s %3lld %3lld %3lld %6lld %4lld %-6s %10.4f%s %8.4f - %8.4f %9.4g %6.1f%% %9.1f %7.1f\n",
                std::string(variant).c_str(), std::string(pass_name(pass)).c_str(), number(s.B), number(s.Hq), number(s.Hkv),
                number(s.S), number(s.D), s.is_causal ? "causal" : "full", 1e3 * timing.median, timing.in_graph ? "*" : " ",
                1e3 * timing.low, 1e3 * timing.high, rate / 1e12, 100 * rate / ceiling_, nbytes / 1e6, nbytes / timing.median / 1e9);
    std::fflush(stdout);
    results_.push_back({{"kernel", variant}, {"pass", pass_name(pass)}, {"batch", s.B}, {"heads", s.Hq}, {"kv_heads", s.Hkv},
                        {"seq", s.S}, {"head_dim", s.D}, {"causal", s.is_causal}, {"median_ms", 1e3 * timing.median},
                        {"low_ms", 1e3 * timing.low}, {"high_ms", 1e3 * timing.high}, {"runs", timing.runs},
                        {"in_graph", timing.in_graph}, {"tflops", rate / 1e12}, {"nbytes", nbytes}});
  }

  void write_json() const {
    const nlohmann::json document = {{"dtype", dtype_name(dtype_)}, {"device", concat_text(ctx_.device)}, {"threads", num_threads()},
                                     {"deterministic", ctx_.deterministic}, {"gemm_tflops", ceiling_ / 1e12}, {"results", results_},
                                     {"skipped", skipped_}, {"wrong", faults_}};
    nn::write_file(command_.json, document.dump(1) + "\n");
  }

  const BenchCommand& command_;
  DType dtype_;
  ExecContext& ctx_;
  RandomTable random_;
  double ceiling_;
  nlohmann::json results_ = nlohmann::json::array();
  std::map<std::string, int> skipped_;
  std::vector<std::string> faults_;
};

int run_bench(const BenchCommand& command) {
  std::string names = "all";
  bool is_known = command.kernel == names;
  for (const AttentionVariant& variant : attention_variants()) {
    names += concat_text(", ", variant.name);
    is_known = is_known || command.kernel == variant.name;
  }
  if (!is_known) throw ConfigError(concat_text("bench-attention: there is no kernel '", command.kernel, "'; choose one of ", names));
  AttentionBench(command, dtype_from_name(command.dtype), choose_device(command.device)).run();
  return 0;
}

}  // namespace

void add_bench_attention_command(CLI::App& app, int& exit_code) {
  CLI::App* sub = app.add_subcommand("bench-attention", "Time the attention kernels alone, after checking them");
  const auto command = std::make_shared<BenchCommand>();
  const auto size = [&](const char* name, std::int64_t& value, const char* what) {
    return sub->add_option(name, value, what)->check(integer_in(1, nn::kMaxCount));
  };
  const auto choice = [&](const char* name, std::string& value, const char* what, const std::vector<std::string>& values) {
    return sub->add_option(name, value, what)->check(CLI::IsMember(values));
  };
  size("--batch", command->batch, "B")->capture_default_str();
  size("--heads", command->heads, "Query heads")->capture_default_str();
  size("--kv-heads", command->kv_heads, "Key and value heads; as many as query heads if not given");
  size("--seq", command->seq, "Queries, and keys")->capture_default_str();
  size("--head-dim", command->head_dim, "D")->capture_default_str();
  sub->add_flag("--causal", command->is_causal, "A query sees no later key");
  sub->add_flag("--deterministic", command->is_deterministic, "Kernels that give the same bits in every run: another backward");
  choice("--preset", command->preset, "Instead of one shape: articles (B4 H8 D64, N 512 to 4096), long (16384 tokens), bar (35 shapes)",
         {"articles", "long", "bar"});
  choice("--dtype", command->dtype, "Type of q, k, v", {"bfloat16", "float16", "float32", "float64"})->capture_default_str();
  sub->add_option("--kernel", command->kernel, "all, or the name of a variant")->capture_default_str();
  choice("--pass", command->pass, "What to time", {"fwd", "bwd", "both"})->capture_default_str();
  add_device_option(*sub, command->device);
  sub->add_option("--runs", command->runs, "Timed calls; 10 to 50 by their length if not given")->check(integer_in(1, nn::kMaxCount));
  sub->add_option("--ceiling", command->ceiling, "TFLOP/s of matrix products; measured if not given")->check(number_in(nn::above(0)));
  sub->add_option("--json", command->json, "Write the results to this file too")->check(writable_file());
  sub->footer("Example: heddle bench-attention --preset bar --json bar.json\n"
              "         heddle bench-attention --device cpu --dtype float32 --batch 1 --seq 1024 --causal --pass fwd\n"
              "A kernel whose results differ from the CPU's is not timed, and the exit code is 1.");
  sub->callback([command, &exit_code] { exit_code = run_bench(*command); });
}

}  // namespace heddle::examples
