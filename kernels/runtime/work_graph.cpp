#include "kernels/runtime/work_graph.h"

#include "kernels/runtime/check.h"
#if HEDDLE_WITH_CUDA
#include "kernels/runtime/device_cuda.h"
#endif

namespace heddle {

WorkGraph::WorkGraph(Device device, [[maybe_unused]] const std::function<void()>& issue) : device_(device) {
  HEDDLE_CHECK(device.is_cuda(), "work_graph: only the work of a CUDA device can be recorded, not that of ", device);
#if HEDDLE_WITH_CUDA
  graph_ = cuda::record(issue, device.index);
#endif
}

WorkGraph::~WorkGraph() {
#if HEDDLE_WITH_CUDA
  if (graph_ != nullptr) cuda::forget_recorded(static_cast<cudaGraphExec_t>(graph_), device_.index);
#endif
}

void WorkGraph::start() const {
#if HEDDLE_WITH_CUDA
  cuda::start_recorded(static_cast<cudaGraphExec_t>(graph_), device_.index);
#endif
}

}  // namespace heddle
