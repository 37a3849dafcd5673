#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "nn/train_config.h"

namespace heddle::nn {

// Learning rate of update `update` (0-based). With w = max(warmup_steps, 1) and n = max_steps:
//   update < w   learning_rate * (update + 1) / w
//   otherwise    p = min((update + 1 - w) / (n - w), 1), 1 when n <= w
//     cosine     minimum + (learning_rate - minimum) * (1 + cos(pi p)) / 2
//     linear     minimum + (learning_rate - minimum) * (1 - p)
//     constant   learning_rate
// So no update has rate 0 during the warm-up, update w - 1 has the peak, and update n - 1 has the minimum.
inline double learning_rate_at(const TrainConfig& config, std::int64_t update) {
  const double peak = config.learning_rate;
  const std::int64_t warmup = std::max<std::int64_t>(config.warmup_steps, 1);
  if (update < warmup) return peak * static_cast<double>(update + 1) / static_cast<double>(warmup);
  if (config.lr_scheduler_type == Schedule::constant) return peak;
  const auto decay_steps = static_cast<double>(config.max_steps - warmup);
  const double progress = decay_steps > 0 ? std::min(static_cast<double>(update + 1 - warmup) / decay_steps, 1.0) : 1.0;
  const double height =
      config.lr_scheduler_type == Schedule::cosine ? 0.5 * (1 + std::cos(std::numbers::pi * progress)) : 1 - progress;
  return config.min_learning_rate + (peak - config.min_learning_rate) * height;
}

}  // namespace heddle::nn
