#include "autograd/gradcheck.h"

#include <algorithm>
#include <cmath>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"

namespace heddle {
namespace {

constexpr double kGradientFloor = 1e-3;
constexpr double kLayoutTolerance = 1e-12;  // 4,500 float64 roundings

using Function = std::function<Tensor(const std::vector<Tensor>&)>;

double relative_error(double analytic, double numeric) {
  const double error = std::abs(analytic - numeric) / std::max({std::abs(analytic), std::abs(numeric), kGradientFloor});
  return std::isnan(error) ? HUGE_VAL : error;
}

// Same values, other strides: every second element of a buffer twice as wide.
Tensor strided_copy(const Tensor& x) {
  Shape wide = x.shape();
  wide.push_back(2);
  return select_index(Tensor::full(wide, NAN, x.dtype()), -1, 1).copy_(x);
}

// Gradients of sum(cotangent * fn(inputs)), one an input; undefined where none is required, zero where none arrived.
std::vector<std::vector<double>> analytic_gradients(const Function& fn, const std::vector<Tensor>& inputs,
                                                    const Tensor& cotangent) {
  for (const Tensor& input : inputs) input.set_grad({});
  const Tensor out = fn(inputs);
  HEDDLE_CHECK(out.requires_grad(), "gradcheck: the function's result does not depend on its inputs through recorded ops");
  out.backward(cotangent);
  std::vector<std::vector<double>> gradients;
  for (const Tensor& input : inputs) {
    const Tensor grad = input.grad();
    gradients.push_back(grad.defined() ? grad.to_doubles() : std::vector<double>(static_cast<std::size_t>(input.numel()), 0.0));
  }
  return gradients;
}

// The element at a row-major index, as a scalar view.
Tensor element(const Tensor& x, std::int64_t index) {
  std::int64_t offset = x.storage_offset();
  for (int d = x.rank() - 1; d >= 0; --d) {
    offset += index % x.shape()[d] * x.strides()[d];
    index /= x.shape()[d];
  }
  return x.alias({}, {}, offset);
}

// The difference of the outputs is taken before the sum, so that rounding is that of one output and not of their total.
double numeric_gradient(const Function& fn, const std::vector<Tensor>& inputs, const Tensor& input, std::int64_t index,
                        const std::vector<double>& cotangent, double step) {
  const NoGradGuard no_grad;
  const Tensor x = element(input, index);
  const double before = x.item();
  x.fill_(before + step);
  const std::vector<double> above = fn(inputs).to_doubles();
  x.fill_(before - step);
  const std::vector<double> below = fn(inputs).to_doubles();
  x.fill_(before);
  double total = 0.0;
  for (std::size_t i = 0; i < cotangent.size(); ++i) total += cotangent[i] * (above[i] - below[i]);
  return total / (2.0 * step);
}

void note_worst(GradcheckResult& result, double error, const GradcheckOptions& options, const std::string& where) {
  if (error > options.tolerance) result.ok = false;
  if (error < result.worst_error || (error == 0.0 && !result.message.empty())) return;
  result.worst_error = error;
  result.message = where;
}

}  // namespace

GradcheckResult gradcheck(const Function& fn, const std::vector<Tensor>& inputs, const GradcheckOptions& options) {
  bool any = false;
  for (const Tensor& input : inputs) {
    if (!input.requires_grad()) continue;
    HEDDLE_CHECK(input.dtype() == DType::f64, "gradcheck: inputs must be float64, got ", input.describe());
    any = true;
  }
  HEDDLE_CHECK(any, "gradcheck: no input requires a gradient");

  Generator generator{.seed = options.seed};
  const Shape out_shape = fn(inputs).shape();
  const Tensor cotangent = normal(out_shape, 0.0, 1.0, generator, DType::f64);
  const auto analytic = analytic_gradients(fn, inputs, cotangent);
  const auto strided = analytic_gradients(fn, inputs, strided_copy(cotangent));
  const std::vector<double> weights = cotangent.to_doubles();

  GradcheckResult result{.ok = true, .bound = options.tolerance};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].requires_grad()) continue;
    for (std::int64_t e = 0; e < inputs[i].numel(); ++e) {
      const double a = analytic[i][static_cast<std::size_t>(e)], s = strided[i][static_cast<std::size_t>(e)];
      if (relative_error(a, s) > kLayoutTolerance) {
        result.ok = false;
        result.worst_error = HUGE_VAL;
        result.message = concat_text("input ", i, " element ", e, ": gradient ", a, " becomes ", s, " when dout is strided");
        return result;
      }
      const double n = numeric_gradient(fn, inputs, inputs[i], e, weights, options.step);
      note_worst(result, relative_error(a, n), options, concat_text("input ", i, " element ", e, ": gradient ", a, ", difference ", n));
    }
  }
  return result;
}

}  // namespace heddle
