#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "autograd/random.h"
#include "autograd/tensor.h"

// Every public operation. Unless a comment says otherwise: inputs share one floating dtype and one device, may have any
// strides, and the result is new, dense and of the same dtype; each op is differentiable in its floating inputs; errors
// are heddle::Error and name the op. Broadcasting is NumPy's rule; there is no type promotion.

namespace heddle {

// --- Views: the result shares storage with the input; a dimension may be counted from the end, -1 being the last ---
// Swaps two dimensions.
Tensor transpose(const Tensor& x, int dim0, int dim1);
// Dimension d of the result is dimension dims[d] of x; every dimension once.
Tensor permute(const Tensor& x, const std::vector<int>& dims);
// Elements [start, end) of one dimension; 0 <= start <= end <= size.
Tensor slice(const Tensor& x, int dim, std::int64_t start, std::int64_t end);
// Element `index` of one dimension, which disappears.
Tensor select_index(const Tensor& x, int dim, std::int64_t index);
// Same elements in row-major order under another shape; one size may be -1. A view where strides allow, else a copy.
Tensor reshape(const Tensor& x, const Shape& shape);
// Repeats dimensions of size 1, and adds leading ones, with stride 0.
Tensor expand(const Tensor& x, const Shape& shape);
// A dimension of size 1 before dimension `dim`; dim may be the rank.
Tensor unsqueeze(const Tensor& x, int dim);
Tensor squeeze(const Tensor& x, int dim);  // the dimension must have size 1
Tensor contiguous(const Tensor& x);        // x itself if it is dense
// Pieces along a dimension, as views; sizes must add up to that dimension.
std::vector<Tensor> split(const Tensor& x, const std::vector<std::int64_t>& sizes, int dim);

// --- Copies ---
// Joins along a dimension; other sizes, dtype and device must agree. At least one tensor.
Tensor concat(const std::vector<Tensor>& tensors, int dim);

// --- Elementwise, broadcasting; values outside a function's domain give NaN or infinity as IEEE 754 has it ---
// a + b, a - b, a * b, a / b, -x, factor * x and x + value.
Tensor add(const Tensor& a, const Tensor& b);
Tensor sub(const Tensor& a, const Tensor& b);
Tensor mul(const Tensor& a, const Tensor& b);
Tensor div(const Tensor& a, const Tensor& b);
Tensor neg(const Tensor& x);
Tensor scale(const Tensor& x, double factor);
Tensor add_scalar(const Tensor& x, double value);
// x^exponent, e^x, the natural logarithm and the square root.
Tensor pow(const Tensor& x, double exponent);
Tensor exp(const Tensor& x);
Tensor log(const Tensor& x);
Tensor sqrt(const Tensor& x);
Tensor relu(const Tensor& x);       // gradient 0 at 0
Tensor gelu(const Tensor& x);       // exact: x * Phi(x). Hendrycks and Gimpel 2016
Tensor gelu_tanh(const Tensor& x);  // the tanh approximation of the same paper, as in GPT-2
Tensor silu(const Tensor& x);       // x * sigmoid(x)
// silu(gate) * up, of equal shapes. Shazeer 2020.
Tensor swiglu(const Tensor& gate, const Tensor& up);
// condition ? a : b, all broadcast together. condition is bool. Gradients are selected, not multiplied: NaN in the
// branch not taken stays there.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
// x with `value` wherever mask (bool, broadcast to x) is true.
Tensor masked_fill(const Tensor& x, const Tensor& mask, double value);
// Another dtype; the gradient is cast back. Any pair of dtypes; differentiable between floating ones.
Tensor cast(const Tensor& x, DType dtype);
// Zeroes each element with probability p and scales the rest by 1/(1-p); x itself when p is 0. 0 <= p < 1. The mask is a
// function of the generator's seed and position only, and the call advances the generator.
Tensor dropout(const Tensor& x, double p, Generator& generator);

// --- Reductions over the given dimensions (all of them when empty); keepdim leaves size 1 ---
Tensor sum(const Tensor& x, const std::vector<int>& dims = {}, bool keepdim = false);
Tensor mean(const Tensor& x, const std::vector<int>& dims = {}, bool keepdim = false);  // no elements: error
// Largest value along one dimension (size >= 1). NaN wins. The gradient goes to the first of equal maxima.
Tensor max(const Tensor& x, int dim, bool keepdim = false);
// The sum of x down to a shape that broadcasts to x's: the gradient of broadcasting. Not differentiable.
Tensor sum_to(const Tensor& x, const Shape& shape);

// --- Matrix products ---
// a [..., M, K] x b [..., K, N] -> [..., M, N]; batch dimensions broadcast.
Tensor matmul(const Tensor& a, const Tensor& b);
// x [..., in] x weight^T [out, in] + bias [out] -> [..., out]; bias may be undefined. Weight and bias gradients are added
// straight into the leaves' buffers.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});
// linear(x, weights[i], biases[i]) for every i: projections of one input. Weights that lie one after another in memory, and biases too,
// make one product, whose columns the results are.
std::vector<Tensor> linears(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases);
// ys[i] + scale (x a^T) b^T for every i, b a never being formed: low-rank terms beside projections of one input (Hu et al. 2021).
// x [..., in]; a [r, in], b [out, r] -> [..., out]. Where a is undefined the result is ys[i] itself. Terms may share their a. A that
// lie one after another in memory are one product. The results take the memory of `ys` where nobody else holds it.
struct LowRank {
  Tensor a;
  Tensor b;
  double scale = 1;
};
std::vector<Tensor> add_low_rank(std::vector<Tensor> ys, const Tensor& x, const std::vector<LowRank>& terms);
// gelu_tanh(x up^T + up_bias) down^T + down_bias, x [..., in], up [inner, in], down [out, inner] -> [..., out]; biases may be
// undefined. On CUDA in bfloat16 and float16 the GELU and its gradient are part of the products.
Tensor gelu_mlp(const Tensor& x, const Tensor& up, const Tensor& up_bias, const Tensor& down, const Tensor& down_bias);

// --- Normalisation and softmax, over the last dimension N >= 1 (softmax: any dimension) ---
// y = exp(x - max) / sum(exp(x - max)). A slice that is -inf throughout gives 0.
Tensor softmax(const Tensor& x, int dim = -1);
// y = x - max - log(sum(exp(x - max))); -inf throughout gives -inf.
Tensor log_softmax(const Tensor& x, int dim = -1);
// y = (x - mean) / sqrt(var + eps) * weight + bias, biased variance. x [..., N]; weight, bias [N], either may be
// undefined. eps > 0. Statistics in float32 (float64 for float64). Ba, Kiros and Hinton 2016.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps);
// y = x / sqrt(mean(x^2) + eps) * weight. x [..., N]; weight [N], may be undefined. eps > 0. Zhang and Sennrich 2019, equation 4.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
// sum = x + residual, of equal shapes, and y the norm of sum: one pass over memory forward, and one backward.
struct AddNormResult {
  Tensor sum;
  Tensor y;
};
AddNormResult add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias, double eps);
AddNormResult add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps);

