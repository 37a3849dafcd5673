#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <limits>
#include <vector>

#include "autograd/tensor.h"
#include "kernels/runtime/allocator.h"
#include "kernels/runtime/parallel.h"
#include "kernels/runtime/strided.h"
#include "tests/support/tensors.h"

// Threads, memory counters, devices and strided loops: what every kernel stands on.

namespace heddle {
namespace {

using test::error_of;

class ThreadCount : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_num_threads(GetParam()); }
  void TearDown() override { set_num_threads(before_); }

 private:
  int before_ = num_threads();
};

TEST_P(ThreadCount, ParallelForVisitsEveryItemOnce) {
  for (std::int64_t count : {0, 1, 2, 7, 100, 1001}) {
    std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
    parallel_for(count, 3, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
    });
    for (const auto& visit : visits) ASSERT_EQ(visit, 1);
  }
}

TEST_P(ThreadCount, ParallelTasksVisitsEveryTaskOnce) {
  std::vector<std::atomic<int>> visits(101);
  parallel_tasks(101, [&](std::int64_t task) { ++visits[static_cast<std::size_t>(task)]; });
  for (const auto& visit : visits) ASSERT_EQ(visit, 1);
}

TEST_P(ThreadCount, ThreadIndexIsInRangeAndNestedLoopsRunInline) {
  std::atomic<bool> ok = true;
  parallel_for(64, 1, [&](std::int64_t begin, std::int64_t end) {
    const int outer = thread_index();
    if (outer < 0 || outer >= num_threads()) ok = false;
    parallel_for(end - begin, 1, [&](std::int64_t, std::int64_t) {
      if (thread_index() != outer) ok = false;
    });
  });
  EXPECT_TRUE(ok);
}

TEST_P(ThreadCount, ShortRegionsInARowLoseNoTask) {
  std::int64_t wrong = 0;
  for (int region = 0; region < 20000; ++region) {
    std::array<std::atomic<int>, 3> visits{};
    parallel_tasks(3, [&](std::int64_t task) { ++visits[static_cast<std::size_t>(task)]; });
    for (const auto& visit : visits) wrong += visit != 1;
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(ThreadCount, CallersAtTheSameTimeEachGetTheirTasksDone) {
  std::atomic<std::int64_t> total = 0;
  const auto caller = [&] {
    for (int region = 0; region < 500; ++region) parallel_tasks(10, [&](std::int64_t task) { total += task; });
  };
  std::thread first(caller), second(caller);
  first.join();
  second.join();

  EXPECT_EQ(total, 2 * 500 * 45);
}

INSTANTIATE_TEST_SUITE_P(Parallel, ThreadCount, ::testing::Values(1, 2, 5));

TEST(Parallel, SmallWorkStaysOnTheCallingThread) {
  int calls = 0;
  parallel_for(100, 100, [&](std::int64_t begin, std::int64_t end) { calls += static_cast<int>(end - begin); });
  EXPECT_EQ(calls, 100);
}

TEST(Parallel, ZeroThreadsAreRefused) {
  EXPECT_EQ(error_of([] { set_num_threads(0); }), "set_num_threads: expected at least 1, got 0");
}

TEST(Allocator, CountersFollowBuffers) {
  const std::int64_t before = memory_stats(kCpu).current_bytes;
  reset_peak_memory(kCpu);
  {
    const Buffer a(1000, kCpu);
    Buffer b(500, kCpu);
    const Buffer moved = std::move(b);
    EXPECT_EQ(memory_stats(kCpu).current_bytes, before + 1500);
    EXPECT_EQ(b.data(), nullptr);
    EXPECT_EQ(moved.nbytes(), 500);
  }

  EXPECT_EQ(memory_stats(kCpu).current_bytes, before);
  EXPECT_EQ(memory_stats(kCpu).peak_bytes, before + 1500);
  reset_peak_memory(kCpu);
  EXPECT_EQ(memory_stats(kCpu).peak_bytes, before);
}

TEST(Allocator, MemoryIsAlignedToACacheLine) {
  for (std::int64_t nbytes : {1, 63, 65, 4097}) EXPECT_EQ(reinterpret_cast<std::uintptr_t>(Buffer(nbytes, kCpu).data()) % 64, 0u);
}

TEST(Allocator, OutOfMemoryNamesTheRequestAndLeavesTheCountersAlone) {
  const std::int64_t before = memory_stats(kCpu).current_bytes, request = std::int64_t{1} << 60;

  EXPECT_EQ(error_of([&] { Buffer(request, kCpu); }),
            concat_text("allocator: out of memory on cpu: asked for ", request, " bytes with ", before,
                        " in use; use a smaller batch or model"));
  EXPECT_EQ(memory_stats(kCpu).current_bytes, before);
  EXPECT_NE(error_of([] { Buffer(-1, kCpu); }), "no error");
  EXPECT_NE(error_of([] { Buffer(std::numeric_limits<std::int64_t>::max(), kCpu); }), "no error");
}

TEST(Device, NamesRoundTrip) {
  for (const char* name : {"cpu", "cuda:0", "cuda:7"}) EXPECT_EQ(concat_text(parse_device(name)), name);
  EXPECT_EQ(concat_text(parse_device("cuda")), "cuda:0");
  for (const char* name : {"", "gpu", "cuda:", "cuda:-1", "cuda:1x", "CPU", "cuda:99999999999"})
    EXPECT_EQ(error_of([&] { parse_device(name); }), concat_text("device: expected cpu, cuda or cuda:N, got '", name, "'"));
}

TEST(DTypes, NamesRoundTrip) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u8, DType::boolean})
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
  EXPECT_EQ(error_of([] { dtype_from_name("float8"); }), "dtype: unknown name 'float8'");
}

TEST(StridedLoop, DenseOperandsBecomeOneRun) {
  const Shape shape{3, 1, 4, 5};
  const StridedLoop<2> loop(shape, {contiguous_strides(shape), contiguous_strides(shape)});

  EXPECT_EQ(loop.shape, Shape{60});
  EXPECT_EQ(loop.inner_stride(0), 1);
}

TEST(StridedLoop, RunsAreNotMergedAcrossABroadcastDimension) {
  const Shape shape{3, 4};
  const StridedLoop<2> loop(shape, {contiguous_strides(shape), Shape{0, 1}});

  EXPECT_EQ(loop.shape, shape);
}

TEST(StridedLoop, AnyPartVisitsItsElementsInOrder) {
  const Shape shape{3, 4, 5};
  const StridedLoop<1> loop(shape, {Shape{100, 20, 3}});
  for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 60}, {0, 0}, {7, 8}, {3, 23}, {19, 60}}) {
    std::vector<std::int64_t> visited;
    loop.walk(begin, end, [&](const auto& offsets, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) visited.push_back(offsets[0] + i * loop.inner_stride(0));
    });
    ASSERT_EQ(static_cast<std::int64_t>(visited.size()), end - begin);
    for (std::int64_t i = begin; i < end; ++i)
      EXPECT_EQ(visited[static_cast<std::size_t>(i - begin)], i / 20 * 100 + i / 5 % 4 * 20 + i % 5 * 3);
  }
}

}  // namespace
}  // namespace heddle
