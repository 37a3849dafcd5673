#include "lora/pissa.h"

#include <algorithm>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"
#include "kernels/svd/svd.h"

namespace heddle::lora {

PrincipalPart principal_part(const Tensor& weight, std::int64_t r, double scale) {
  const NoGradGuard no_grad;
  const Tensor w = contiguous(cast(weight.detach().to(kCpu), DType::f64));
  const std::int64_t out = w.size(0), in = w.size(1), count = std::min({r, out, in});
  const Tensor u = Tensor::empty({out, count}, DType::f64), v = Tensor::empty({in, count}, DType::f64);
  const Tensor s = Tensor::empty({count}, DType::f64);
  largest_singular_values({w.view(), u.mutable_view(), s.mutable_view(), v.mutable_view()});

  const Tensor root = sqrt(heddle::scale(s, 1 / scale));
  const PrincipalPart part = {Tensor::zeros({r, in}, DType::f64), Tensor::zeros({out, r}, DType::f64)};
  slice(part.a, 0, 0, count).copy_(transpose(mul(v, root), 0, 1));
  slice(part.b, 1, 0, count).copy_(mul(u, root));
  return part;
}

}  // namespace heddle::lora
