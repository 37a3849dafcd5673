#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/runtime/dtype.h"

namespace heddle::test {

struct AttentionSizes {
  std::int64_t B = 1, Sq = 1, Sk = 1, Hq = 1, Hkv = 1, D = 1;
  bool is_causal = false;
  double scale = 1.0;
};

// Dense row-major values: q, dout [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D]; dlse [B, Hq, Sq], or empty.
struct AttentionInputs {
  std::vector<double> q, k, v, dout, dlse;
};
struct AttentionResults {
  std::vector<double> out, lse, dq, dk, dv;
};

// Attention as the textbook writes it, with the whole score matrix of a head in memory. Every matrix is stored in E and
// sums are accumulate_t<E>: with double it is the truth, with another type the naive code of that type, whose error is
// the measure of what a careful kernel may have.
template <typename E>
AttentionResults reference_attention(const AttentionSizes& sizes, const AttentionInputs& inputs) {
  using T = accumulate_t<E>;
  const auto& [B, Sq, Sk, Hq, Hkv, D, is_causal, scale] = sizes;
  const auto at = [&D = D](std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t S, std::int64_t H) {
    return static_cast<std::size_t>(((b * S + s) * H + h) * D);
  };
  const auto stored = [](T value) { return static_cast<T>(static_cast<E>(value)); };
  const auto dot = [&D = D](const std::vector<double>& x, std::size_t i, const std::vector<double>& y, std::size_t j) {
    T sum = 0;
    for (std::int64_t d = 0; d < D; ++d) sum += static_cast<T>(x[i + d]) * static_cast<T>(y[j + d]);
    return sum;
  };
  AttentionResults r{std::vector<double>(inputs.q.size()), std::vector<double>(B * Hq * Sq),
                     std::vector<double>(inputs.q.size()), std::vector<double>(inputs.k.size()),
                     std::vector<double>(inputs.k.size())};
  std::vector<T> dk(inputs.k.size()), dv(inputs.k.size());
  std::vector<T> p(Sk), dp(Sk);
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t h = 0; h < Hq; ++h)
      for (std::int64_t i = 0; i < Sq; ++i) {
        const std::int64_t g = h / (Hq / Hkv), row = (b * Hq + h) * Sq + i;
        const std::int64_t visible = is_causal ? std::min(std::max<std::int64_t>(i + 1 + Sk - Sq, 0), Sk) : Sk;
        const std::size_t qi = at(b, i, h, Sq, Hq);
        T max = -std::numeric_limits<T>::infinity(), sum = 0;
        for (std::int64_t j = 0; j < visible; ++j) {
          p[j] = stored(static_cast<T>(scale) * dot(inputs.q, qi, inputs.k, at(b, j, g, Sk, Hkv)));
          max = std::max(max, p[j]);
        }
        for (std::int64_t j = 0; j < visible; ++j) sum += p[j] = std::exp(p[j] - max);
        r.lse[row] = visible > 0 ? max + std::log(sum) : -std::numeric_limits<double>::infinity();
        for (std::int64_t j = 0; j < visible; ++j) p[j] = stored(p[j] / sum);
        for (std::int64_t d = 0; d < D; ++d) {
          T o = 0;
          for (std::int64_t j = 0; j < visible; ++j) o += p[j] * static_cast<T>(inputs.v[at(b, j, g, Sk, Hkv) + d]);
          r.out[qi + d] = stored(o);
        }
        if (inputs.dout.empty()) continue;
        T delta = dot(inputs.dout, qi, r.out, qi);
        if (!inputs.dlse.empty()) delta -= static_cast<T>(inputs.dlse[row]);
        for (std::int64_t j = 0; j < visible; ++j)
          dp[j] = stored(p[j] * (stored(dot(inputs.dout, qi, inputs.v, at(b, j, g, Sk, Hkv))) - delta));
        for (std::int64_t d = 0; d < D; ++d) {
          T dq = 0;
          for (std::int64_t j = 0; j < visible; ++j) {
            const std::size_t kj = at(b, j, g, Sk, Hkv) + d;
            dq += dp[j] * static_cast<T>(inputs.k[kj]);
            dk[kj] += static_cast<T>(scale) * dp[j] * static_cast<T>(inputs.q[qi + d]);
            dv[kj] += p[j] * static_cast<T>(inputs.dout[qi + d]);
          }
          r.dq[qi + d] = stored(static_cast<T>(scale) * dq);
        }
      }
  for (std::size_t i = 0; i < dk.size(); ++i) r.dk[i] = stored(dk[i]), r.dv[i] = stored(dv[i]);
  return r;
}

}  // namespace heddle::test
