#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "autograd/tensor.h"
#include "kernels/quantize/quantize.h"

namespace heddle::quant {

// The weight of a Linear layer in few bits. It is not a Tensor: [out_features, in_features] is what it stands for, the stored shapes
// are those of quant_layout() and stay inside. It is frozen. Cheap to copy: copies share the bytes.
class QuantizedWeight {
 public:
  // The stored parts, on one device.
  struct Parts {
    Tensor codes, scales, global;  // global undefined unless the layout has one
  };

  // Takes parts as they come from a file. Throws heddle::Error naming `name` if a shape or dtype is not the layout's, a scale is NaN,
  // infinite or negative, a global scale is 0, an FP8 code is not a number, or a weight might be beyond 2^127.
  QuantizedWeight(const std::string& name, const QuantSpec& spec, std::int64_t out_features, std::int64_t in_features, const Parts& parts);

  // Quantises weight [out, in] of any floating dtype, read as float32 at most. Weights that are to share their tensor scale share
  // `amax`, the result of largest_magnitude; a `seed` has elements rounded stochastically. Throws heddle::Error as largest_magnitude does.
  static QuantizedWeight quantize(const std::string& name, const Tensor& weight, const QuantSpec& spec, const Tensor& amax = {},
                                  std::optional<std::uint64_t> seed = {});

  const QuantSpec& spec() const { return spec_; }
  std::int64_t out_features() const { return out_; }
  std::int64_t in_features() const { return in_; }
  const Parts& parts() const { return parts_; }
  Device device() const { return parts_.codes.device(); }
  std::int64_t nbytes() const;
  double bits_per_weight() const;  // scales included
  QuantView view() const;

  Tensor dequantize(DType dtype) const;  // [out, in], outside the graph
  QuantizedWeight to(Device device) const;
  // Throws heddle::Error for true: there is no gradient of a quantised weight.
  void set_requires_grad(bool value) const;

 private:
  QuantizedWeight(const QuantSpec& spec, std::int64_t out_features, std::int64_t in_features, const Parts& parts)
      : spec_(spec), out_(out_features), in_(in_features), parts_(parts) {}

  QuantSpec spec_;
  std::int64_t out_, in_;
  Parts parts_;
};

// The largest |weight| as float32 [1]. Throws heddle::Error naming `name` and the index if a weight is NaN, infinite, or so large
// (above 2^126) that what is read back might be infinite.
Tensor largest_magnitude(const std::string& name, const Tensor& weight);

// What quantising weights has cost.
struct QuantError {
  std::int64_t count = 0, zeroed = 0;  // weights, and those of them that were not 0 and are now
  double signal = 0, noise = 0;        // sum of w^2 and of (w - q)^2
  double largest = 0, worst = 0;       // largest |w| and |w - q|

  double mse() const;
  double sqnr_db() const;  // 10 log10(signal / noise), infinite without noise
  double peak() const;     // largest |w| over the root mean square: how far an outlier sticks out
  void add(const QuantError& other);
};
// Of weights on one device, found there.
QuantError quant_error(const Tensor& weight, const QuantizedWeight& quantized);

}  // namespace heddle::quant
