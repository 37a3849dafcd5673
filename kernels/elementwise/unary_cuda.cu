#include <numbers>

#include "kernels/elementwise/elementwise_backends.h"
#include "kernels/elementwise/map.cuh"

namespace heddle::cuda {
namespace {

// tanh's argument in gelu_tanh is kGeluScale * (x + kGeluCubic * x^3).
constexpr double kGeluScale = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;
constexpr double kGeluCubic = 0.044715;

template <typename A>
__device__ A gelu_tanh_inner(A x) {
  return tanh(A(kGeluScale) * (x + A(kGeluCubic) * x * x * x));
}

template <typename A>
__device__ A gelu_derivative(A x) {
  const A density = A(std::numbers::inv_sqrtpi / std::numbers::sqrt2);
  return normcdf(x) + x * density * exp(A(-0.5) * x * x);
}

template <typename A>
__device__ A gelu_tanh_derivative(A x) {
  const A t = gelu_tanh_inner(x);
  const A inner_slope = A(kGeluScale) * (A(1) + A(3 * kGeluCubic) * x * x);
  return A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * inner_slope;
}

template <typename A>
__device__ A silu_derivative(A x) {
  const A s = sigmoid(x);
  return s * (A(1) + x * (A(1) - s));
}

// The op is a run-time argument: its branch is the same for a whole grid, and memory sets the time.
template <typename A>
struct Unary {
  UnaryOp op;
  A parameter;

  __device__ A value(A x) const {
    switch (op) {
      case UnaryOp::neg: return -x;
      case UnaryOp::scale: return parameter * x;
      case UnaryOp::add_scalar: return x + parameter;
      case UnaryOp::pow: return pow(x, parameter);
      case UnaryOp::exp: return exp(x);
      case UnaryOp::log: return log(x);
      case UnaryOp::sqrt: return sqrt(x);
      case UnaryOp::relu: return x < A(0) ? A(0) : x;  // NaN stays NaN
      case UnaryOp::gelu: return x * normcdf(x);
      case UnaryOp::gelu_tanh: return A(0.5) * x * (A(1) + gelu_tanh_inner(x));
      case UnaryOp::silu: return x * sigmoid(x);
    }
    return x;
  }
  __device__ void operator()(const A (&in)[1], A (&out)[1]) const { out[0] = value(in[0]); }
};

template <typename A>
struct UnaryBackward {
  UnaryOp op;
  A parameter;

  __device__ A value(A x, A dout) const {
    switch (op) {
      case UnaryOp::neg: return -dout;
      case UnaryOp::scale: return parameter * dout;
      case UnaryOp::add_scalar: return dout;
      case UnaryOp::pow: return parameter == A(0) ? A(0) : dout * parameter * pow(x, parameter - A(1));  // 0 * 0^-1 would be NaN
      case UnaryOp::exp: return dout * x;
      case UnaryOp::log: return dout / x;
      case UnaryOp::sqrt: return A(0.5) * dout / x;
      case UnaryOp::relu: return x > A(0) ? dout : A(0);
      case UnaryOp::gelu: return dout * gelu_derivative(x);
      case UnaryOp::gelu_tanh: return dout * gelu_tanh_derivative(x);
      case UnaryOp::silu: return dout * silu_derivative(x);
    }
    return dout;
  }
  __device__ void operator()(const A (&in)[2], A (&out)[1]) const { out[0] = value(in[0], in[1]); }
};

}  // namespace

void unary(const UnaryArgs& args, const ExecContext& ctx) {
  dispatch_float(args.x.dtype, "unary", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accumulate_t<T>;
    map<T, 1, 1>("unary", {args.x}, {args.out}, Unary<A>{args.op, static_cast<A>(args.parameter)}, ctx);
  });
}

void unary_backward(const UnaryBackwardArgs& args, const ExecContext& ctx) {
  dispatch_float(args.x.dtype, "unary_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accumulate_t<T>;
    const UnaryBackward<A> fn{args.op, static_cast<A>(args.parameter)};
    map<T, 2, 1>("unary_backward", {args.x, args.dout}, {args.dx}, fn, ctx);
  });
}

}  // namespace heddle::cuda
