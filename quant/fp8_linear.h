#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/quantize/fp8.h"
#include "nn/linear.h"

namespace heddle::quant {

// A matrix [R, C] and its transpose as FP8 codes (Note: FP8 training, kernels/quantize/fp8.h).
struct Fp8Matrix {
  QuantFormat format;
  Tensor codes;   // uint8 [R, C]
  Tensor turned;  // uint8 [C, fp8_padded(R)]
  Tensor scale;   // float32 [1]
};

// Linear layers that share an input, their weights trained: forward and both gradients are products in FP8, sums, results and gradients
// of weights as everywhere. x and weights are rounded to E4M3, gradients of results to E5M2. x is quantised once for all of them, weights
// once for each version of theirs, and those that lie one after another in memory are one matrix (Note: Joined tensors,
// autograd/ops/joined.h). The scale of a weight comes from its own largest magnitude; those of x and of gradients too, or with delayed
// scaling from the last `history` steps (Note: Delayed scaling, kernels/quantize/fp8.h). A pass is of a new step when weights have
// changed since the last one. Passes without gradients scale by their own x and leave the history as it is.
class Fp8Projections final : public std::enable_shared_from_this<Fp8Projections> {
 public:
  // weights [out, in] bfloat16 on a device with FP8 products, sizes multiples of 16; biases [out] bfloat16 or undefined, all or none;
  // `history` 0 is current scaling.
  Fp8Projections(std::vector<Tensor> weights, std::vector<Tensor> biases, std::int64_t history);

  // x [..., in] bfloat16 -> [..., out] of every layer. Differentiable in x, weights and biases.
  std::vector<Tensor> forward(const Tensor& x);

  const std::vector<Tensor>& weights() const { return weights_; }
  const std::vector<Tensor>& biases() const { return biases_; }
  // Float32 [1 + matrices, 1 + history]: of x, and of the gradient of each matrix's results. Undefined with current scaling.
  const Tensor& history() const { return history_; }

 private:
  friend struct Fp8ProjectionsNode;

  // Layers whose weights are one matrix.
  struct Part {
    std::size_t first, count;
    Tensor weight, bias;  // joined
    Fp8Matrix codes = {};
    std::optional<std::uint64_t> version = {};  // of the weight that the codes are of
  };
  // Columns [start, start + size) of a matrix.
  struct Piece {
    Tensor values;  // [R, size]
    std::int64_t start = 0;
  };

  void begin_step();
  void refresh(Part& part) const;
  // Writes `out` from its pieces. `row` of the history is what it is scaled by, or with -1 its own largest magnitude.
  void quantize(const Fp8Matrix& out, const std::vector<Piece>& pieces, int row) const;
  Tensor history_element(int row, std::int64_t column) const;

  std::vector<Tensor> weights_, biases_;
  std::vector<Part> parts_;
  Tensor history_;
  std::optional<std::uint64_t> step_version_;  // of the first weight in the last step
  std::int64_t steps_ = 0;                     // begun in this process
};

// One of such layers. Parameters: weight and bias; the first of them has the history as its state.
class Fp8Linear final : public nn::LinearBase {
 public:
  Fp8Linear(std::shared_ptr<Fp8Projections> projections, std::size_t index);

  // Computes the results of all layers that share the input; forward_together() returns them.
  Tensor forward(const Tensor& x, Generator* dropout = nullptr) const override;
  std::vector<Tensor> forward_together(const std::vector<const LinearBase*>& layers, const Tensor& x, Generator* dropout) const override;
  std::int64_t in_features() const override { return weight().size(1); }
  std::int64_t out_features() const override { return weight().size(0); }
  Tensor dense_weight() const override { return weight().detach(); }
  const Tensor& bias() const override { return projections_->biases()[index_]; }

 private:
  const Tensor& weight() const { return projections_->weights()[index_]; }

  std::shared_ptr<Fp8Projections> projections_;
  std::size_t index_;
};

}  // namespace heddle::quant
