// The learning rate of a step; clipping and the update of a rank's own shards, without waiting for the device.
#pragma once
#include "parallel/parameter_store.h"
#include "train/pretrain_config.h"

namespace marrow {

// Rate of step s ≥ 1 out of `steps`. Up to warmup_steps it is lr · s / warmup_steps. Then
//   constant  lr
//   wsd       lr, and over the last decay_steps steps linearly down to min_lr (reached at the last)
//   cosine    half a cosine from lr down to min_lr over decay_steps steps (0: all that remain)
double learning_rate(const PretrainConfig::Optimizer& config, int64_t step, int64_t steps);

class Optimizer {
 public:
  // `store` and `world` outlive the optimizer. `world`: all ranks of the run, nullptr for one.
  Optimizer(ParameterStore& store, const PretrainConfig::Optimizer& config, Communicator* world = nullptr);

  // Norm of all gradients, clipping, one AdamW or Muon update of this rank's shards, gradients back to zero. The
  // shards' gradients are summed over the ranks before (ParameterStore::sum_replicas); the gathers of the working
  // copies are started, and finished where these are needed. loss [1] fp64 on the device, this rank's part, becomes the
  // sum over all ranks. Where it or the norm is not finite, parameters and states stay as they are on every rank.
  // `step` counts from 1.
  void step(double learning_rate, int64_t step, const at::Tensor& loss);

  // Norm before clipping of the last step's gradients, [1] fp64 on the device: the model's, whatever the mesh.
  at::Tensor grad_norm() const { return norm_; }

 private:
  void update_muon(FlatGroup& group, double learning_rate);
  void update_adamw(FlatGroup& group, double learning_rate, int64_t step);

  ParameterStore* store_;
  PretrainConfig::Optimizer config_;
  Communicator* world_;
  at::Tensor norm_;        // [1] fp64
  at::Tensor grad_scale_;  // [1] fp32: clipping factor; NaN or 0 stops the update
};

}  // namespace marrow
