#include "lora/pissa.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "autograd/grad_mode.h"
#include "autograd/ops.h"

namespace heddle::lora {
namespace {

constexpr int kRounds = 32;
constexpr int kSweeps = 30;  // of rotations at most; they converge quadratically, in about ten

// The rows of a dense float64 matrix.
struct Rows {
  explicit Rows(const Tensor& matrix) : count(matrix.size(0)), width(matrix.size(1)), data(matrix.mutable_view().as<double>()) {}
  double* operator[](std::int64_t i) const { return data + i * width; }
  double dot(std::int64_t i, std::int64_t j) const { return std::inner_product((*this)[i], (*this)[i] + width, (*this)[j], 0.0); }

  std::int64_t count, width;
  double* data;
};

// Gram and Schmidt, twice for the sake of orthogonality. Rows that depend on earlier ones become zero.
void make_orthonormal(const Tensor& matrix) {
  const Rows rows(matrix);
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const double before = std::sqrt(rows.dot(i, i));
    for (int pass = 0; pass < 2; ++pass)
      for (std::int64_t j = 0; j < i; ++j) {
        const double along = rows.dot(i, j);
        for (std::int64_t c = 0; c < rows.width; ++c) rows[i][c] -= along * rows[j][c];
      }
    const double norm = std::sqrt(rows.dot(i, i));
    const double factor = norm > 1e-12 * before ? 1 / norm : 0;
    for (std::int64_t c = 0; c < rows.width; ++c) rows[i][c] *= factor;
  }
}

void rotate(const Rows& rows, std::int64_t i, std::int64_t j, double cosine, double sine) {
  for (std::int64_t c = 0; c < rows.width; ++c) {
    const double x = rows[i][c], y = rows[j][c];
    rows[i][c] = cosine * x - sine * y;
    rows[j][c] = sine * x + cosine * y;
  }
}

// Rotates rows of `images`, and those of `vectors` with them, until all images are orthogonal to each other.
void diagonalise(const Tensor& images, const Tensor& vectors) {
  const Rows image(images), vector(vectors);
  bool is_done = false;
  for (int sweep = 0; sweep < kSweeps && !is_done; ++sweep) {
    is_done = true;
    for (std::int64_t i = 0; i < image.count; ++i)
      for (std::int64_t j = i + 1; j < image.count; ++j) {
        const double ii = image.dot(i, i), jj = image.dot(j, j), ij = image.dot(i, j);
        if (std::abs(ij) <= 1e-15 * std::sqrt(ii * jj)) continue;
        is_done = false;
        const double zeta = (jj - ii) / (2 * ij);
        const double tangent = std::copysign(1, zeta) / (std::abs(zeta) + std::sqrt(1 + zeta * zeta));
        const double cosine = 1 / std::sqrt(1 + tangent * tangent);
        rotate(image, i, j, cosine, cosine * tangent);
        rotate(vector, i, j, cosine, cosine * tangent);
      }
  }
}

}  // namespace

PrincipalPart principal_part(const Tensor& weight, std::int64_t r, double scale) {
  const NoGradGuard no_grad;
  const Tensor w = cast(weight.detach().to(kCpu), DType::f64), turned = transpose(w, 0, 1);
  const std::int64_t out = w.size(0), in = w.size(1), count = std::min({2 * r + 8, out, in});
  Generator generator;
  Tensor vectors = normal({count, in}, 0, 1, generator, DType::f64);
  for (int round = 0; round < kRounds; ++round) {
    const Tensor images = matmul(vectors, turned);
    make_orthonormal(images);
    vectors = matmul(images, w);
    make_orthonormal(vectors);
  }
  const Tensor images = matmul(vectors, turned);  // [count, out]: singular value times left vector, once they are diagonal
  diagonalise(images, vectors);

  const Rows image(images), vector(vectors);
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](std::int64_t i) { return image.dot(i, i); });
  const PrincipalPart part = {Tensor::zeros({r, in}, DType::f64), Tensor::zeros({r, out}, DType::f64)};
  for (std::int64_t k = 0; k < std::min(r, count); ++k) {
    const std::int64_t i = order[static_cast<std::size_t>(k)];
    const double value = std::sqrt(image.dot(i, i)), root = std::sqrt(value / scale);
    if (value == 0) continue;
    for (std::int64_t c = 0; c < in; ++c) Rows(part.a)[k][c] = root * vector[i][c];
    for (std::int64_t c = 0; c < out; ++c) Rows(part.b)[k][c] = root / value * image[i][c];
  }
  return {part.a, contiguous(transpose(part.b, 0, 1))};
}

}  // namespace heddle::lora
