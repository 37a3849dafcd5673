#include "kernels/runtime/device_cuda.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <string_view>
#include <utility>

#include "kernels/runtime/cuda_check.h"
#include "kernels/runtime/host_copy.h"
#include "kernels/runtime/probe_cuda.h"

namespace heddle::cuda {
namespace {

constexpr int kLeastCapability = 80;

// A failed count, for want of a driver or because it is too old, means no devices.
int device_count(std::string& reason) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (status == cudaErrorInsufficientDriver && driver > 0)
    reason = concat_text("the driver supports CUDA ", driver / 1000, ".", driver % 1000 / 10, ", this build needs ",
                         runtime / 1000, ".", runtime % 1000 / 10, "; install a newer driver");
  else
    reason = concat_text("no CUDA device was found (", status == cudaSuccess ? "none visible" : cudaGetErrorString(status),
                         "); use device cpu");
  return 0;
}

// A ring of pinned buffers, each with the event after its last copy.
struct UploadRing {
  std::mutex mutex;
  std::byte* memory = nullptr;
  std::array<cudaEvent_t, kUploads> events{};
  int next = 0;
};

// Slots of HostCopy::kMaxBytes of pinned memory, each with the event after its copy.
struct HostCopies {
  static constexpr int kSlots = 32;
  std::mutex mutex;
  std::byte* memory = nullptr;
  std::array<cudaEvent_t, kSlots> events{};
  std::array<bool, kSlots> is_used{};

  std::byte* slot(int i) const { return memory + i * HostCopy::kMaxBytes; }
  cudaEvent_t event(int i) const { return events[static_cast<std::size_t>(i)]; }
};

// Per-device state, made on first use and kept until the process ends.
struct DeviceState {
  std::once_flag once;
  DeviceInfo info;
  cudaStream_t stream = nullptr;
  unsigned* counters = nullptr;
  FaultSlot faults;
  UploadRing uploads;
  HostCopies host_copies;
  std::atomic<std::int64_t> waits{0};
  std::atomic<bool> is_recording{false};
};

// Whether the driver finds code of this build for the device, in machine code or in PTX that it can compile.
cudaError_t find_kernel_image(int index) {
  int before = 0;
  cudaGetDevice(&before);
  cudaError_t status = cudaSetDevice(index);
  if (status == cudaSuccess) status = load_probe();
  cudaGetLastError();
  cudaSetDevice(before);
  return status;
}

int attribute(cudaDeviceAttr name, int index) {
  int value = 0;
  HEDDLE_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, index));
  return value;
}

void set_up(DeviceState& state, int index) {
  HEDDLE_CUDA_CHECK(cudaSetDevice(index));
  state.info = {.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index),
                .capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                              attribute(cudaDevAttrComputeCapabilityMinor, index),
                .shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index)};
  HEDDLE_CUDA_CHECK(cudaStreamCreateWithFlags(&state.stream, cudaStreamNonBlocking));
  // The pool keeps freed memory for the next step instead of returning it to the driver at each synchronisation.
  cudaMemPool_t pool = nullptr;
  HEDDLE_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, index));
  std::uint64_t threshold = std::numeric_limits<std::uint64_t>::max();
  HEDDLE_CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  HEDDLE_CUDA_CHECK(cudaMalloc(&state.counters, 2 * sizeof(unsigned)));
  HEDDLE_CUDA_CHECK(cudaMemset(state.counters, 0, 2 * sizeof(unsigned)));
  HEDDLE_CUDA_CHECK(cudaMalloc(&state.faults.claimed, sizeof(unsigned)));
  HEDDLE_CUDA_CHECK(cudaMemset(state.faults.claimed, 0, sizeof(unsigned)));
  HEDDLE_CUDA_CHECK(cudaMallocHost(&state.faults.fault, sizeof(Fault)));
  *state.faults.fault = {};
  HEDDLE_CUDA_CHECK(cudaMallocHost(&state.uploads.memory, kUploads * kUploadBytes));
  HEDDLE_CUDA_CHECK(cudaMallocHost(&state.host_copies.memory, HostCopies::kSlots * HostCopy::kMaxBytes));
  for (cudaEvent_t& event : state.uploads.events) HEDDLE_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  for (cudaEvent_t& event : state.host_copies.events) HEDDLE_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
}

