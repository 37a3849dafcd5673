#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>

namespace heddle::nn {

struct StepStatus {
  std::int64_t step = 0;  // steps done
  double loss = 0;
  double learning_rate = 0;
  double tokens_per_second = 0;
};

// Where progress is written and how it looks there.
struct ProgressTarget {
  std::ostream& out;
  bool is_terminal = false;
  std::function<int()> width;   // columns of the terminal, asked at every redraw
  std::function<double()> now;  // seconds, from any fixed start
};

// Standard output: a terminal if it is one and TERM is not "dumb".
ProgressTarget standard_output();

// Progress of a training run: on a terminal one line redrawn in place, at most ten times a second; elsewhere one plain
// line a logged step. A bar left on the screen is ended by finish() or the destructor.
class Progress {
 public:
  // `first_step` steps were done before this run, of `max_steps`.
  Progress(ProgressTarget target, std::int64_t first_step, std::int64_t max_steps);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // After every step. `is_logged` asks for the plain line; the bar is drawn either way.
  void step(const StepStatus& status, bool is_logged);
  // Writes a line of its own, above the bar.
  void message(const std::string& text);
  void finish();

 private:
  void draw();
  std::string counts_text() const;
  std::string eta_text() const;

  ProgressTarget target_;
  std::int64_t first_step_;
  std::int64_t max_steps_;
  double start_time_;
  std::optional<double> last_draw_;
  std::optional<StepStatus> status_;
  bool is_bar_visible_ = false;
};

// "45 s", "12:05" (minutes and seconds) or "3:05:00".
std::string duration_text(double seconds);

}  // namespace heddle::nn
