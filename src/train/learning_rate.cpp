#include "train/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace marrow {

double learning_rate(const PretrainConfig::Optimizer& o, int64_t step, int64_t steps) {
  if (step <= o.warmup_steps) return o.lr * static_cast<double>(step) / o.warmup_steps;
  switch (o.schedule) {
    case LearningRateSchedule::kConstant:
      return o.lr;
    case LearningRateSchedule::kWsd: {
      const int64_t left = steps - step;
      if (left >= o.decay_steps) return o.lr;
      return o.min_lr + (o.lr - o.min_lr) * std::max<int64_t>(left, 0) / o.decay_steps;
    }
    case LearningRateSchedule::kCosine: {
      const int64_t length = o.decay_steps > 0 ? o.decay_steps : steps - o.warmup_steps;
      const double done = static_cast<double>(step - o.warmup_steps) / std::max<int64_t>(length, 1);
      const double cosine = std::cos(std::numbers::pi * std::min(done, 1.0));
      return o.min_lr + (o.lr - o.min_lr) * 0.5 * (1.0 + cosine);
    }
  }
  return o.lr;
}

}  // namespace marrow
