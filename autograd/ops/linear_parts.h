#pragma once

#include "autograd/node.h"

// What linear and the ops that hold linear layers are made of. Nothing here is recorded.

namespace heddle {

// [..., C] as [rows, C].
Tensor as_rows(const Tensor& x);

// x [rows, in] weight^T [out, in] + bias -> [rows, out]; bias may be undefined.
Tensor linear_rows(const Tensor& x, const Tensor& weight, const Tensor& bias);

// Throws unless x [..., in], weight [out, in] and bias [out] fit each other.
void check_linear(const char* op, const Tensor& x, const Tensor& weight, const Tensor& bias);

// dx = dout weight, or so_far += dout weight where that is defined; x_shape is [..., in], dout [rows, out].
Tensor linear_input_gradient(Tensor so_far, const Tensor& dout, const Tensor& weight, const Shape& x_shape);

// dweight = scale dout^T x and dbias = the sum of dout's rows, written where `edge` leads: x [rows, in], dout [rows, out]. Each returns
// what a node's backward is to return for that input; undefined without an edge.
Tensor linear_weight_gradient(const Edge& edge, const Tensor& x, const Tensor& dout, double scale = 1);
Tensor linear_bias_gradient(const Edge& edge, const Tensor& dout);

}  // namespace heddle
