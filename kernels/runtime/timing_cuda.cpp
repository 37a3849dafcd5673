#include <memory>

#include "kernels/runtime/allocator.h"
#include "kernels/runtime/launch.cuh"
#include "kernels/runtime/timing.h"

namespace heddle::cuda {
namespace {

class Event {
 public:
  Event() { HEDDLE_CUDA_CHECK(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // In a capture the event becomes a node of the graph, recorded whenever the graph runs.
  void record(cudaStream_t stream, Launch launch) const {
    HEDDLE_CUDA_CHECK(cudaEventRecordWithFlags(event_, stream, launch == Launch::graph ? cudaEventRecordExternal : cudaEventRecordDefault));
  }
  double seconds_since(const Event& start) const {
    float ms = 0;
    HEDDLE_CUDA_CHECK(cudaEventElapsedTime(&ms, start.event_, event_));
    return ms / 1000.0;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Captures what `enqueue` puts on the stream, runs it and waits for it.
void run_as_graph(const std::function<void()>& enqueue, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  HEDDLE_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  HEDDLE_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  const std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> owned(graph, cudaGraphDestroy);
  cudaGraphExec_t program = nullptr;
  HEDDLE_CUDA_CHECK(cudaGraphInstantiate(&program, graph, 0));
  const std::unique_ptr<CUgraphExec_st, decltype(&cudaGraphExecDestroy)> owned_program(program, cudaGraphExecDestroy);
  HEDDLE_CUDA_CHECK(cudaGraphLaunch(program, stream));
  HEDDLE_CUDA_CHECK(cudaStreamSynchronize(stream));
}

}  // namespace

void time_runs(const TimeRunsArgs& args, const ExecContext& ctx) {
  constexpr std::int64_t kFlushBytes = 256 << 20;  // more than any L2 cache; an H200 has 50 MB
  const cudaStream_t stream = stream_of(ctx);
  const Buffer flush(kFlushBytes, ctx.device);
  const auto count = static_cast<std::size_t>(args.runs);
  const std::vector<Event> starts(count), stops(count);
  const auto enqueue = [&] {
    for (std::size_t i = 0; i < count; ++i) {
      HEDDLE_CUDA_CHECK(cudaMemsetAsync(flush.data(), 0, kFlushBytes, stream));
      starts[i].record(stream, args.launch);
      args.work();
      stops[i].record(stream, args.launch);
    }
  };
  if (args.launch == Launch::graph) run_as_graph(enqueue, stream);
  else enqueue();
  synchronise(ctx.device.index);
  for (std::size_t i = 0; i < count; ++i) args.seconds.push_back(stops[i].seconds_since(starts[i]));
}

}  // namespace heddle::cuda
