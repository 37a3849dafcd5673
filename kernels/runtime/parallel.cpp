#include "kernels/runtime/parallel.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/runtime/check.h"

namespace heddle {
namespace {

thread_local int this_thread = 0;
thread_local bool is_in_region = false;

// Waits while `value` is `old`: watching for the tens of microseconds that pass between two kernels, then asleep.
template <typename T>
void wait_while(const std::atomic<T>& value, T old) {
  constexpr int kYields = 100;
  for (int i = 0; i < kYields && value == old; ++i) std::this_thread::yield();
  value.wait(old);
}

// Note: Thread pool
// The caller and the workers take the tasks of a region one by one. A worker that the system does not run takes none and holds
// nobody up; a team that assigns tasks to threads beforehand, as OpenMP's does, waits for it, whole time slices long on a
// machine that others use as well.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    stops_ = true;
    wake();
    for (std::thread& worker : workers_) worker.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  void run(std::int64_t count, const std::function<void(std::int64_t)>& task) {
    task_ = &task;
    count_ = count;
    next_ = 0;
    is_open_ = true;
    wake();
    is_in_region = true;
    take_tasks();
    is_in_region = false;
    // A worker counts itself as busy before it looks whether the region is open: one that is not seen here finds it closed.
    is_open_ = false;
    for (int busy = busy_; busy != 0; busy = busy_) wait_while(busy_, busy);
  }

 private:
  void wake() {
    ++regions_;
    regions_.notify_all();
  }

  void take_tasks() {
    for (std::int64_t i = next_++; i < count_; i = next_++) (*task_)(i);
  }

  void work(int index) {
    this_thread = index;
    is_in_region = true;
    for (std::uint32_t seen = 0;;) {
      wait_while(regions_, seen);
      seen = regions_;
      if (stops_) return;
      ++busy_;
      if (is_open_) take_tasks();
      --busy_;
      busy_.notify_all();
    }
  }

  const std::function<void(std::int64_t)>* task_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_ = 0;
  std::atomic<bool> is_open_ = false;
  std::atomic<int> busy_ = 0;
  std::atomic<std::uint32_t> regions_ = 0;
  std::atomic<bool> stops_ = false;
  std::vector<std::thread> workers_;
};

// The positive integer that a text is, white space around it apart; 0 if it is none.
int thread_count(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  text = text.substr(0, text.find_last_not_of(kSpace) + 1);
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  return error == std::errc() && end == text.data() + text.size() && count >= 1 ? count : 0;
}

// OpenMP takes a list, of which the first counts here: there is one level of regions.
int default_threads() {
  const char* set = std::getenv("OMP_NUM_THREADS");
  const std::string_view wanted = set != nullptr ? set : "";
  if (wanted.empty()) return num_cores();
  for (std::size_t begin = 0; begin <= wanted.size(); begin = std::min(wanted.find(',', begin), wanted.size()) + 1)
    if (thread_count(wanted.substr(begin, wanted.find(',', begin) - begin)) == 0)
      throw ConfigError(concat_text("OMP_NUM_THREADS: expected integers in [1, ", std::numeric_limits<int>::max(), "] with commas between, got \"",
                                    wanted, '"'));
  return thread_count(wanted.substr(0, wanted.find(',')));
}

// The process has one pool, made when it is first needed.
struct Threads {
  std::atomic<int> count = default_threads();
  std::mutex in_use;
  std::unique_ptr<Pool> pool;
};

Threads& threads() {
  static Threads all;
  return all;
}

}  // namespace

int num_cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

int num_threads() { return threads().count; }

void set_num_threads(int count) {
  HEDDLE_CHECK(count >= 1, "set_num_threads: expected at least 1, got ", count);
  threads().count = count;
}

void parallel_for(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  const std::int64_t most = (count + grain - 1) / std::max<std::int64_t>(grain, 1);
  const std::int64_t chunks = is_in_region ? 1 : std::min<std::int64_t>(most, num_threads());
  if (chunks <= 1) body(0, count);
  else parallel_tasks(chunks, [&](std::int64_t i) { body(count * i / chunks, count * (i + 1) / chunks); });
}

void parallel_tasks(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  const int wanted = num_threads();
  if (count > 1 && wanted > 1 && !is_in_region) {
    // Another thread's region keeps the pool: this one then does its tasks alone.
    if (const std::unique_lock lock(threads().in_use, std::try_to_lock); lock) {
      std::unique_ptr<Pool>& pool = threads().pool;
      if (pool == nullptr || pool->threads() != wanted) pool.reset(), pool = std::make_unique<Pool>(wanted);
      pool->run(count, body);
      return;
    }
  }
  for (std::int64_t i = 0; i < count; ++i) body(i);
}

int thread_index() { return this_thread; }

}  // namespace heddle
