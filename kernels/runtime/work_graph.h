#pragma once

#include <functional>

#include "kernels/runtime/device.h"

namespace heddle {

// Work of a CUDA device that is recorded once and then started as a whole, any number of times: the same kernels with the same
// arguments on the same memory. For work that the host takes longer to issue than the device to do.
//
// Note: Recorded work
// While it is recorded, work
//   - neither waits for the device nor copies between it and the host: that throws heddle::Error;
//   - frees all device memory that it allocates, and no other: the graph keeps that memory, at the same addresses, for itself;
//   - meets nothing for the first time (plans, workspaces): it must have been done once unrecorded.
// Numbers that change from one start to the next lie in device memory, where they are written before the start.
class WorkGraph {
 public:
  // Records what `issue` gives to the device's stream; none of it is done yet. Throws heddle::Error for the CPU, and what
  // `issue` throws.
  WorkGraph(Device device, const std::function<void()>& issue);
  ~WorkGraph();
  WorkGraph(const WorkGraph&) = delete;
  WorkGraph& operator=(const WorkGraph&) = delete;

  // Returns as soon as the work is handed to the device, in order with all its other work.
  void start() const;

 private:
  Device device_;
  void* graph_ = nullptr;  // a cudaGraphExec_t
};

}  // namespace heddle
