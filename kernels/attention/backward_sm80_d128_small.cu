#include "kernels/attention/backward_sm80.cuh"

namespace heddle::cuda::sm80 {

template void backward_with<Shapes<128>::SmallBackward>(const BackwardParams& p, DType dtype, cudaStream_t stream);

}  // namespace heddle::cuda::sm80
