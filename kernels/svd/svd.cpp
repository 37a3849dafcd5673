#include "kernels/svd/svd.h"

#include <Eigen/Eigenvalues>
#include <algorithm>

#include "kernels/runtime/check.h"

namespace heddle {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Index = Eigen::Index;

// The r largest singular values of a matrix with at least as many rows as columns.
void solve_tall(const Eigen::Ref<const Matrix, 0, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>>& w, Index r, Eigen::Ref<Matrix> u, double* s,
                Eigen::Ref<Matrix> v) {
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(w.transpose() * w);  // by rising eigenvalue
  HEDDLE_CHECK(solver.info() == Eigen::Success, "svd: the eigenvalues of a ", w.rows(), " x ", w.cols(), " matrix did not converge");
  const double largest = std::max(solver.eigenvalues()[w.cols() - 1], 0.0);
  for (Index i = 0; i < r; ++i) {
    const Index at = w.cols() - 1 - i;
    // What rounding leaves of a zero.
    const bool is_zero = solver.eigenvalues()[at] <= largest * static_cast<double>(w.cols()) * 1e-16;
    v.col(i) = solver.eigenvectors().col(at) * (is_zero ? 0.0 : 1.0);
    u.col(i) = w * v.col(i);
    s[i] = u.col(i).norm();
    if (s[i] > 0) u.col(i) /= s[i];
  }
}

}  // namespace

void largest_singular_values(const SvdArgs& args) {
  for (const ConstView& view : {args.w, ConstView(args.u), ConstView(args.s), ConstView(args.v)})
    HEDDLE_CHECK(view.dtype == DType::f64 && view.device.is_cpu() && view.is_contiguous(), "svd: operands must be dense float64 on the CPU, got ",
                 view.dtype, " ", view.shape, " on ", view.device);
  HEDDLE_CHECK(args.w.shape.rank() == 2 && args.s.shape.rank() == 1, "svd: needs a matrix and a vector of values, got ", args.w.shape, " and ",
               args.s.shape);
  const std::int64_t m = args.w.shape[0], n = args.w.shape[1], r = args.s.shape[0];
  HEDDLE_CHECK(r <= std::min(m, n) && args.u.shape == (Shape{m, r}) && args.v.shape == (Shape{n, r}), "svd: ", r, " values of ",
               args.w.shape, " need u [", m, ", ", r, "] and v [", n, ", ", r, "] with r <= ", std::min(m, n), ", got ", args.u.shape, " and ",
               args.v.shape);
  const Eigen::Map<const Matrix> w(args.w.as<double>(), m, n);
  HEDDLE_CHECK(w.allFinite(), "svd: the matrix ", args.w.shape, " holds NaN or infinity");
  Eigen::Map<Matrix> u(args.u.as<double>(), m, r), v(args.v.as<double>(), n, r);
  if (r == 0) return;
  if (m >= n) solve_tall(w, r, u, args.s.as<double>(), v);
  else solve_tall(Matrix(w.transpose()), r, v, args.s.as<double>(), u);
}

}  // namespace heddle
