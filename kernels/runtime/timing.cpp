#include "kernels/runtime/timing.h"

#include <chrono>
#include <cstring>

#include "kernels/runtime/allocator.h"
#include "kernels/runtime/dispatch.h"

namespace heddle {

void time_runs(const TimeRunsArgs& args, const ExecContext& ctx) {
  HEDDLE_CHECK(args.runs >= 1, "time_runs: needs at least one run, got ", args.runs);
  args.seconds.clear();
  HEDDLE_DISPATCH(ctx, time_runs, args);
}

namespace cpu {

void time_runs(const TimeRunsArgs& args, const ExecContext&) {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kFlushBytes = 64 << 20;  // more than the caches that one core can use
  const Buffer flush(kFlushBytes, kCpu);
  for (int i = 0; i < args.runs; ++i) {
    std::memset(flush.data(), i, kFlushBytes);
    const auto start = Clock::now();
    args.work();
    args.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
}

}  // namespace cpu
}  // namespace heddle
