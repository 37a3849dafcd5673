#include "kernels/elementwise/elementwise.h"

#include <string_view>

#include "autograd/node.h"
#include "autograd/ops.h"

namespace heddle {
namespace {

constexpr std::string_view unary_name(UnaryOp op) {
  switch (op) {
    case UnaryOp::neg: return "neg";
    case UnaryOp::scale: return "scale";
    case UnaryOp::add_scalar: return "add_scalar";
    case UnaryOp::pow: return "pow";
    case UnaryOp::exp: return "exp";
    case UnaryOp::log: return "log";
    case UnaryOp::sqrt: return "sqrt";
    case UnaryOp::relu: return "relu";
    case UnaryOp::gelu: return "gelu";
    case UnaryOp::gelu_tanh: return "gelu_tanh";
    case UnaryOp::silu: return "silu";
  }
  return "unary";
}

constexpr bool differentiates_from_output(UnaryOp op) { return op == UnaryOp::exp || op == UnaryOp::sqrt; }
constexpr bool derivative_is_constant(UnaryOp op) {
  return op == UnaryOp::neg || op == UnaryOp::scale || op == UnaryOp::add_scalar;
}

struct UnaryNode final : Node {
  UnaryNode(UnaryOp op, double parameter, const Tensor& x, const Tensor& y)
      : Node(unary_name(op)), op_(op), parameter_(parameter) {
    if (differentiates_from_output(op)) save("output", y);
    else if (!derivative_is_constant(op)) save("x", x);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor& dout = grads[0];
    const Tensor x = derivative_is_constant(op_) ? dout : saved(0);
    const Tensor dx = Tensor::empty(dout.shape(), dout.dtype(), dout.device());
    unary_backward({.op = op_, .x = x.view(), .dout = dout.view(), .dx = dx.mutable_view(), .parameter = parameter_},
                   device_context(dout.device()));
    return {dx};
  }

 private:
  UnaryOp op_;
  double parameter_;
};

Tensor unary_op(UnaryOp op, const Tensor& x, double parameter = 0.0) {
  HEDDLE_CHECK(is_floating(x.dtype()), unary_name(op), ": needs a floating-point tensor, got ", x.describe());
  const Tensor out = Tensor::empty(x.shape(), x.dtype(), x.device());
  unary({.op = op, .x = x.view(), .out = out.mutable_view(), .parameter = parameter}, device_context(x.device()));
  if (needs_grad({&x})) record(out, std::make_shared<UnaryNode>(op, parameter, x, out), {&x});
  return out;
}

constexpr const char* binary_name(BinaryOp op) {
  switch (op) {
    case BinaryOp::add: return "add";
    case BinaryOp::sub: return "sub";
    case BinaryOp::mul: return "mul";
    case BinaryOp::div: return "div";
  }
  return "binary";
}

void check_pair(std::string_view op, const Tensor& a, const Tensor& b) {
  HEDDLE_CHECK(a.dtype() == b.dtype(), op, ": dtypes differ, ", a.dtype(), " and ", b.dtype(),
               "; cast one (there is no promotion)");
  HEDDLE_CHECK(a.device() == b.device(), op, ": devices differ, ", a.device(), " and ", b.device(), "; move one");
}

struct BinaryNode final : Node {
  BinaryNode(BinaryOp op, const Tensor& a, const Tensor& b)
      : Node(binary_name(op)), op_(op), a_shape_(a.shape()), b_shape_(b.shape()) {
    const bool scales = op == BinaryOp::mul || op == BinaryOp::div;
    if (scales && b.requires_grad()) a_ = save("a", a);
    if (scales && (a.requires_grad() || op == BinaryOp::div)) b_ = save("b", b);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor& dout = grads[0];
    Tensor da, db;
    if (needs(0)) da = sum_to(gradient_of_a(dout), a_shape_);
    if (needs(1)) db = sum_to(gradient_of_b(dout), b_shape_);
    return {da, db};
  }

 private:
  Tensor gradient_of_a(const Tensor& dout) const {
    switch (op_) {
      case BinaryOp::mul: return mul(dout, saved(b_));
      case BinaryOp::div: return div(dout, saved(b_));
      default: return dout;
    }
  }

  Tensor gradient_of_b(const Tensor& dout) const {
    switch (op_) {
      case BinaryOp::sub: return neg(dout);
      case BinaryOp::mul: return mul(dout, saved(a_));
      case BinaryOp::div: return neg(div(div(mul(dout, saved(a_)), saved(b_)), saved(b_)));
      default: return dout;
    }
  }

