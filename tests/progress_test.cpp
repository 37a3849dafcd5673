#include "nn/progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

namespace heddle::nn {
namespace {

constexpr const char* kClearLine = "\r\x1b[K";

// A fake screen and clock.
struct Screen {
  std::ostringstream out;
  int columns = 100;
  double time = 0;

  ProgressTarget target(bool is_terminal) {
    return {.out = out, .is_terminal = is_terminal, .width = [this] { return columns; }, .now = [this] { return time; }};
  }
  int redraws() const {
    int found = 0;
    const std::string text = out.str();
    for (std::size_t at = text.find(kClearLine); at != std::string::npos; at = text.find(kClearLine, at + 1)) ++found;
    return found;
  }
};

// A redrawn line of so many columns: a bar at half, and the numbers.
std::string half_filled_line(std::size_t columns, const std::string& numbers) {
  const std::size_t bar = columns - 2 - numbers.size();
  std::string line = kClearLine;
  line.append(1, '[').append(bar / 2, '#').append(bar - bar / 2, '.').append(1, ']').append(numbers);
  return line;
}

StepStatus status(std::int64_t step) { return {.step = step, .loss = 2.5, .learning_rate = 1e-3, .tokens_per_second = 41234.4}; }

TEST(Progress, PlainLineForALoggedStepOnly) {
  Screen screen;
  Progress progress(screen.target(/*is_terminal=*/false), /*first_step=*/0, /*max_steps=*/200);
  progress.step(status(1), /*is_logged=*/false);
  screen.time = 10;
  progress.step(status(20), /*is_logged=*/true);

  EXPECT_EQ(screen.out.str(), "step  20/200  loss 2.5000  lr 1.00e-03  41234 tokens/s  ETA 1:30\n");
}

TEST(Progress, BarFillsTheTerminal) {
  Screen screen;
  Progress progress(screen.target(/*is_terminal=*/true), 0, 200);
  screen.time = 10;
  progress.step(status(100), /*is_logged=*/false);

  const std::string numbers = " 100/200  loss 2.5000  lr 1.00e-03  41234 tokens/s  ETA 10 s";
  EXPECT_EQ(screen.out.str(), half_filled_line(99, numbers));
}

TEST(Progress, NarrowTerminalKeepsTheBarAndDropsTheLearningRate) {
  Screen screen;
  screen.columns = 70;
  Progress progress(screen.target(/*is_terminal=*/true), 0, 200);
  screen.time = 10;
  progress.step(status(100), false);

  const std::string numbers = " 100/200  loss 2.5000  41234 tokens/s  ETA 10 s";
  EXPECT_EQ(screen.out.str(), half_filled_line(69, numbers));
}

TEST(Progress, NarrowTerminalCutsTheLine) {
  Screen screen;
  screen.columns = 12;
  Progress progress(screen.target(/*is_terminal=*/true), 0, 200);
  progress.step(status(100), false);

  EXPECT_EQ(screen.out.str(), kClearLine + std::string("100/200  lo"));
}

TEST(Progress, BarIsRedrawnAtMostTenTimesASecond) {
  Screen screen;
  Progress progress(screen.target(/*is_terminal=*/true), 0, 2000);
  for (int step = 1; step <= 1000; ++step) {
    screen.time = step / 1024.0;  // 1000 steps in a second
    progress.step(status(step), false);
  }

  EXPECT_LE(screen.redraws(), 10);
  EXPECT_GE(screen.redraws(), 9);
}

TEST(Progress, LastStepIsAlwaysDrawn) {
  Screen screen;
  Progress progress(screen.target(/*is_terminal=*/true), 0, 2);
  progress.step(status(1), false);
  progress.step(status(2), false);

  EXPECT_NE(screen.out.str().find("] 2/2"), std::string::npos);
}

TEST(Progress, ResumedRunTimesItsOwnStepsOnly) {
  Screen screen;
  Progress progress(screen.target(/*is_terminal=*/false), /*first_step=*/100, 200);
  screen.time = 10;
  progress.step(status(110), true);  // a second a step, 90 to go

  EXPECT_NE(screen.out.str().find("ETA 1:30"), std::string::npos);
}

TEST(Progress, MessageStandsAboveTheBar) {
  Screen screen;
  Progress progress(screen.target(/*is_terminal=*/true), 0, 2);
  progress.step(status(1), false);
  const std::string bar = screen.out.str();
  screen.out.str("");
  progress.message("saved");

  EXPECT_EQ(screen.out.str(), kClearLine + std::string("saved\n") + bar);
}

TEST(Progress, FinishEndsTheLineOnce) {
  Screen screen;
  {
    Progress progress(screen.target(/*is_terminal=*/true), 0, 2);
    progress.step(status(1), false);
    progress.finish();
  }

  const std::string text = screen.out.str();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
}

TEST(Progress, NothingIsWrittenWithoutAStep) {
  Screen screen;
  { const Progress progress(screen.target(/*is_terminal=*/true), 0, 2); }

  EXPECT_EQ(screen.out.str(), "");
}

TEST(DurationText, UsesTheLargestUnit) {
  EXPECT_EQ(duration_text(-1), "0 s");
  EXPECT_EQ(duration_text(59.4), "59 s");
  EXPECT_EQ(duration_text(59.6), "1:00");
  EXPECT_EQ(duration_text(725), "12:05");
  EXPECT_EQ(duration_text(11100), "3:05:00");
}

}  // namespace
}  // namespace heddle::nn
