// What attention refuses, with the exact words.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "kernels/attention/attention.h"
#include "tests/support/error_of.h"

namespace heddle::test {
namespace {

// A valid call, for tests to spoil. All views share one array: nothing here reaches a kernel unless it is valid.
struct Call {
  std::vector<float> memory = std::vector<float>(4096);
  AttentionForwardArgs forward{view({2, 5, 6, 8}), view({2, 7, 2, 8}), view({2, 7, 2, 8}), view({2, 5, 6, 8}), view({2, 6, 5})};
  AttentionBackwardArgs backward{forward.q, forward.k, forward.v, forward.out, forward.lse, view({2, 5, 6, 8}), {},
                                 view({2, 5, 6, 8}), view({2, 7, 2, 8}), view({2, 7, 2, 8})};

  MutView view(const Shape& shape) { return {memory.data(), DType::f32, kCpu, shape, contiguous_strides(shape)}; }
  std::string forward_error(std::string_view kernel = "auto") {
    return error_of([&] { attention_forward(forward, kernel, ExecContext{}); });
  }
  std::string backward_error(std::string_view kernel = "auto") {
    return error_of([&] { attention_backward(backward, kernel, ExecContext{}); });
  }
};

constexpr Device kGpu{DeviceType::cuda, 0};

TEST(AttentionErrors, ValidCallIsAccepted) {
  EXPECT_EQ(Call().forward_error(), "no error");
  EXPECT_EQ(Call().backward_error(), "no error");
}

TEST(AttentionErrors, QueryHeadsMustBeAMultipleOfKeyHeads) {
  Call call;
  call.forward.q = call.forward.out = call.view({2, 5, 8, 8});
  call.forward.k = call.forward.v = call.view({2, 7, 6, 8});
  EXPECT_EQ(call.forward_error(), "attention: k has 6 heads, q has 8; q heads must be a multiple of k heads");
}

TEST(AttentionErrors, RankMustBeFour) {
  Call call;
  call.forward.k = call.view({2, 7, 8});
  EXPECT_EQ(call.forward_error(), "attention: k must be [B, S, H, D], got [2, 7, 8]");
}

TEST(AttentionErrors, BatchAndHeadSizeMustAgree) {
  Call call;
  call.forward.k = call.view({3, 7, 2, 8});
  EXPECT_EQ(call.forward_error(), "attention: k is [3, 7, 2, 8], q is [2, 5, 6, 8]; batch and head size must be equal");
}

TEST(AttentionErrors, KeysAndValuesMustAgree) {
  Call call;
  call.forward.v = call.view({2, 6, 2, 8});
  EXPECT_EQ(call.forward_error(), "attention: v is [2, 6, 2, 8], k is [2, 7, 2, 8]; they must be equal");
}

TEST(AttentionErrors, HeadSizeIsLimited) {
  Call call;
  call.forward.q = call.view({2, 5, 1, 257});
  call.forward.k = call.forward.v = call.view({2, 7, 1, 257});
  EXPECT_EQ(call.forward_error(), "attention: head size must be in [1, 256], got 257");
}

TEST(AttentionErrors, LastDimensionMustHaveUnitStride) {
  Call call;
  call.forward.v.strides[3] = 2;
  EXPECT_EQ(call.forward_error(), "attention: v has stride 2 in its last dimension, it must be 1; make it contiguous");
}

TEST(AttentionErrors, DtypesMustAgree) {
  Call call;
  call.forward.k.dtype = DType::bf16;
  EXPECT_EQ(call.forward_error(), "attention: k is bfloat16, expected float32; cast it first");
  Call integer;
  integer.forward.q.dtype = DType::i32;
  EXPECT_EQ(integer.forward_error(), "attention: needs a floating-point dtype, got int32; cast it first");
}

TEST(AttentionErrors, DevicesMustAgree) {
  Call call;
  call.forward.v.device = kGpu;
  EXPECT_EQ(call.forward_error(), "attention: v is on cuda:0, q on cpu; move them to one device");
}

TEST(AttentionErrors, ScaleMustBePositiveAndFinite) {
  for (const auto& [scale, text] : {std::pair{0.0, "0"}, {-0.5, "-0.5"}, {std::numeric_limits<double>::infinity(), "inf"},
                                    {std::numeric_limits<double>::quiet_NaN(), "nan"}}) {
    Call call;
    call.forward.scale = scale;
    EXPECT_EQ(call.forward_error(), concat_text("attention: scale must be finite and greater than 0, got ", text));
  }
}

TEST(AttentionErrors, ScaleMustFitTheDtypeOfTheSums) {
  // Below the least normal number, and where scale * log2(e) passes the greatest one.
  for (const double scale : {1e-300, 1e-46, 1e-39, 3e38, 1e39}) {
    Call call;
    call.forward.scale = call.backward.scale = scale;
    const std::string expected = concat_text("scale must be in [1.17549e-38, 2.35866e+38], what float32 can hold, got ", scale);
    EXPECT_EQ(call.forward_error(), "attention: " + expected);
    EXPECT_EQ(call.backward_error(), "attention backward: " + expected);
  }
}

TEST(AttentionErrors, OutputsMustFit) {
  Call call;
  call.forward.lse = call.view({2, 5, 6});
  EXPECT_EQ(call.forward_error(), "attention: lse is [2, 5, 6], expected [2, 6, 5]");
  Call other;
  other.forward.out.dtype = DType::f64;
  EXPECT_EQ(other.forward_error(), "attention: out is float64, expected float32; cast it first");
}

TEST(AttentionErrors, GradientsMustFit) {
  Call call;
  call.backward.dv = call.view({2, 7, 6, 8});
  EXPECT_EQ(call.backward_error(), "attention backward: dv is [2, 7, 6, 8], expected [2, 7, 2, 8]");
  Call other;
  other.backward.dlse = other.view({2, 6, 7});
  EXPECT_EQ(other.backward_error(), "attention backward: dlse is [2, 6, 7], expected [2, 6, 5]");
}

// A valid call of 3 sequences, the second without queries.
struct SequencesCall : Call {
  std::vector<std::int32_t> ends_q = {0, 2, 2, 5}, ends_k = {0, 3, 4, 6};

