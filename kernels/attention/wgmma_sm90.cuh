#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/attention/barrier_sm90.cuh"

// Warpgroup matrix products of sm_90: D[64, N] = A[64, 16] B[16, N] + D with float accumulators, issued by 128 threads.
// PTX ISA, "Asynchronous warpgroup level matrix instructions".

namespace heddle::cuda::sm90 {

// Note: Shared-memory matrix descriptors
// Tiles are stored as panels of 64 columns (128 bytes a row), 128-byte swizzled, each panel on a 1024-byte boundary.
//   K-major operand (columns are the summed dimension): 8 rows are 1024 bytes apart; a step of 16 columns adds 32 bytes
//     inside the swizzle atom, which the hardware resolves.
//   MN-major operand (rows are the summed dimension): 8 rows are 1024 bytes apart, panels `panel_nbytes`; a step of 16
//     rows adds 2048 bytes.
// Fields: start address >> 4 in bits 0-13, leading offset >> 4 in 16-29, stride offset >> 4 in 32-45, swizzle in 62-63.
__device__ __forceinline__ std::uint64_t matrix_descriptor(const void* tile, std::uint32_t leading_nbytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kStride1024 = std::uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kStride1024 | (std::uint64_t{leading_nbytes >> 4} << 16) |
         ((shared_address(tile) & 0x3FFFFu) >> 4);
}

// The descriptor of what lies `nbytes` further; tiles are whole in the 18 bits that hold an address.
__device__ __forceinline__ std::uint64_t advance(std::uint64_t descriptor, std::uint32_t nbytes) { return descriptor + (nbytes >> 4); }

// Before the first product of a batch, and after ordinary code wrote its accumulators or register operands.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending committed batches are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements to shared memory: register m of lane l holds columns 2 (l % 4) and the next of row l / 4 of
// matrix m, and lanes 8 m to 8 m + 7 give the addresses of its rows.
__device__ __forceinline__ void store_matrices(void* row, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// How an operand lies in shared memory; see the note above.
enum class Major { k = 0, mn = 1 };

// Wgmma<T, N>::shared<a, b>: A and B from shared memory. Wgmma<T, N>::registers<b>: A from registers, B MN-major if not said.
// `accumulate` false overwrites d.
template <typename T, int kColumns>
struct Wgmma;

#define HEDDLE_REGS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HEDDLE_REGS_64 HEDDLE_REGS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HEDDLE_ACC_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define HEDDLE_ACC_32(d) HEDDLE_ACC_8(d, 0), HEDDLE_ACC_8(d, 8), HEDDLE_ACC_8(d, 16), HEDDLE_ACC_8(d, 24)
#define HEDDLE_ACC_64(d) \
  HEDDLE_ACC_32(d), HEDDLE_ACC_8(d, 32), HEDDLE_ACC_8(d, 40), HEDDLE_ACC_8(d, 48), HEDDLE_ACC_8(d, 56)

// o0..o5 are the operands after the accumulators.
#define HEDDLE_WGMMA(type, ptx_type, columns, regs, o0, o1, o2, o3, o4, o5, o6)                                             \
  template <>                                                                                                               \
  struct Wgmma<type, columns> {                                                                                             \
    template <Major kA = Major::k, Major kB = Major::k>                                                                     \
    __device__ __forceinline__ static void shared(float (&d)[regs], std::uint64_t a, std::uint64_t b, bool accumulate) {    \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " o2 ", 0;\n"                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." ptx_type " {" HEDDLE_REGS_##regs "}, "           \
                   o0 ", " o1 ", p, 1, 1, " o3 ", " o4 "; }\n"                                                              \
                   : HEDDLE_ACC_##regs(d)                                                                                   \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kA)), "n"(static_cast<int>(kB))); \
    }                                                                                                                       \
    template <Major kB = Major::mn>                                                                                         \
    __device__ __forceinline__ static void registers(float (&d)[regs], const std::uint32_t* a, std::uint64_t b,             \
                                                     bool accumulate) {                                                     \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " o5 ", 0;\n"                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." ptx_type " {" HEDDLE_REGS_##regs "}, "           \
                   "{" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", p, 1, 1, " o6 "; }\n"                                           \
                   : HEDDLE_ACC_##regs(d)                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kB))); \
    }                                                                                                                       \
  };

#define HEDDLE_WGMMA_BOTH(columns, regs, ...)                                 \
  HEDDLE_WGMMA(__nv_bfloat16, "bf16.bf16", columns, regs, __VA_ARGS__)        \
  HEDDLE_WGMMA(__half, "f16.f16", columns, regs, __VA_ARGS__)

HEDDLE_WGMMA_BOTH(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
HEDDLE_WGMMA_BOTH(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")

#undef HEDDLE_WGMMA_BOTH
#undef HEDDLE_WGMMA
#undef HEDDLE_ACC_64
#undef HEDDLE_ACC_32
#undef HEDDLE_ACC_8
#undef HEDDLE_REGS_64
#undef HEDDLE_REGS_32

}  // namespace heddle::cuda::sm90
