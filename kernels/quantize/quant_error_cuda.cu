#include "kernels/quantize/chunk.cuh"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/group.cuh"

namespace heddle::cuda {
namespace {

constexpr std::int64_t kTile = std::int64_t{1} << 22;  // elements decoded at a time, 16 MiB of them: they stay in the second-level cache
constexpr int kParts = 1024;                           // blocks, each with sums of its own over all tiles

// In the order of QuantErrorArgs::sums.
struct Sums {
  double signal, noise, largest, worst, zeroed;

  __device__ void add(double value, double read) {
    const double error = value - read;
    signal += value * value;
    noise += error * error;
    largest = fmax(largest, fabs(value));
    worst = fmax(worst, fabs(error));
    zeroed += value != 0 && read == 0 ? 1 : 0;
  }
  __device__ void add(const Sums& other) {
    signal += other.signal;
    noise += other.noise;
    largest = fmax(largest, other.largest);
    worst = fmax(worst, other.worst);
    zeroed += other.zeroed;
  }
  __device__ Sums of_block() const {
    constexpr auto larger = [](double a, double b) { return fmax(a, b); };
    return {sum_group<kBlock>(signal), sum_group<kBlock>(noise), reduce_group<kBlock>(largest, larger), reduce_group<kBlock>(worst, larger),
            sum_group<kBlock>(zeroed)};
  }
};

// Adds the tile of rows x [rows, columns], a stride apart, and what they read as, dense, to the sums of the blocks.
template <typename T>
__global__ void compare_kernel(const T* x, std::int64_t stride, const float* read, std::int64_t rows, std::int64_t columns, Sums* parts) {
  Sums own = {};
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < rows * columns; i += kParts * kBlock)
    own.add(convert<float>(x[i / columns * stride + i % columns]), read[i]);
  const Sums sums = own.of_block();
  if (threadIdx.x == 0) parts[blockIdx.x].add(sums);
}

__global__ void total_kernel(const Sums* parts, Sums* out) {
  Sums own = {};
  for (int i = threadIdx.x; i < kParts; i += kBlock) own.add(parts[i]);
  const Sums sums = own.of_block();
  if (threadIdx.x == 0) *out = sums;
}

}  // namespace

void quant_error(const QuantErrorArgs& args, const ExecContext& ctx) {
  const std::int64_t rows = args.x.shape[0], columns = args.x.shape[1];
  const std::int64_t height = std::clamp<std::int64_t>(kTile / std::max<std::int64_t>(columns, 1), 1, std::max<std::int64_t>(rows, 1));
  const Buffer memory(height * columns * static_cast<std::int64_t>(sizeof(float)), ctx.device);
  const Buffer sums(kParts * static_cast<std::int64_t>(sizeof(Sums)), ctx.device);
  auto* parts = static_cast<Sums*>(sums.data());
  HEDDLE_CUDA_CHECK(cudaMemsetAsync(parts, 0, static_cast<std::size_t>(sums.nbytes()), stream_of(ctx)));
  for (std::int64_t first = 0; first < rows && columns > 0; first += height) {
    const std::int64_t count = std::min(height, rows - first);
    cuda::dequantize({.w = args.w, .first_row = first, .out = {memory.data(), DType::f32, ctx.device, {count, columns}, {columns, 1}}}, ctx);
    dispatch_stored(args.x.dtype, "quant_error", [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T* x = args.x.as<T>() + first * args.x.strides[0];
      compare_kernel<<<kParts, kBlock, 0, stream_of(ctx)>>>(x, args.x.strides[0], static_cast<const float*>(memory.data()), count, columns, parts);
    });
    check_launch("quant_error");
  }
  total_kernel<<<1, kBlock, 0, stream_of(ctx)>>>(parts, reinterpret_cast<Sums*>(args.sums.as<double>()));
  check_launch("quant_error");
}

}  // namespace heddle::cuda
