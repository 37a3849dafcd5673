#include "autograd/gradcheck.h"

#include <gtest/gtest.h>

#include "autograd/node.h"
#include "nn/gradcheck_suite.h"
#include "tests/support/tensors.h"

namespace heddle::nn {
void PrintTo(const GradcheckCase& test, std::ostream* out) { *out << test.name << ' ' << test.inputs; }
}  // namespace heddle::nn

namespace heddle {
namespace {

using test::error_of;
using test::random_leaf;

// --- The checker itself must be able to fail ---

// y = x^2 whose gradient is off by the factor `wrong`.
struct WrongSquareNode final : Node {
  WrongSquareNode(const Tensor& x, double wrong) : Node("wrong_square"), wrong_(wrong) { save("x", x); }
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    return {scale(mul(grads[0], saved(0)), 2.0 * wrong_)};
  }

 private:
  double wrong_;
};

Tensor wrong_square(const Tensor& x, double wrong) {
  const Tensor out = mul(x.detach(), x.detach());
  if (needs_grad({&x})) record(out, std::make_shared<WrongSquareNode>(x, wrong), {&x});
  return out;
}

TEST(Gradcheck, FindsAnErrorOfOneInTenThousand) {
  const auto check = [](double wrong) {
    return gradcheck([wrong](const auto& in) { return wrong_square(in[0], wrong); }, {random_leaf({2, 3})});
  };

  EXPECT_TRUE(check(1.0).ok) << check(1.0).message;
  EXPECT_FALSE(check(1.0001).ok);
  EXPECT_NEAR(check(1.0001).worst_error, 1e-4, 1e-5);
  EXPECT_FALSE(check(NAN).ok);
}

TEST(Gradcheck, FindsAMissingGradient) {
  const auto fn = [](const std::vector<Tensor>& in) { return mul(in[0], in[1].detach()); };

  const GradcheckResult result = gradcheck(fn, {random_leaf({3}, 1), random_leaf({3}, 2)});

  EXPECT_FALSE(result.ok);
  EXPECT_EQ(result.message.substr(0, 7), "input 1");
}

// An identity op that reads its incoming gradient as if it were dense.
struct DenseOnlyNode final : Node {
  DenseOnlyNode() : Node("dense_only") {}
  std::vector<Tensor> backward(const std::vector<Tensor>& grads) override {
    return {grads[0].alias(grads[0].shape(), contiguous_strides(grads[0].shape()), grads[0].storage_offset()).clone()};
  }
};

TEST(Gradcheck, FindsABackwardThatAssumesADenseGradient) {
  const auto fn = [](const std::vector<Tensor>& in) {
    const Tensor out = in[0].clone();
    if (needs_grad({&in[0]})) record(out, std::make_shared<DenseOnlyNode>(), {&in[0]});
    return out;
  };

  EXPECT_FALSE(gradcheck(fn, {random_leaf({3})}).ok);
}

TEST(Gradcheck, RefusesInputsItCannotCheck) {
  const auto fn = [](const std::vector<Tensor>& in) { return exp(in[0]); };

  EXPECT_EQ(error_of([&] { gradcheck(fn, {random_leaf({2}, 1, DType::f32)}); }),
            "gradcheck: inputs must be float64, got float32 [2] on cpu");
  EXPECT_EQ(error_of([&] { gradcheck(fn, {Tensor::zeros({2}, DType::f64)}); }), "gradcheck: no input requires a gradient");
  EXPECT_EQ(error_of([&] { gradcheck([](const auto& in) { return in[0].detach(); }, {random_leaf({2})}); }),
            "gradcheck: the function's result does not depend on its inputs through recorded ops");
}

TEST(Gradcheck, RestoresTheInputs) {
  const Tensor x = random_leaf({4});
  const std::vector<double> before = x.to_doubles();

  gradcheck([](const auto& in) { return exp(in[0]); }, {x});

  EXPECT_EQ(x.to_doubles(), before);
}

// --- Every op and module ---

class GradcheckSuite : public ::testing::TestWithParam<nn::GradcheckCase> {};

TEST_P(GradcheckSuite, GradientsMatchCentralDifferences) {
  const GradcheckResult result = GetParam().run();

  EXPECT_TRUE(result.ok) << GetParam().name << ' ' << GetParam().inputs << ": error " << result.worst_error << "; " << result.message;
}

std::string test_name(const ::testing::TestParamInfo<nn::GradcheckCase>& info) {
  std::string name = concat_text(info.index, "_", info.param.name, "_", info.param.inputs);
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(Ops, GradcheckSuite, ::testing::ValuesIn(nn::op_gradcheck_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Modules, GradcheckSuite, ::testing::ValuesIn(nn::module_gradcheck_cases()), test_name);

}  // namespace
}  // namespace heddle
