#pragma once

#include <cstdint>
#include <filesystem>

#include "nn/chart.h"
#include "nn/evaluate.h"

namespace heddle::nn {

struct StepMetrics {
  std::int64_t step = 0;         // counted from 1
  double loss = 0;               // of this step, mean over its labels
  double learning_rate = 0;      // used by this step
  double grad_norm = 0;          // before clipping
  std::int64_t tokens = 0;       // input tokens read since the start of training
  double tokens_per_second = 0;  // over the steps since the last logged one, without evaluations and checkpoints
  double step_ms = 0;            // mean over the same steps
};

// metrics.jsonl: one JSON object a line, appended and flushed as training goes. NaN and infinity are written as null.
class MetricsLog {
 public:
  // Keeps the whole lines of an existing file up to and including `step` (0: none) and drops the rest.
  MetricsLog(std::filesystem::path path, std::int64_t step);

  void write(const StepMetrics& metrics) const;
  void write(std::int64_t step, const EvalResult& result) const;

  // The loss curves of the whole file.
  struct Curves {
    Curve train;
    Curve eval;
  };
  Curves curves() const;

 private:
  void append(const std::string& line) const;

  std::filesystem::path path_;
};

}  // namespace heddle::nn
