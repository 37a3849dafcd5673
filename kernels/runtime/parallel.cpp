#include "kernels/runtime/parallel.h"

#include <omp.h>

#include <algorithm>

#include "kernels/runtime/check.h"

namespace heddle {

int num_threads() { return omp_get_max_threads(); }

void set_num_threads(int count) {
  HEDDLE_CHECK(count >= 1, "set_num_threads: expected at least 1, got ", count);
  omp_set_num_threads(count);
}

void parallel_for(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  const std::int64_t most = (count + grain - 1) / std::max<std::int64_t>(grain, 1);
  const auto chunks = static_cast<int>(std::min<std::int64_t>(most, num_threads()));
  if (chunks <= 1 || omp_in_parallel()) {
    body(0, count);
    return;
  }
#pragma omp parallel for schedule(static, 1) num_threads(chunks)
  for (int i = 0; i < chunks; ++i) body(count * i / chunks, count * (i + 1) / chunks);
}

void parallel_tasks(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  if (count <= 1 || num_threads() == 1 || omp_in_parallel()) {
    for (std::int64_t i = 0; i < count; ++i) body(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t i = 0; i < count; ++i) body(i);
}

int thread_index() { return omp_get_thread_num(); }

}  // namespace heddle
