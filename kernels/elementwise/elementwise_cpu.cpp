#include <Eigen/Core>
#include <unsupported/Eigen/SpecialFunctions>

#include <cmath>
#include <limits>
#include <numbers>

#include "kernels/elementwise/chunk_cpu.h"
#include "kernels/elementwise/elementwise_backends.h"

namespace heddle::cpu {
namespace {

// Calls fn(std::type_identity<A>{}) with the type that elements of `dtype` are computed in.
template <typename Fn>
void with_accumulator(DType dtype, std::string_view op, const Fn& fn) {
  HEDDLE_CHECK(is_floating(dtype), op, ": needs a floating-point dtype, got ", dtype);
  if (dtype == DType::f64) fn(std::type_identity<double>{});
  else fn(std::type_identity<float>{});
}

template <typename A>
Chunk<A> sigmoid(const Chunk<A>& x) {
  return A(1) / (A(1) + (-x).exp());
}

// tanh's argument in gelu_tanh is kGeluScale * (x + kGeluCubic * x^3).
constexpr double kGeluScale = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;
constexpr double kGeluCubic = 0.044715;

template <typename A>
Chunk<A> gelu_tanh_inner(const Chunk<A>& x) {
  return (A(kGeluScale) * (x + A(kGeluCubic) * x.cube())).tanh();
}

// The standard normal distribution function. In float, Eigen's vectorised erf: absolute error under 3e-7.
template <typename A>
Chunk<A> normal_cdf(const Chunk<A>& x) {
  if constexpr (std::is_same_v<A, float>) return 0.5f + 0.5f * (x / std::numbers::sqrt2_v<float>).erf();
  else return x.unaryExpr([](A v) { return A(0.5) * std::erfc(-v / std::numbers::sqrt2_v<A>); });
}

template <typename A>
Chunk<A> power(const Chunk<A>& x, A exponent) {
  if (exponent == A(1)) return x;
  if (exponent == A(2)) return x.square();
  return x.unaryExpr([exponent](A v) { return std::pow(v, exponent); });
}

// Eigen's exp stops falling at the smallest normal number, also for -infinity; under it the result is 0 here.
template <typename A>
Chunk<A> exponential(const Chunk<A>& x) {
  const A lowest = std::log(std::numeric_limits<A>::min());
  const Chunk<A> y = x.exp();  // on its own: a select is not vectorised
  return (x < lowest).select(A(0), y);
}

// Eigen's float sqrt multiplies by a reciprocal root, which makes infinity NaN.
template <typename A>
Chunk<A> square_root(const Chunk<A>& x) {
  return x.unaryExpr([](A v) { return std::sqrt(v); });
}

template <typename A>
Chunk<A> apply(UnaryOp op, const Chunk<A>& x, A parameter) {
  switch (op) {
    case UnaryOp::neg: return -x;
    case UnaryOp::scale: return parameter * x;
    case UnaryOp::add_scalar: return x + parameter;
    case UnaryOp::pow: return power<A>(x, parameter);
    case UnaryOp::exp: return exponential<A>(x);
    case UnaryOp::log: return x.log();
    case UnaryOp::sqrt: return square_root<A>(x);
    case UnaryOp::relu: return (x > A(0) || x != x).select(x, A(0));  // NaN stays NaN
    case UnaryOp::gelu: return x * normal_cdf<A>(x);
    case UnaryOp::gelu_tanh: return A(0.5) * x * (A(1) + gelu_tanh_inner<A>(x));
    case UnaryOp::silu: return x * sigmoid<A>(x);
  }
  return x;
}

template <typename A>
Chunk<A> gelu_derivative(const Chunk<A>& x) {
  const A density = A(std::numbers::inv_sqrtpi / std::numbers::sqrt2);
  return normal_cdf<A>(x) + x * density * (A(-0.5) * x.square()).exp();
}

template <typename A>
Chunk<A> gelu_tanh_derivative(const Chunk<A>& x) {
  const Chunk<A> t = gelu_tanh_inner<A>(x);
  const Chunk<A> inner_slope = A(kGeluScale) * (A(1) + A(3 * kGeluCubic) * x.square());
  return A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t.square()) * inner_slope;
}

template <typename A>
Chunk<A> silu_derivative(const Chunk<A>& x) {
  const Chunk<A> s = sigmoid<A>(x);
  return s * (A(1) + x * (A(1) - s));
}

template <typename A>
Chunk<A> apply_backward(UnaryOp op, const Chunk<A>& x, const Chunk<A>& dout, A parameter) {
  switch (op) {
    case UnaryOp::neg: return -dout;
    case UnaryOp::scale: return parameter * dout;
    case UnaryOp::add_scalar: return dout;
    case UnaryOp::pow:
      if (parameter == A(0)) return Chunk<A>::Zero(x.size());  // 0 * 0^-1 would be NaN at x = 0
      return dout * parameter * power<A>(x, parameter - A(1));
    case UnaryOp::exp: return dout * x;
    case UnaryOp::log: return dout / x;
    case UnaryOp::sqrt: return A(0.5) * dout / x;
    case UnaryOp::relu: return (x > A(0)).select(dout, A(0));
    case UnaryOp::gelu: return dout * gelu_derivative<A>(x);
    case UnaryOp::gelu_tanh: return dout * gelu_tanh_derivative<A>(x);
    case UnaryOp::silu: return dout * silu_derivative<A>(x);
  }
  return dout;
}

template <typename A>
Chunk<A> apply(BinaryOp op, const Chunk<A>& a, const Chunk<A>& b) {
  switch (op) {
    case BinaryOp::add: return a + b;
    case BinaryOp::sub: return a - b;
    case BinaryOp::mul: return a * b;
    case BinaryOp::div: return a / b;
  }
  return a;
}

}  // namespace

