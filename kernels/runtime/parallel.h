#pragma once

#include <cstdint>
#include <functional>

namespace heddle {

// Threads used by CPU kernels: OMP_NUM_THREADS if set, else every core. Throws ConfigError for one that is no number of threads.
// set_num_threads needs count >= 1, and no kernel may be running.
int num_cores();  // that this process may run on
int num_threads();
void set_num_threads(int count);

// Runs body(begin, end) over [0, count) cut into equal chunks of at least `grain` items, as many as threads. Runs
// inline when one chunk is enough or when already inside a parallel region. `body` must not throw.
void parallel_for(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body);

// Runs body(task) for every task in [0, count), tasks taken in order by whichever thread is free: for tasks of uneven
// length. `body` must not throw.
void parallel_tasks(std::int64_t count, const std::function<void(std::int64_t)>& body);

// The calling thread's number inside a parallel region, in [0, num_threads()); 0 outside.
int thread_index();

// A reduction cuts its input into this many chunks, whatever the thread count, so that its bits do not depend on it.
inline constexpr std::int64_t kReductionChunks = 16;

}  // namespace heddle
