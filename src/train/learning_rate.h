// The learning rate of a step: warm-up, then one of three schedules.
#pragma once
#include "train/pretrain_config.h"

namespace marrow {

// Rate of step s ≥ 1 out of `steps`. Up to warmup_steps it is lr · s / warmup_steps. Then
//   constant  lr
//   wsd       lr, and over the last decay_steps steps linearly down to min_lr (reached at the last)
//   cosine    half a cosine from lr down to min_lr over decay_steps steps (0: all that remain)
double learning_rate(const PretrainConfig::Optimizer& optimizer, int64_t step, int64_t steps);

}  // namespace marrow