  BinaryOp op_;
  Shape a_shape_, b_shape_;
  int a_ = -1, b_ = -1;
};

Tensor binary_op(BinaryOp op, const Tensor& a, const Tensor& b) {
  check_pair(binary_name(op), a, b);
  HEDDLE_CHECK(is_floating(a.dtype()), binary_name(op), ": needs floating-point tensors, got ", a.describe());
  const Tensor out = Tensor::empty(broadcast_shapes(a.shape(), b.shape(), binary_name(op)), a.dtype(), a.device());
  binary({.op = op, .a = a.view(), .b = b.view(), .out = out.mutable_view()}, device_context(a.device()));
  if (needs_grad({&a, &b})) record(out, std::make_shared<BinaryNode>(op, a, b), {&a, &b});
  return out;
}

struct SwigluNode final : Node {
  SwigluNode(const Tensor& gate, const Tensor& up) : Node("swiglu") {
    save("gate", gate);
    save("up", up);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor gate = saved(0), up = saved(1);
    const Tensor dgate = Tensor::empty(gate.shape(), gate.dtype(), gate.device());
    const Tensor dup = Tensor::empty(gate.shape(), gate.dtype(), gate.device());
    swiglu_backward({.gate = gate.view(),
                     .up = up.view(),
                     .dout = grads[0].view(),
                     .dgate = dgate.mutable_view(),
                     .dup = dup.mutable_view()},
                    device_context(gate.device()));
    return {dgate, dup};
  }
};

struct WhereNode final : Node {
  WhereNode(const Tensor& condition, const Tensor& a, const Tensor& b)
      : Node("where"), a_shape_(a.shape()), b_shape_(b.shape()) {
    save("condition", condition);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    const Tensor& dout = grads[0];
    const Tensor condition = saved(0);
    const Tensor zero = Tensor::scalar(0.0, dout.dtype(), dout.device());
    Tensor da, db;
    if (needs(0)) da = sum_to(where(condition, dout, zero), a_shape_);
    if (needs(1)) db = sum_to(where(condition, zero, dout), b_shape_);
    return {da, db};
  }

 private:
  Shape a_shape_, b_shape_;
};

struct CastNode final : Node {
  explicit CastNode(DType from) : Node("cast"), from_(from) {}
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override { return {cast(grads[0], from_)}; }

 private:
  DType from_;
};

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) { return binary_op(BinaryOp::add, a, b); }
Tensor sub(const Tensor& a, const Tensor& b) { return binary_op(BinaryOp::sub, a, b); }
Tensor mul(const Tensor& a, const Tensor& b) { return binary_op(BinaryOp::mul, a, b); }
Tensor div(const Tensor& a, const Tensor& b) { return binary_op(BinaryOp::div, a, b); }
Tensor neg(const Tensor& x) { return unary_op(UnaryOp::neg, x); }
Tensor scale(const Tensor& x, double factor) { return unary_op(UnaryOp::scale, x, factor); }
Tensor add_scalar(const Tensor& x, double value) { return unary_op(UnaryOp::add_scalar, x, value); }
Tensor pow(const Tensor& x, double exponent) { return unary_op(UnaryOp::pow, x, exponent); }
Tensor exp(const Tensor& x) { return unary_op(UnaryOp::exp, x); }
Tensor log(const Tensor& x) { return unary_op(UnaryOp::log, x); }
Tensor sqrt(const Tensor& x) { return unary_op(UnaryOp::sqrt, x); }
Tensor relu(const Tensor& x) { return unary_op(UnaryOp::relu, x); }
Tensor gelu(const Tensor& x) { return unary_op(UnaryOp::gelu, x); }
Tensor gelu_tanh(const Tensor& x) { return unary_op(UnaryOp::gelu_tanh, x); }
Tensor silu(const Tensor& x) { return unary_op(UnaryOp::silu, x); }

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check_pair("swiglu", gate, up);
  HEDDLE_CHECK(gate.shape() == up.shape(), "swiglu: gate is ", gate.shape(), ", up is ", up.shape(), "; they must be equal");
  const Tensor out = Tensor::empty(gate.shape(), gate.dtype(), gate.device());
  swiglu({.gate = gate.view(), .up = up.view(), .out = out.mutable_view()}, device_context(gate.device()));
  if (needs_grad({&gate, &up})) record(out, std::make_shared<SwigluNode>(gate, up), {&gate, &up});
  return out;
}

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  check_pair("where", a, b);
  const Shape shape = broadcast_shapes(condition.shape(), broadcast_shapes(a.shape(), b.shape(), "where"), "where");
  const Tensor out = Tensor::empty(shape, a.dtype(), a.device());
  select({.condition = condition.view(), .a = a.view(), .b = b.view(), .out = out.mutable_view()},
         device_context(a.device()));
  if (needs_grad({&a, &b})) record(out, std::make_shared<WhereNode>(condition, a, b), {&a, &b});
  return out;
}

Tensor masked_fill(const Tensor& x, const Tensor& mask, double value) {
  HEDDLE_CHECK(broadcast_shapes(mask.shape(), x.shape(), "masked_fill") == x.shape(), "masked_fill: mask ", mask.shape(),
               " does not broadcast to x ", x.shape());
  return where(mask, Tensor::scalar(value, x.dtype(), x.device()), x);
}

Tensor cast(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  const Tensor out = Tensor::empty(x.shape(), dtype, x.device());
  copy({.source = x.view(), .out = out.mutable_view(), .write = Write::assign}, device_context(x.device()));
  if (needs_grad({&x}) && is_floating(dtype)) record(out, std::make_shared<CastNode>(x.dtype()), {&x});
  return out;
}

}  // namespace heddle
