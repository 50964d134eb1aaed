// Clipping and the update of all parameters, without waiting for the device.
#pragma once
#include "parallel/parameter_store.h"
#include "train/pretrain_config.h"

namespace marrow {

class Optimizer {
 public:
  // The store outlives the optimizer.
  Optimizer(ParameterStore& store, const PretrainConfig::Optimizer& config);

  // Norm of all gradients, clipping, one AdamW or Muon update, gradients back to zero. Where the
  // norm or the loss ([1] fp64, on the device) is not finite, parameters and states stay as they
  // are. `step` counts from 1.
  void step(double learning_rate, int64_t step, const at::Tensor& loss);

  // Norm before clipping of the last step's gradients, [1] fp64 on the device.
  at::Tensor grad_norm() const { return norm_; }

 private:
  void update_muon(FlatGroup& group, size_t spec, double learning_rate);
  void update_adamw(FlatGroup& group, double learning_rate, int64_t step);

  ParameterStore* store_;
  PretrainConfig::Optimizer config_;
  at::Tensor norm_;        // [1] fp64
  at::Tensor grad_scale_;  // [1] fp32: clipping factor; NaN or 0 stops the update
};

}  // namespace marrow