void unary(const UnaryArgs& args, const ExecContext&) {
  with_accumulator(args.x.dtype, "unary", [&]<typename A>(std::type_identity<A>) {
    map_chunks<A, 1, 1>({args.x}, {args.out},
                        [&](const auto& in, auto& out) { out[0] = apply<A>(args.op, in[0], A(args.parameter)); });
  });
}

void unary_backward(const UnaryBackwardArgs& args, const ExecContext&) {
  with_accumulator(args.x.dtype, "unary_backward", [&]<typename A>(std::type_identity<A>) {
    map_chunks<A, 2, 1>({args.x, args.dout}, {args.dx}, [&](const auto& in, auto& out) {
      out[0] = apply_backward<A>(args.op, in[0], in[1], A(args.parameter));
    });
  });
}

void binary(const BinaryArgs& args, const ExecContext&) {
  with_accumulator(args.a.dtype, "binary", [&]<typename A>(std::type_identity<A>) {
    map_chunks<A, 2, 1>({args.a, args.b}, {args.out},
                        [&](const auto& in, auto& out) { out[0] = apply<A>(args.op, in[0], in[1]); });
  });
}

void swiglu(const SwigluArgs& args, const ExecContext&) {
  with_accumulator(args.gate.dtype, "swiglu", [&]<typename A>(std::type_identity<A>) {
    map_chunks<A, 2, 1>({args.gate, args.up}, {args.out},
                        [](const auto& in, auto& out) { out[0] = in[0] * sigmoid<A>(in[0]) * in[1]; });
  });
}

void swiglu_backward(const SwigluBackwardArgs& args, const ExecContext&) {
  with_accumulator(args.gate.dtype, "swiglu_backward", [&]<typename A>(std::type_identity<A>) {
    map_chunks<A, 3, 2>({args.gate, args.up, args.dout}, {args.dgate, args.dup}, [](const auto& in, auto& out) {
      const Chunk<A> s = sigmoid<A>(in[0]);
      out[0] = in[2] * in[1] * s * (A(1) + in[0] * (A(1) - s));
      out[1] = in[2] * in[0] * s;
    });
  });
}

}  // namespace heddle::cpu
