#pragma once

#include <cuda_runtime.h>

namespace heddle::cuda {

// Asks the driver for the code of one kernel of this build on the current device.
cudaError_t load_probe();

}  // namespace heddle::cuda
