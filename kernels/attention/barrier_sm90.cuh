#pragma once

#include <cstdint>

// Shared-memory transaction barriers (mbarrier), named barriers and register reallocation of sm_90.
// PTX ISA, "Parallel synchronization and communication instructions: mbarrier", "bar", "setmaxnreg".

namespace heddle::cuda::sm90 {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// One 64-bit barrier in shared memory. A phase ends when `count` arrivals and all announced bytes are in.
struct Barrier {
  std::uint64_t state;

  __device__ void init(std::uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(count));
  }
  __device__ void arrive() {
    asm volatile("{ .reg .b64 token; mbarrier.arrive.shared::cta.b64 token, [%0]; }" ::"r"(shared_address(this)) : "memory");
  }
  // Arrives and announces `nbytes` that asynchronous copies will deliver in this phase.
  __device__ void arrive_expect(std::uint32_t nbytes) {
    asm volatile("{ .reg .b64 token; mbarrier.arrive.expect_tx.shared::cta.b64 token, [%0], %1; }" ::"r"(shared_address(this)),
                 "r"(nbytes)
                 : "memory");
  }
  // Waits until the phase with this parity has ended. A fresh barrier is in phase 0: waiting on parity 1 passes at once.
  __device__ void wait(std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

// Makes barrier initialisation visible to the asynchronous copy engine.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders ordinary shared-memory writes before asynchronous reads of them.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders asynchronous copies to global memory and ordinary accesses to it.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// True on one thread of the warp, always the same, where all threads are; the compiler then knows that there is only one.
__device__ __forceinline__ bool elect_one() {
  std::uint32_t chosen;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
  return chosen != 0;
}

// Named barrier `id` (1..15) over `threads` threads: wait for all, or arrive without waiting.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits for all, and returns whether `fact` holds on one of them.
__device__ __forceinline__ bool named_any(int id, int threads, bool fact) {
  std::uint32_t any;
  asm volatile(
      "{ .reg .pred mine, any; setp.ne.u32 mine, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, mine; selp.u32 %0, 1, 0, any; }"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<std::uint32_t>(fact))
      : "memory");
  return any != 0;
}

// Registers a thread of the calling warpgroup may use from here on.
template <int kCount>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace heddle::cuda::sm90