// --- Transformer ---
// Rows of weight [V, C] at ids (int64 or int32, any shape) -> [ids..., C]. An id outside [0, V) is an error that names it
// and its position. Row padding_idx (>= 0) receives no gradient. Not differentiable in ids.
Tensor embedding(const Tensor& weight, const Tensor& ids, std::int64_t padding_idx = -1);
// Rotary position embedding, half-rotation form: x [B, S, H, D], D even; the pair (x[i], x[i + D/2]) at position p turns
// by p * theta^(-2i/D). positions: int64 [S]. Su et al. 2021.
Tensor rope(const Tensor& x, const Tensor& positions, double theta = 10000.0);

struct AttentionOptions {
  bool is_causal = false;
  std::optional<double> scale = {};  // of the scores, > 0; 1/sqrt(D) when absent
  std::string kernel = "auto";  // or the name of an attention variant, used or refused with its reason
  // Sequences of different lengths end to end in a batch of 1: sequence i has the query rows [cu_seqlens_q[i],
  // cu_seqlens_q[i + 1]) and the keys alike. int32 [n + 1], both or none; rows past the last sequence give 0.
  Tensor cu_seqlens_q = {};
  Tensor cu_seqlens_k = {};
  std::int64_t max_seqlen_q = 0;  // with cu_seqlens: no sequence is longer
  std::int64_t max_seqlen_k = 0;
};
// softmax(scale * q k^T) v by tiles. q [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D]; Hq a multiple of Hkv (query head h reads key
// head h / (Hq/Hkv)); D in 1..256 with unit stride, other strides free -> [B, Sq, Hq, D]. Causal is bottom-right
// aligned: query i sees keys j <= i + Sk - Sq. A query that sees no key gives 0 and zero gradients. Dao 2023.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options = {});
struct AttentionResult {
  Tensor out;  // [B, Sq, Hq, D]
  Tensor lse;  // [B, Hq, Sq] natural log of the sum of exp(scale q k), float32 (float64 for float64); differentiable
};
// The same, and the log-sum-exp of each query's scaled scores; -inf for a query that sees no key.
AttentionResult attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options = {});

enum class LossReduction { mean, sum };
struct CrossEntropyOptions {
  LossReduction reduction = LossReduction::mean;  // over the labels that are not ignored
  std::int64_t ignore_index = -100;
};
// -log softmax(logits)[label], fused: no second logits-sized buffer in the forward. logits [..., V]; labels int64 [...].
// Returns a scalar, float32 (float64 for float64 logits). All labels ignored: 0 with zero gradients. A label outside
// [0, V) other than ignore_index is an error that names it and its position.
Tensor cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropyOptions& options = {});

}  // namespace heddle
