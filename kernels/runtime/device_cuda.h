#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "kernels/runtime/device.h"

// What the rest of kernels/ needs of the CUDA runtime. Every function below throws heddle::Error on failure unless it says
// otherwise.

namespace heddle::cuda {

// Never throws: no driver, a driver too old, no such device or no code for it come back as the reason.
DeviceSupport device_support(int index);

// Makes the device the one that the calling thread's launches and allocations go to.
void use_device(int index);

struct DeviceInfo {
  int multiprocessors = 0;
  int capability = 0;  // 10 * major + minor
  int shared_bytes_per_block = 0;  // with opt-in
};
const DeviceInfo& device_info(int index);

// The one stream on which all work of a device is ordered.
cudaStream_t stream(int index);

// Two zeroed counters for kernels that hand out their tiles; a kernel leaves them zeroed.
unsigned* schedule_counters(int index);

// Stream-ordered memory from the device's pool. `allocate` returns null when memory is exhausted. `release` never throws.
void* allocate(std::int64_t nbytes, int index);
void release(void* memory, int index) noexcept;

// Copies host memory to the device in stream order; `from` may be reused at once. Up to kUploadBytes it never waits for the
// device, unless kUploads of them are under way: the bytes go through pinned memory, where the copy engine can fetch them later.
inline constexpr std::int64_t kUploadBytes = std::int64_t{1} << 20;
inline constexpr int kUploads = 16;
void upload(void* to, const void* from, std::int64_t nbytes, int index);

// Note: Faults
// A kernel cannot throw, and no step may wait for one. A kernel that meets a value it cannot use (a token id outside the
// vocabulary) poisons its output with NaN and reports the value through the device's fault slot; the first report is kept. It
// becomes a heddle::Error when the host next waits for the device anyway: `synchronise`, which every copy to the host calls.
struct Fault {
  std::string (*describe)(const Fault& fault) = nullptr;  // the message, made on the host; null while nothing is reported
  std::int64_t value = 0, position = 0, limit = 0, other = 0;
};
struct FaultSlot {
  unsigned* claimed = nullptr;  // device memory: not 0 once a report has been taken
  Fault* fault = nullptr;       // host memory that kernels can write
};
FaultSlot fault_slot(int index);

// HostCopy's part on the device: a slot of pinned memory and an event. `end_host_copy` gives the slot back and never throws.
int start_host_copy(const void* from, std::int64_t nbytes, int index);
bool is_host_copy_ready(int slot, int index);
const void* wait_for_host_copy(int slot, int index);  // throws a reported fault, once
void end_host_copy(int slot, int index) noexcept;

// WorkGraph's part on the device. `forget_recorded` waits for the graph's last start and never throws.
cudaGraphExec_t record(const std::function<void()>& issue, int index);
void start_recorded(cudaGraphExec_t graph, int index);
void forget_recorded(cudaGraphExec_t graph, int index) noexcept;

// Waits for all work of the device. Throws a reported fault, once.
void synchronise(int index);
std::int64_t wait_count(int index);

}  // namespace heddle::cuda