DeviceState& state_of(int index) {
  static std::array<DeviceState, kMaxCudaDevices> states;
  HEDDLE_CHECK(index >= 0 && index < kMaxCudaDevices, "cuda: device index ", index, " is not below ", kMaxCudaDevices);
  DeviceState& state = states[static_cast<std::size_t>(index)];
  std::call_once(state.once, set_up, std::ref(state), index);
  return state;
}

// `what` was asked for, which is no part of a graph.
void check_not_recording(const DeviceState& state, const char* what) {
  HEDDLE_CHECK(!state.is_recording, "work_graph: ", what, " within recorded work; do it before or after");
}

bool waits_after_launches() {
  static const bool waits = [] {
    const char* value = std::getenv("HEDDLE_CUDA_SYNC");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return waits;
}

// Throws the fault that a kernel has reported, once.
void throw_fault(const DeviceState& state) {
  const Fault fault = std::exchange(*state.faults.fault, Fault{});
  if (fault.describe == nullptr) return;
  HEDDLE_CUDA_CHECK(cudaMemsetAsync(state.faults.claimed, 0, sizeof(unsigned), state.stream));
  throw Error(fault.describe(fault));
}

}  // namespace

DeviceSupport device_support(int index) {
  std::string reason;
  const int count = device_count(reason);
  if (count == 0) return {false, reason};
  if (index >= count) return {false, concat_text("there are only ", count, " CUDA devices")};
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  if (10 * major + minor < kLeastCapability)
    return {false, concat_text("compute capability ", major, ".", minor, " is below 8.0, the oldest this build has kernels for")};
  const cudaError_t status = find_kernel_image(index);
  if (status == cudaSuccess) return {true, ""};
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion)
    return {false, concat_text("this build has kernels for " HEDDLE_CUDA_ARCHITECTURES ", the device is ", 10 * major + minor,
                               "; build with -DCMAKE_CUDA_ARCHITECTURES=", 10 * major + minor)};
  return {false, concat_text("the device cannot be used: ", cudaGetErrorString(status))};
}

void use_device(int index) { HEDDLE_CUDA_CHECK(cudaSetDevice(index)); }

const DeviceInfo& device_info(int index) { return state_of(index).info; }

cudaStream_t stream(int index) { return state_of(index).stream; }

unsigned* schedule_counters(int index) { return state_of(index).counters; }

void* allocate(std::int64_t nbytes, int index) {
  void* memory = nullptr;
  const cudaError_t status = cudaMallocAsync(&memory, static_cast<std::size_t>(nbytes), stream(index));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  HEDDLE_CUDA_CHECK(status);
  return memory;
}

void upload(void* to, const void* from, std::int64_t nbytes, int index) {
  DeviceState& state = state_of(index);
  check_not_recording(state, "a copy to the device");
  const auto size = static_cast<std::size_t>(nbytes);
  if (nbytes > kUploadBytes) {
    state.waits += 1;
    HEDDLE_CUDA_CHECK(cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, state.stream));
    return;
  }
  UploadRing& ring = state.uploads;
  const std::lock_guard lock(ring.mutex);
  const int slot = std::exchange(ring.next, (ring.next + 1) % kUploads);
  cudaEvent_t event = ring.events[static_cast<std::size_t>(slot)];
  HEDDLE_CUDA_CHECK(cudaEventSynchronize(event));
  std::byte* pinned = ring.memory + slot * kUploadBytes;
  std::memcpy(pinned, from, size);
  HEDDLE_CUDA_CHECK(cudaMemcpyAsync(to, pinned, size, cudaMemcpyHostToDevice, state.stream));
  HEDDLE_CUDA_CHECK(cudaEventRecord(event, state.stream));
}

FaultSlot fault_slot(int index) { return state_of(index).faults; }

std::int64_t wait_count(int index) { return state_of(index).waits; }

