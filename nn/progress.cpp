#include "nn/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string_view>
#include <utility>

#include "kernels/runtime/check.h"

namespace heddle::nn {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr int kNarrowestBar = 10;
constexpr const char* kClearLine = "\r\x1b[K";  // carriage return, then erase to the end of the line (ECMA-48 EL)

std::string fixed_text(double value, int decimals) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(decimals) << value;
  return out.str();
}

std::string rate_text(double learning_rate) {
  std::ostringstream out;
  out << std::scientific << std::setprecision(2) << learning_rate;
  return out.str();
}

std::string loss_text(const StepStatus& status) { return "loss " + fixed_text(status.loss, 4); }
std::string speed_text(const StepStatus& status) { return fixed_text(status.tokens_per_second, 0) + " tokens/s"; }

std::string status_text(const StepStatus& status) {
  return concat_text(loss_text(status), "  lr ", rate_text(status.learning_rate), "  ", speed_text(status));
}

int terminal_columns() {
  winsize size{};
  const bool is_known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return is_known ? size.ws_col : 80;
}

std::string bar_text(double fraction, int columns) {
  const auto filled = static_cast<std::size_t>(std::floor(std::clamp(fraction, 0.0, 1.0) * columns));
  return concat_text('[', std::string(filled, '#'), std::string(static_cast<std::size_t>(columns) - filled, '.'), ']');
}

}  // namespace

ProgressTarget standard_output() {
  const char* term = std::getenv("TERM");
  return {
      .out = std::cout,
      .is_terminal = isatty(STDOUT_FILENO) == 1 && term != nullptr && std::string_view(term) != "dumb",
      .width = terminal_columns,
      .now = [] { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); },
  };
}

std::string duration_text(double seconds) {
  const std::int64_t total = std::llround(std::max(seconds, 0.0));
  if (total < 60) return concat_text(total, " s");
  const auto two_digits = [](std::int64_t value) { return concat_text(value / 10, value % 10); };
  const std::string tail = ':' + two_digits(total % 60);
  if (total < 3600) return concat_text(total / 60, tail);
  return concat_text(total / 3600, ':', two_digits(total / 60 % 60), tail);
}

Progress::Progress(ProgressTarget target, std::int64_t first_step, std::int64_t max_steps)
    : target_(std::move(target)), first_step_(first_step), max_steps_(max_steps), start_time_(target_.now()) {}

Progress::~Progress() { finish(); }

void Progress::step(const StepStatus& status, bool is_logged) {
  status_ = status;
  if (!target_.is_terminal) {
    if (is_logged) target_.out << "step " << counts_text() << "  " << status_text(status) << "  " << eta_text() << std::endl;
    return;
  }
  const double now = target_.now();
  if (last_draw_ && now - *last_draw_ < kRedrawSeconds && status.step < max_steps_) return;
  last_draw_ = now;
  draw();
}

void Progress::message(const std::string& text) {
  if (is_bar_visible_) target_.out << kClearLine;
  target_.out << text << std::endl;
  if (is_bar_visible_) draw();
}

void Progress::finish() {
  if (!is_bar_visible_) return;
  draw();
  target_.out << std::endl;
  is_bar_visible_ = false;
}

void Progress::draw() {
  // One column stays free: a full line would wrap on some terminals.
  const int columns = std::max(target_.width() - 1, 0);
  const auto bar_beside = [&](const std::string& text) { return columns - static_cast<int>(text.size()) - 3; };  // "[] "
  std::string numbers = concat_text(counts_text(), "  ", status_text(*status_), "  ", eta_text());
  if (bar_beside(numbers) < kNarrowestBar)  // a narrow terminal: the bar matters more than the learning rate
    numbers = concat_text(counts_text(), "  ", loss_text(*status_), "  ", speed_text(*status_), "  ", eta_text());
  const int bar_columns = bar_beside(numbers);
  const double fraction = static_cast<double>(status_->step) / static_cast<double>(max_steps_);
  const std::string line = bar_columns >= kNarrowestBar ? concat_text(bar_text(fraction, bar_columns), ' ', numbers) : numbers;
  target_.out << kClearLine << line.substr(0, static_cast<std::size_t>(columns)) << std::flush;
  is_bar_visible_ = true;
}

std::string Progress::counts_text() const {
  const std::string total = std::to_string(max_steps_), done = std::to_string(status_->step);
  return concat_text(std::string(total.size() - std::min(total.size(), done.size()), ' '), done, '/', total);
}

std::string Progress::eta_text() const {
  const std::int64_t done = status_->step - first_step_;
  if (done <= 0) return "ETA ?";
  const double seconds_per_step = (target_.now() - start_time_) / static_cast<double>(done);
  return concat_text("ETA ", duration_text(seconds_per_step * static_cast<double>(max_steps_ - status_->step)));
}

}  // namespace heddle::nn
