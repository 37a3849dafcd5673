#include "kernels/runtime/probe_cuda.h"

namespace heddle::cuda {
namespace {

__global__ void probe_kernel() {}

}  // namespace

cudaError_t load_probe() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, probe_kernel);
}

}  // namespace heddle::cuda
