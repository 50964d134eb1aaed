// Runs micro-batches through the model: embedding, layers, head; forward and backward.
#pragma once
#include "models/model_contract.h"
#include "pipeline/layer_pass.h"
#include "pipeline/micro_batch.h"
#include "pipeline/router_balance.h"

namespace marrow {

class Executor {
 public:
  struct Options {
    bool recompute_layers = false;
    bool forced_routing = false;
    bool deterministic = false;
  };
  // Model, parameters and tracker outlive the executor. `tracker` may be null at inference.
  Executor(const MoeModel& model, const ParameterTable& parameters, BalanceTracker* tracker, at::Device device,
           const Options& options);

  // Forward and backward of one micro-batch. Gradients of gradient_scale · Σ loss, and those of the
  // balance terms, are added to the parameters' gradients, Σ loss to `loss_sum` ([1] fp64).
  void train(MicroBatch batch, double gradient_scale, const at::Tensor& loss_sum);

  // Σ loss over the targets of a micro-batch, [1] fp32. No gradients.
  at::Tensor evaluate(MicroBatch batch);

  // The normalised output of the last layer [T, H], for generation (batch.context.cache set).
  at::Tensor hidden_states(MicroBatch batch);
  // [T, H] → logits [T, V] fp32.
  at::Tensor logits(const at::Tensor& hidden) const;

 private:
  void prepare(MicroBatch& batch);
  const Parameter& head() const;

  const MoeModel* model_;
  const ParameterTable* parameters_;
  BalanceTracker* tracker_;
  Options options_;
  std::vector<std::unique_ptr<DecoderLayer>> layers_;
  WeightGradQueue weight_grads_;
};

}  // namespace marrow
