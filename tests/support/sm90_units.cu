#include "tests/support/sm90_units.h"

#include "kernels/attention/attention_sm90.h"
#include "kernels/attention/tma_sm90.cuh"
#include "kernels/attention/wgmma_sm90.cuh"
#include "kernels/runtime/cuda_check.h"

namespace heddle::test {
namespace {

using namespace cuda::sm90;

constexpr int kThreads = 128;
constexpr int kMemory = (64 + 128) * 256 + 1024;  // both operands at N = K = 128, and room to align

__device__ std::uint8_t* aligned_memory() {
  extern __shared__ std::uint8_t memory[];
  return memory + (1024 - shared_address(memory) % 1024) % 1024;
}

// Loads the first `rows` rows of a [1, S, 1, C] map as panels of 64 columns.
__device__ void load_panels(std::uint8_t* to, const CUtensorMap* map, int rows, int columns, Barrier* full) {
  for (int panel = 0; panel < columns / kPanelColumns; ++panel)
    tma_load(to + panel * rows * 128, map, full, panel * kPanelColumns, 0, 0, 0);
}

template <typename T, int kN, Operands kOperands>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, const T* a, float* c, int K) {
  __shared__ Barrier full;
  constexpr bool kIsShared = kOperands == Operands::shared;
  std::uint8_t* const a_tile = aligned_memory();
  std::uint8_t* const b_tile = a_tile + 64 * K * 2;
  if (threadIdx.x == 0) {
    full.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    full.arrive_expect((64 + kN) * K * 2);
    load_panels(a_tile, &a_map, 64, K, &full);
    load_panels(b_tile, &b_map, kIsShared ? kN : K, kIsShared ? K : kN, &full);
  }
  full.wait(0);

  float sum[kN / 2];
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
  for (int step = 0; step < K / 16; ++step) {
    const int panel = step / 4, offset = step % 4 * 32;
    const auto b = kIsShared ? matrix_descriptor(b_tile + panel * kN * 128 + offset, 16) : matrix_descriptor(b_tile + step * 2048, K * 128);
    wgmma_fence();
    if constexpr (kOperands == Operands::registers) {
      std::uint32_t fragment[4];
      for (int i = 0; i < 4; ++i)
        fragment[i] = *reinterpret_cast<const std::uint32_t*>(a + (row + i % 2 * 8) * K + step * 16 + i / 2 * 8 + pair);
      Wgmma<T, kN>::registers(sum, fragment, b, step > 0);
    } else {
      Wgmma<T, kN>::shared(sum, matrix_descriptor(a_tile + panel * 64 * 128 + offset, 16), b, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }
  for (int i = 0; i < kN / 2; ++i) c[(row + i % 4 / 2 * 8) * kN + i / 4 * 8 + pair + i % 2] = sum[i];
}

__global__ void box_kernel(const __grid_constant__ CUtensorMap map, int rows, BoxCorner corner, std::uint8_t* out) {
  __shared__ Barrier full;
  std::uint8_t* const tile = aligned_memory();
  if (threadIdx.x == 0) {
    full.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    full.arrive_expect(rows * 128);
    tma_load(tile, &map, &full, corner.column, corner.row, corner.head, corner.batch);
  }
  full.wait(0);
  for (int i = threadIdx.x; i < rows * 128; i += blockDim.x) out[i] = tile[i];
}

__global__ void copy_box_kernel(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, int rows, BoxCorner corner) {
  __shared__ Barrier full;
  std::uint8_t* const tile = aligned_memory();
  full.init(1);
  fence_barrier_init();
  full.arrive_expect(rows * 128);
  tma_load(tile, &from, &full, corner.column, corner.row, corner.head, corner.batch);
  full.wait(0);
  tma_store(&to, tile, corner.column, corner.row, corner.head, corner.batch);
  bulk_commit();
  bulk_wait();
}

// A dense matrix as the [B, S, H, D] view that tensor_map takes.
ConstView as_rows(ConstView matrix) {
  const std::int64_t S = matrix.shape[0], D = matrix.shape[1];
  matrix.shape = {1, S, 1, D};
  matrix.strides = {S * D, D, D, 1};
  return matrix;
}

template <typename T, int kN, Operands kOperands>
void launch_product(const ConstView& a, const ConstView& b, const MutView& c, const ExecContext& ctx) {
  const auto map = [](const ConstView& x) { return tensor_map(as_rows(x), static_cast<int>(x.shape[0])); };
  const auto kernel = product_kernel<T, kN, kOperands>;
  HEDDLE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMemory));
  const int K = static_cast<int>(a.shape[1]);
  kernel<<<1, kThreads, kMemory, static_cast<cudaStream_t>(ctx.stream)>>>(map(a), map(b), static_cast<const T*>(a.data),
                                                                          c.as<float>(), K);
  cuda::check_launch("product");
}

template <typename T, int kN>
void launch_product(Operands operands, const ConstView& a, const ConstView& b, const MutView& c, const ExecContext& ctx) {
  operands == Operands::shared ? launch_product<T, kN, Operands::shared>(a, b, c, ctx)
                               : launch_product<T, kN, Operands::registers>(a, b, c, ctx);
}

}  // namespace

void warpgroup_product(Operands operands, const ConstView& a, const ConstView& b, const MutView& c, const ExecContext& ctx) {
  const bool is_wide = c.shape[1] == 128;
  if (a.dtype == DType::bf16)
    is_wide ? launch_product<__nv_bfloat16, 128>(operands, a, b, c, ctx) : launch_product<__nv_bfloat16, 64>(operands, a, b, c, ctx);
  else
    is_wide ? launch_product<__half, 128>(operands, a, b, c, ctx) : launch_product<__half, 64>(operands, a, b, c, ctx);
}

void tma_box(const ConstView& view, int rows, const BoxCorner& corner, const MutView& out, const ExecContext& ctx) {
  HEDDLE_CUDA_CHECK(cudaFuncSetAttribute(box_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMemory));
  box_kernel<<<1, kThreads, kMemory, static_cast<cudaStream_t>(ctx.stream)>>>(tensor_map(view, rows), rows, corner,
                                                                              out.as<std::uint8_t>());
  cuda::check_launch("box");
}

void tma_copy_box(const ConstView& from, const MutView& to, int rows, const BoxCorner& corner, const ExecContext& ctx) {
  HEDDLE_CUDA_CHECK(cudaFuncSetAttribute(copy_box_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMemory));
  copy_box_kernel<<<1, 1, kMemory, static_cast<cudaStream_t>(ctx.stream)>>>(tensor_map(from, rows), tensor_map(to, rows), rows, corner);
  cuda::check_launch("box");
}

}  // namespace heddle::test
