#pragma once

#include <functional>
#include <vector>

#include "kernels/runtime/context.h"

namespace heddle {

enum class Launch { stream, graph };

// Seconds that each of `runs` calls of `work` takes on the context's device, its caches flushed before every call.
//   CPU    wall time
//   CUDA   between two events on the context's stream. With Launch::graph all calls are captured in one graph, so that no launch
//          waits for the host: what `work` does must have run once before, must stay on the stream and must not wait for it.
//   seconds  written (=): one value a run, in order
// Throws what `work` throws, heddle::Error if runs < 1 or on a CUDA failure.
struct TimeRunsArgs {
  std::function<void()> work;
  int runs = 1;
  Launch launch = Launch::stream;
  std::vector<double>& seconds;
};
void time_runs(const TimeRunsArgs& args, const ExecContext& ctx);

namespace cpu {
void time_runs(const TimeRunsArgs& args, const ExecContext& ctx);
}
namespace cuda {
void time_runs(const TimeRunsArgs& args, const ExecContext& ctx);
}

}  // namespace heddle
