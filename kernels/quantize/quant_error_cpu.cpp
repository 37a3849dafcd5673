#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "kernels/quantize/quantize.h"
#include "kernels/runtime/parallel.h"

namespace heddle::cpu {
namespace {

// In the order of QuantErrorArgs::sums.
struct Sums {
  double signal = 0, noise = 0, largest = 0, worst = 0, zeroed = 0;

  void add(double value, double read) {
    const double error = value - read;
    signal += value * value;
    noise += error * error;
    largest = std::max(largest, std::abs(value));
    worst = std::max(worst, std::abs(error));
    zeroed += value != 0 && read == 0 ? 1 : 0;
  }
  void add(const Sums& other) {
    signal += other.signal;
    noise += other.noise;
    largest = std::max(largest, other.largest);
    worst = std::max(worst, other.worst);
    zeroed += other.zeroed;
  }
};

template <typename T>
Sums sums_of(const QuantErrorArgs& args, const ExecContext& ctx) {
  const std::int64_t rows = args.x.shape[0], columns = args.x.shape[1];
  std::array<Sums, kReductionChunks> parts;
  std::vector<float> memory(static_cast<std::size_t>(kReductionChunks * columns));  // a row of each chunk as it reads
  parallel_for(kReductionChunks, 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t chunk = from; chunk < to; ++chunk) {
      float* read = memory.data() + chunk * columns;
      const MutView row = {read, DType::f32, args.x.device, {1, columns}, {columns, 1}};
      Sums own;
      for (std::int64_t r = rows * chunk / kReductionChunks; r < rows * (chunk + 1) / kReductionChunks; ++r) {
        cpu::dequantize({.w = args.w, .first_row = r, .out = row}, ctx);
        const T* x = args.x.as<T>() + r * args.x.strides[0];
        for (std::int64_t c = 0; c < columns; ++c) own.add(static_cast<double>(static_cast<float>(x[c])), static_cast<double>(read[c]));
      }
      parts[static_cast<std::size_t>(chunk)] = own;
    }
  });
  Sums out;
  for (const Sums& part : parts) out.add(part);
  return out;
}

}  // namespace

void quant_error(const QuantErrorArgs& args, const ExecContext& ctx) {
  Sums sums;
  if (args.x.numel() > 0)
    dispatch_float(args.x.dtype, "quant_error", [&](auto tag) { sums = sums_of<typename decltype(tag)::type>(args, ctx); });
  std::ranges::copy(std::array{sums.signal, sums.noise, sums.largest, sums.worst, sums.zeroed}, args.sums.as<double>());
}

}  // namespace heddle::cpu