int start_host_copy(const void* from, std::int64_t nbytes, int index) {
  DeviceState& state = state_of(index);
  check_not_recording(state, "a copy to the host");
  HostCopies& copies = state.host_copies;
  const std::lock_guard lock(copies.mutex);
  const auto free = std::find(copies.is_used.begin(), copies.is_used.end(), false);
  HEDDLE_CHECK(free != copies.is_used.end(), "host_copy: ", HostCopies::kSlots, " copies are held already");
  const auto slot = static_cast<int>(free - copies.is_used.begin());
  HEDDLE_CUDA_CHECK(cudaMemcpyAsync(copies.slot(slot), from, static_cast<std::size_t>(nbytes), cudaMemcpyDeviceToHost, state.stream));
  HEDDLE_CUDA_CHECK(cudaEventRecord(copies.event(slot), state.stream));
  *free = true;
  return slot;
}

bool is_host_copy_ready(int slot, int index) {
  const cudaError_t status = cudaEventQuery(state_of(index).host_copies.event(slot));
  HEDDLE_CHECK(status == cudaSuccess || status == cudaErrorNotReady, "cuda: ", cudaGetErrorString(status));
  return status == cudaSuccess;
}

const void* wait_for_host_copy(int slot, int index) {
  const DeviceState& state = state_of(index);
  HEDDLE_CUDA_CHECK(cudaEventSynchronize(state.host_copies.event(slot)));
  throw_fault(state);
  return state.host_copies.slot(slot);
}

void end_host_copy(int slot, int index) noexcept {
  HostCopies& copies = state_of(index).host_copies;
  const std::lock_guard lock(copies.mutex);
  copies.is_used[static_cast<std::size_t>(slot)] = false;
}

cudaGraphExec_t record(const std::function<void()>& issue, int index) {
  HEDDLE_CHECK(!waits_after_launches(), "work_graph: HEDDLE_CUDA_SYNC=1 waits after every kernel, which recorded work cannot; unset it");
  synchronise(index);
  // The graph allocates memory of its own, so what the pool keeps goes back first.
  cudaMemPool_t pool = nullptr;
  HEDDLE_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, index));
  HEDDLE_CUDA_CHECK(cudaMemPoolTrimTo(pool, 0));
  DeviceState& state = state_of(index);
  HEDDLE_CUDA_CHECK(cudaStreamBeginCapture(state.stream, cudaStreamCaptureModeThreadLocal));
  state.is_recording = true;
  std::exception_ptr failure;
  try {
    issue();
  } catch (...) {
    failure = std::current_exception();
  }
  state.is_recording = false;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t out = nullptr;
  cudaError_t status = cudaStreamEndCapture(state.stream, &graph);
  if (status == cudaSuccess && !failure) status = cudaGraphInstantiate(&out, graph, 0);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
  if (failure) std::rethrow_exception(failure);
  HEDDLE_CHECK(status == cudaSuccess, "work_graph: the work cannot be recorded: ", cudaGetErrorString(status));
  return out;
}

void start_recorded(cudaGraphExec_t graph, int index) { HEDDLE_CUDA_CHECK(cudaGraphLaunch(graph, state_of(index).stream)); }

void forget_recorded(cudaGraphExec_t graph, int index) noexcept {
  cudaStreamSynchronize(state_of(index).stream);
  cudaGraphExecDestroy(graph);
  cudaDeviceGraphMemTrim(index);
}

void synchronise(int index) {
  DeviceState& state = state_of(index);
  check_not_recording(state, "a wait for the device");
  state.waits += 1;
  HEDDLE_CUDA_CHECK(cudaStreamSynchronize(state.stream));
  throw_fault(state);
}

// A failure here means that the context is gone, or the graph that the memory was recorded for, and the memory with it.
void release(void* memory, int index) noexcept {
  if (cudaFreeAsync(memory, state_of(index).stream) != cudaSuccess) cudaGetLastError();
}

void check_launch(const char* op) {
  cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess && waits_after_launches()) status = cudaDeviceSynchronize();
  HEDDLE_CHECK(status == cudaSuccess, op, ": CUDA kernel failed: ", cudaGetErrorString(status));
}

}  // namespace heddle::cuda
