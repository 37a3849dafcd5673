#include "autograd/ops.h"
#include "nn/gradcheck_suite.h"

namespace heddle::nn {
namespace {

using Inputs = std::vector<Tensor>;
using Function = std::function<Tensor(const Inputs&)>;

// How the elements of an input lie in memory.
enum class Layout {
  dense,
  transposed,  // the last two dimensions swapped; of four, the middle two, as heads and positions are
  sliced,      // a block inside a larger buffer
  repeated,    // the first dimension larger than 1 repeats one element with stride 0
};

constexpr std::pair<Layout, const char*> kLayouts[] = {
    {Layout::dense, "dense"}, {Layout::transposed, "transposed"}, {Layout::sliced, "sliced"}, {Layout::repeated, "repeated"}};

enum class Values { normal, positive };  // positive: at least 0.5

struct OpCase {
  const char* name;
  const char* node;
  std::vector<Shape> shapes;
  Function fn;
  Values values = Values::normal;
  double step = 1e-6;
};

Tensor random_values(const Shape& shape, Values values, Generator& generator) {
  const Tensor x = normal(shape, 0.0, 1.0, generator, DType::f64);
  return values == Values::positive ? add_scalar(mul(x, x), 0.5) : x;
}

// The dimension a repeated input repeats, or -1.
int repeated_dim(const Shape& shape) {
  for (int d = 0; d < shape.rank(); ++d)
    if (shape[d] > 1) return d;
  return -1;
}

// A leaf of this shape (with size 1 along its repeated dimension) in this layout.
Tensor make_leaf(Shape shape, Layout layout, Values values, Generator& generator) {
  if (layout == Layout::repeated && repeated_dim(shape) >= 0) shape[repeated_dim(shape)] = 1;
  Tensor x = random_values(shape, values, generator);
  if (layout == Layout::transposed && shape.rank() >= 2) {
    const int first = shape.rank() == 4 ? 1 : shape.rank() - 2;
    x = transpose(contiguous(transpose(x, first, first + 1)), first, first + 1);
  } else if (layout == Layout::sliced) {
    Shape wide = shape;
    for (int d = 0; d < shape.rank(); ++d) wide[d] += 2;
    Tensor block = Tensor::zeros(wide, DType::f64);
    for (int d = 0; d < shape.rank(); ++d) block = slice(block, d, 1, 1 + shape[d]);
    x = block.copy_(x);
  }
  return x.alias(x.shape(), x.strides(), x.storage_offset()).set_requires_grad(true);
}

GradcheckResult run_case(const OpCase& op, Layout layout) {
  Generator generator{.seed = 11};
  Inputs leaves;
  for (const Shape& shape : op.shapes) leaves.push_back(make_leaf(shape, layout, op.values, generator));
  const auto fn = [&](const Inputs& inputs) {
    Inputs full;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      full.push_back(layout == Layout::repeated ? expand(inputs[i], op.shapes[i]) : inputs[i]);
    return op.fn(full);
  };
  return gradcheck(fn, leaves, {.step = op.step});
}

void add_cases(std::vector<GradcheckCase>& cases, const std::vector<OpCase>& ops) {
  for (const OpCase& op : ops)
    for (const auto& [layout, layout_name] : kLayouts) {
      std::string inputs;
      for (const Shape& shape : op.shapes) inputs += concat_text(inputs.empty() ? "" : " ", shape);
      cases.push_back({op.name, op.node, concat_text(inputs, ", ", layout_name),
                       [op, layout = layout] { return run_case(op, layout); }});
    }
}

std::vector<OpCase> elementwise_ops() {
  const auto unary = [](const char* name, Tensor (*op)(const Tensor&), Values values = Values::normal) {
    return OpCase{name, "UnaryNode", {{3, 5}}, [op](const Inputs& in) { return op(in[0]); }, values};
  };
  const auto binary = [](const char* name, Tensor (*op)(const Tensor&, const Tensor&), const Shape& a, const Shape& b) {
    return OpCase{name, "BinaryNode", {a, b}, [op](const Inputs& in) { return op(in[0], in[1]); }, Values::positive};
  };
  const Tensor condition = Tensor::from_vector<bool>({true, false, true, false, false}, {5});
  return {
      unary("neg", neg),
      {"scale", "UnaryNode", {{3, 5}}, [](const Inputs& in) { return scale(in[0], -1.5); }},
      {"add_scalar", "UnaryNode", {{3, 5}}, [](const Inputs& in) { return add_scalar(in[0], 0.3); }},
      {"pow", "UnaryNode", {{3, 5}}, [](const Inputs& in) { return pow(in[0], 3.0); }},
      {"pow", "UnaryNode", {{3, 5}}, [](const Inputs& in) { return pow(in[0], -0.5); }, Values::positive},
      unary("exp", exp),
      unary("log", log, Values::positive),
      unary("sqrt", sqrt, Values::positive),
      unary("relu", relu),
      unary("gelu", gelu),
      unary("gelu_tanh", gelu_tanh),
      unary("silu", silu),
      binary("add", add, {2, 3, 4}, {3, 1}),
      binary("sub", sub, {2, 1, 4}, {3, 4}),
      binary("mul", mul, {3, 5}, {3, 5}),
      binary("mul", mul, {2, 3, 4}, {}),
      binary("div", div, {3, 5}, {3, 5}),
      binary("div", div, {4}, {2, 3, 1}),
      {"mul", "BinaryNode", {{3, 5}}, [](const Inputs& in) { return mul(in[0], in[0]); }},
      {"swiglu", "SwigluNode", {{3, 5}, {3, 5}}, [](const Inputs& in) { return swiglu(in[0], in[1]); }},
      {"where", "WhereNode", {{3, 5}, {3, 1}}, [=](const Inputs& in) { return where(condition, in[0], in[1]); }},
      {"masked_fill", "WhereNode", {{3, 5}}, [=](const Inputs& in) { return masked_fill(in[0], condition, -2.0); }},
      // Linear, so that a step far above float32's rounding has no truncation error.
      {"cast", "CastNode", {{3, 5}}, [](const Inputs& in) { return cast(cast(in[0], DType::f32), DType::f64); }, Values::normal, 0.5},
      {"dropout", "DropoutNode", {{4, 5}}, [](const Inputs& in) {
         Generator generator{.seed = 3};  // the same mask at every call
         return dropout(in[0], 0.4, generator);
       }},
  };
}

std::vector<OpCase> shape_ops() {
  return {
      {"transpose", "PermuteNode", {{3, 4}}, [](const Inputs& in) { return transpose(in[0], 0, 1); }},
      {"permute", "PermuteNode", {{2, 3, 4}}, [](const Inputs& in) { return permute(in[0], {2, 0, 1}); }},
      {"slice", "SliceNode", {{3, 4}}, [](const Inputs& in) { return slice(in[0], 1, 1, 3); }},
      {"select_index", "SliceNode", {{3, 4}}, [](const Inputs& in) { return select_index(in[0], 0, 2); }},
      {"reshape", "ReshapeNode", {{3, 4}}, [](const Inputs& in) { return reshape(in[0], {2, 6}); }},
      {"unsqueeze", "ReshapeNode", {{3, 4}}, [](const Inputs& in) { return unsqueeze(in[0], 1); }},
      {"squeeze", "ReshapeNode", {{3, 1, 4}}, [](const Inputs& in) { return squeeze(in[0], 1); }},
      {"contiguous", "ReshapeNode", {{3, 4}}, [](const Inputs& in) { return contiguous(in[0]); }},
      {"expand", "ExpandNode", {{3, 1, 2}}, [](const Inputs& in) { return expand(in[0], {2, 3, 4, 2}); }},
      {"concat", "ConcatNode", {{2, 3}, {2, 1}, {2, 2}}, [](const Inputs& in) { return concat(in, 1); }},
      {"split", "SplitNode", {{3, 5}}, [](const Inputs& in) {
         const std::vector<Tensor> pieces = split(in[0], {1, 2, 2}, 1);
         return mul(pieces[1], exp(pieces[2]));  // the first piece receives no gradient
       }},
      {"sum", "SumNode", {{2, 3, 4}}, [](const Inputs& in) { return sum(in[0]); }},
      {"sum", "SumNode", {{2, 3, 4}}, [](const Inputs& in) { return sum(in[0], {0, -1}); }},
      {"mean", "SumNode", {{2, 3, 4}}, [](const Inputs& in) { return mean(in[0], {1}, /*keepdim=*/true); }},
      {"max", "MaxNode", {{3, 4}}, [](const Inputs& in) { return max(in[0], 1); }},
      {"max", "MaxNode", {{2, 4, 3}}, [](const Inputs& in) { return max(in[0], 1, /*keepdim=*/true); }},
  };
}

std::vector<OpCase> layer_ops() {
  const Tensor ids = Tensor::from_vector<std::int64_t>({4, 0, 4, 2, 4, 1}, {2, 3});
  const Tensor positions = Tensor::from_vector<std::int64_t>({0, 1, 2, 7, 30}, {5});
  const Tensor labels = Tensor::from_vector<std::int64_t>({6, 0, -100, 3, 3, 1}, {2, 3});
  return {
      {"matmul", "MatmulNode", {{3, 4}, {4, 5}}, [](const Inputs& in) { return matmul(in[0], in[1]); }},
      {"matmul", "MatmulNode", {{2, 3, 4}, {4, 5}}, [](const Inputs& in) { return matmul(in[0], in[1]); }},
      {"matmul", "MatmulNode", {{2, 1, 3, 4}, {3, 4, 2}}, [](const Inputs& in) { return matmul(in[0], in[1]); }},
      {"linear", "LinearNode", {{2, 3, 4}, {5, 4}}, [](const Inputs& in) { return linear(in[0], in[1]); }},
      {"linear", "LinearNode", {{2, 3, 4}, {5, 4}, {5}}, [](const Inputs& in) { return linear(in[0], in[1], in[2]); }},
      {"softmax", "SoftmaxNode", {{2, 3, 5}}, [](const Inputs& in) { return softmax(in[0]); }},
      {"softmax", "SoftmaxNode", {{2, 5, 3}}, [](const Inputs& in) { return softmax(in[0], 1); }},
      {"log_softmax", "SoftmaxNode", {{2, 3, 5}}, [](const Inputs& in) { return log_softmax(in[0]); }},
      {"linears", "LinearsNode", {{2, 3, 4}, {5, 4}, {6, 4}, {5}, {6}},
       [](const Inputs& in) { return concat(linears(in[0], {in[1], in[2]}, {in[3], in[4]}), 2); }},
      {"gelu_mlp", "GeluMlpNode", {{2, 3, 4}, {5, 4}, {5}, {6, 5}, {6}},
       [](const Inputs& in) { return gelu_mlp(in[0], in[1], in[2], in[3], in[4]); }},
      {"gelu_mlp_without_bias", "GeluMlpNode", {{3, 4}, {5, 4}, {2, 5}},
       [](const Inputs& in) { return gelu_mlp(in[0], in[1], {}, in[2], {}); }},
      {"add_low_rank", "AddLowRankNode", {{2, 3, 4}, {2, 3, 5}, {2, 3, 6}, {2, 4}, {5, 2}, {3, 4}, {6, 3}},
       [](const Inputs& in) { return concat(add_low_rank({in[1], in[2]}, in[0], {{in[3], in[4], 0.7}, {in[5], in[6], -1.3}}), 2); }},
      {"add_low_rank with one A", "AddLowRankNode", {{3, 4}, {3, 5}, {3, 6}, {2, 4}, {5, 2}, {6, 2}},
       [](const Inputs& in) { return concat(add_low_rank({in[1], in[2]}, in[0], {{in[3], in[4], 0.7}, {in[3], in[5], 0.7}}), 1); }},
      {"layer_norm", "NormNode", {{2, 3, 5}}, [](const Inputs& in) { return layer_norm(in[0], {}, {}, 1e-5); }},
      {"layer_norm", "NormNode", {{2, 3, 5}, {5}, {5}}, [](const Inputs& in) { return layer_norm(in[0], in[1], in[2], 1e-5); }},
      {"rms_norm", "NormNode", {{2, 3, 5}}, [](const Inputs& in) { return rms_norm(in[0], {}, 1e-6); }},
      {"rms_norm", "NormNode", {{2, 3, 5}, {5}}, [](const Inputs& in) { return rms_norm(in[0], in[1], 1e-6); }},
      {"add_layer_norm", "NormNode", {{2, 3, 5}, {2, 3, 5}, {5}, {5}},
       [](const Inputs& in) {
         const auto [sum, y] = add_layer_norm(in[0], in[1], in[2], in[3], 1e-5);
         return concat({sum, y}, 0);
       }},
      {"add_rms_norm", "NormNode", {{2, 3, 5}, {2, 3, 5}, {5}}, [](const Inputs& in) { return add_rms_norm(in[0], in[1], in[2], 1e-6).y; }},
      {"embedding", "EmbeddingNode", {{6, 3}}, [=](const Inputs& in) { return embedding(in[0], ids); }},
      {"embedding", "EmbeddingNode", {{6, 3}}, [=](const Inputs& in) {
         // Rows of the padding id are masked out: they have values but no gradient.
         const Tensor rows = embedding(in[0], ids, /*padding_idx=*/4);
         return where(Tensor::from_vector<bool>({false, true, false, true, false, true}, {2, 3, 1}), rows, Tensor::scalar(0.0, DType::f64));
       }},
      {"rope", "RopeNode", {{2, 5, 3, 8}}, [=](const Inputs& in) { return rope(in[0], positions); }},
      {"cross_entropy", "CrossEntropyNode", {{2, 3, 7}}, [=](const Inputs& in) { return cross_entropy(in[0], labels); }},
      {"cross_entropy", "CrossEntropyNode", {{2, 3, 7}}, [=](const Inputs& in) {
         return cross_entropy(in[0], ids, {.reduction = LossReduction::sum, .ignore_index = 4});
       }},
  };
}

// q, k, v of 6 query and 2 key heads (or as given), with lengths that no tile divides.
std::vector<OpCase> attention_ops() {
  const std::vector<Shape> grouped = {{2, 5, 6, 8}, {2, 7, 2, 8}, {2, 7, 2, 8}};
  const auto attend = [](const AttentionOptions& options) {
    return [options](const Inputs& in) { return attention(in[0], in[1], in[2], options); };
  };
  return {
      {"attention", "AttentionNode", grouped, attend({})},
      {"attention causal", "AttentionNode", grouped, attend({.is_causal = true, .scale = 0.5})},
      // The first 3 queries see no key.
      {"attention causal", "AttentionNode", {{1, 6, 2, 4}, {1, 3, 2, 4}, {1, 3, 2, 4}}, attend({.is_causal = true})},
      // Sequences of 3 queries on 2 keys, none on 3, 2 on 4, and rows of nobody.
      {"attention of sequences", "AttentionNode", {{1, 7, 4, 4}, {1, 10, 2, 4}, {1, 10, 2, 4}},
       attend({.is_causal = true, .cu_seqlens_q = Tensor::from_vector<std::int32_t>({0, 3, 3, 5}, {4}),
               .cu_seqlens_k = Tensor::from_vector<std::int32_t>({0, 2, 5, 9}, {4}), .max_seqlen_q = 3, .max_seqlen_k = 4})},
      {"attention_with_lse", "AttentionNode", grouped, [](const Inputs& in) {
         const AttentionResult result = attention_with_lse(in[0], in[1], in[2], {.is_causal = true});
         return concat({reshape(result.out, {-1}), reshape(result.lse, {-1})}, 0);
       }},
      {"attention_with_lse", "AttentionNode", grouped, [](const Inputs& in) { return attention_with_lse(in[0], in[1], in[2]).lse; }},
  };
}

}  // namespace

std::vector<GradcheckCase> op_gradcheck_cases() {
  std::vector<GradcheckCase> cases;
  for (const auto& ops : {elementwise_ops(), shape_ops(), layer_ops(), attention_ops()}) add_cases(cases, ops);
  return cases;
}

}  // namespace heddle::nn
