#include "kernels/attention/forward_sm80.cuh"

namespace heddle::cuda::sm80 {

template void forward_with<Shapes<128>::Forward>(const ForwardParams& p, DType dtype, cudaStream_t stream);

}  // namespace heddle::cuda::sm80