  SequencesCall() {
    forward.q = forward.out = view({1, 5, 6, 8}), forward.k = forward.v = view({1, 7, 2, 8}), forward.lse = view({1, 6, 5});
    forward.cu_seqlens_q = ends(ends_q), forward.cu_seqlens_k = ends(ends_k);
    forward.max_seqlen_q = 3, forward.max_seqlen_k = 3;
  }
  SequencesCall(const SequencesCall&) = delete;

  static ConstView ends(const std::vector<std::int32_t>& values) {
    return {values.data(), DType::i32, kCpu, {static_cast<std::int64_t>(values.size())}, {1}};
  }
};

TEST(AttentionErrors, ValidSequencesAreAccepted) { EXPECT_EQ(SequencesCall().forward_error(), "no error"); }

TEST(AttentionErrors, EndsComeForQueriesAndKeys) {
  SequencesCall call;
  call.forward.cu_seqlens_k = {};
  EXPECT_EQ(call.forward_error(), "attention: cu_seqlens_k is missing; give both or none");
  SequencesCall lengths;
  lengths.forward.cu_seqlens_k.shape = {3};
  EXPECT_EQ(lengths.forward_error(), "attention: cu_seqlens_k is [3], cu_seqlens_q is [4]; they must be equal");
}

TEST(AttentionErrors, EndsAreDenseInt32OnTheDeviceOfQ) {
  SequencesCall dtype, device, shape, stride;
  dtype.forward.cu_seqlens_q.dtype = DType::i64;
  device.forward.cu_seqlens_k.device = kGpu;
  shape.forward.cu_seqlens_q = SequencesCall::ends({});
  stride.forward.cu_seqlens_q.strides = {2};
  EXPECT_EQ(dtype.forward_error(), "attention: cu_seqlens_q is int64, expected int32; cast it first");
  EXPECT_EQ(device.forward_error(), "attention: cu_seqlens_k is on cuda:0, q on cpu; move them to one device");
  EXPECT_EQ(shape.forward_error(), "attention: cu_seqlens_q must be a dense [n + 1] for n sequences, got [0] with strides [1]");
  EXPECT_EQ(stride.forward_error(), "attention: cu_seqlens_q must be a dense [n + 1] for n sequences, got [4] with strides [2]");
}

TEST(AttentionErrors, SequencesNeedABatchOfOne) {
  SequencesCall call;
  call.forward.q = call.forward.out = call.view({2, 5, 6, 8}), call.forward.lse = call.view({2, 6, 5});
  call.forward.k = call.forward.v = call.view({2, 7, 2, 8});
  EXPECT_EQ(call.forward_error(), "attention: q is [2, 5, 6, 8]; with cu_seqlens its batch size must be 1");
}

TEST(AttentionErrors, EndsMustFitTheRows) {
  SequencesCall start, order, end, longest, negative;
  start.ends_q[0] = 1;
  order.ends_k[2] = 2;
  end.ends_k[3] = 8, end.forward.max_seqlen_k = 4;
  longest.forward.max_seqlen_q = 2;
  negative.forward.max_seqlen_k = -1;
  EXPECT_EQ(start.forward_error(), "attention: cu_seqlens_q must start at 0, got 1");
  EXPECT_EQ(order.forward_error(), "attention: cu_seqlens_k decreases from 3 to 2 at sequence 1");
  EXPECT_EQ(end.forward_error(), "attention: cu_seqlens_k ends at 8, k has 7 rows");
  EXPECT_EQ(longest.forward_error(), "attention: sequence 2 has 3 rows of q, max_seqlen_q is 2");
  EXPECT_EQ(negative.forward_error(), "attention: max_seqlen_k must be at least 0, got -1");
}

TEST(AttentionSelect, AutoTakesTheFirstThatSupports) {
  EXPECT_EQ(select_attention({.D = 8}, AttentionPass::forward, "auto").name, "cpu");
  EXPECT_EQ(select_attention({.D = 8}, AttentionPass::backward, "cpu").name, "cpu");
}

TEST(AttentionSelect, UnknownNameListsTheChoices) {
  std::string names = "auto";
  for (const AttentionVariant& variant : attention_variants()) names.append(", ").append(variant.name);
  EXPECT_EQ(Call().forward_error("flash"), "attention: there is no kernel 'flash'; choose one of " + names);
}

TEST(AttentionSelect, NamedKernelSaysWhyItCannotRun) {
  EXPECT_EQ(error_of([] { select_attention({.D = 8, .device = kGpu}, AttentionPass::backward, "cpu"); }),
            "attention: kernel 'cpu' cannot run this backward: the tensors are on cuda:0; move them to the cpu");
}

TEST(AttentionSelect, NoKernelListsEveryReason) {
  // No variant has heads of 300, on any device.
  const AttentionProblem problem{.Hq = 1, .Hkv = 1, .D = 300, .device = kGpu};
  std::string reasons;
  for (const AttentionVariant& variant : attention_variants())
    reasons.append(reasons.empty() ? "" : "; ").append(variant.name).append(": ").append(variant.supports(problem, AttentionPass::forward).reason);
  EXPECT_EQ(error_of([&] { select_attention(problem, AttentionPass::forward, "auto"); }),
            "attention: no kernel can run this forward: " + reasons);
}

}  // namespace
}  // namespace heddle::test
