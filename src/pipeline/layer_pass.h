// One decoder layer on one micro-batch: its five stages forward, and backward.
#pragma once
#include "models/model_contract.h"
#include "ops/expert_permutation.h"
#include "pipeline/router_balance.h"
#include "pipeline/stage_graph.h"

namespace marrow {

// S1 attention, router → S2 dispatch → S3 experts → S4 combine → S5 sum, residual. Each stage is a
// StageGraph, kept from forward to backward. Under no-grad nothing is kept.
class LayerPass {
 public:
  // The layer and tracker outlive the pass. `recompute`: keep only the input, and run the forward
  // again before the backward.
  LayerPass(const DecoderLayer& layer, int64_t index, BalanceTracker* tracker, bool recompute)
      : layer_(&layer), index_(index), tracker_(tracker), recompute_(recompute) {}

  // hidden [T, H] → [T, H].
  at::Tensor forward(const at::Tensor& hidden, const LayerContext& shared);
  // Gradient of the output [T, H] → gradient of the input.
  at::Tensor backward(const at::Tensor& d_output);

 private:
  at::Tensor run_stages(const at::Tensor& hidden, bool first_time);

  const DecoderLayer* layer_;
  int64_t index_;
  BalanceTracker* tracker_;
  bool recompute_;
  LayerContext context_;
  at::Tensor input_;  // kept only for recomputation
  StageGraph attend_, dispatch_, experts_, combine_;
};

}  // namespace marrow
