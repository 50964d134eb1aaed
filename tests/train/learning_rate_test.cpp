#include "train/optimizer.h"

#include <gtest/gtest.h>

namespace marrow {
namespace {

PretrainConfig::Optimizer optimizer(LearningRateSchedule schedule) {
  PretrainConfig::Optimizer o;
  o.lr = 1.0;
  o.min_lr = 0.1;
  o.warmup_steps = 10;
  o.schedule = schedule;
  return o;
}

TEST(LearningRate, WarmUpIsLinearAndReachesTheRate) {
  const auto o = optimizer(LearningRateSchedule::kConstant);
  EXPECT_DOUBLE_EQ(learning_rate(o, 1, 100), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(o, 10, 100), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(o, 100, 100), 1.0);
}

TEST(LearningRate, WsdFallsLinearlyAtTheEnd) {
  auto o = optimizer(LearningRateSchedule::kWsd);
  o.decay_steps = 20;
  EXPECT_DOUBLE_EQ(learning_rate(o, 80, 100), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(o, 90, 100), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(o, 100, 100), 0.1);
  o.decay_steps = 0;
  EXPECT_DOUBLE_EQ(learning_rate(o, 100, 100), 1.0);
}

TEST(LearningRate, CosineFallsOverDecayStepsOrAllThatRemain) {
  auto o = optimizer(LearningRateSchedule::kCosine);
  EXPECT_DOUBLE_EQ(learning_rate(o, 55, 100), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(o, 100, 100), 0.1);
  o.decay_steps = 30;
  EXPECT_DOUBLE_EQ(learning_rate(o, 25, 100), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(o, 70, 100), 0.1);
}

}  // namespace
}  // namespace marrow
