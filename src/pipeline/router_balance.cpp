#include "pipeline/router_balance.h"

namespace marrow {

BalanceTracker::BalanceTracker(const ModelShape& model, const Options& options, at::Device device)
    : experts_(model.experts),
      top_k_(model.top_k),
      has_bias_(!model.selection_biases.empty() || options.mode == BalanceMode::kBias),
      options_(options) {
  const int64_t layers = model.moe_layers();
  const auto fp64 = at::TensorOptions().device(device).dtype(at::kDouble);
  const auto fp32 = fp64.dtype(at::kFloat);
  counts_ = at::zeros({layers, experts_}, fp64);
  probability_sums_ = at::zeros_like(counts_);
  group_losses_ = at::zeros({layers}, fp64);
  previous_counts_ = at::zeros({layers, experts_}, fp32);
  bias_ = at::zeros_like(previous_counts_);
  losses_ = at::zeros({layers}, fp32);
  load_ = at::zeros({layers}, fp32);
}

void BalanceTracker::begin_step(const StepSizes& sizes) {
  sizes_ = sizes;
  counts_.zero_();
  probability_sums_.zero_();
  group_losses_.zero_();
  // The first step has no previous counts: f = 0, and so no gradient. Fractions are of the previous
  // step's own total, since the global batch may have changed.
  if (options_.mode != BalanceMode::kGlobal) return;
  const at::Tensor total = previous_counts_.sum(1, true).clamp_min_(1);
  global_gradient_ = balance_gradient(previous_counts_ / total, sizes.tokens, options_.coef);
}

void BalanceTracker::record(int64_t layer, const RouterOutput& routing, int64_t tokens, RouterBalance& balance,
                            bool first_time) {
  if (first_time) {
    const auto all = [](const at::Tensor& groups) { return groups.size(0) == 1 ? groups[0] : groups.sum(0); };
    counts_.select(0, layer).add_(all(routing.counts));
    probability_sums_.select(0, layer).add_(all(routing.probability_sums));
  }
  // Over whole groups: whole sequences, or whole micro-batches.
  at::Tensor counts = routing.counts, probability_sums = routing.probability_sums;  // [G, E]
  int64_t group_tokens = tokens / counts.size(0);
  if (by_group() && options_.context != nullptr) {
    const at::Tensor both = at::stack({counts.to(at::kFloat), probability_sums});
    options_.context->all_reduce(both).wait();
    counts = both.select(0, 0);
    probability_sums = both.select(0, 1);
    group_tokens *= options_.context->size();
  }
  // Of ranks that share sequences one counts their losses.
  if (first_time && by_group() && (options_.context == nullptr || options_.context->rank() == 0)) {
    group_losses_.select(0, layer).add_(balance_loss(counts, probability_sums, group_tokens, top_k_).sum());
  }
  balance.z_loss_gradient = options_.z_loss / static_cast<double>(sizes_.tokens);
  if (options_.coef == 0.0) return;
  if (options_.mode == BalanceMode::kGlobal) balance.gradient = global_gradient_.narrow(0, layer, 1);
  if (!by_group()) return;
  const int64_t groups = options_.mode == BalanceMode::kMicro ? sizes_.micro_batches : sizes_.sequences;
  balance.gradient = balance_gradient(expert_fractions(counts, group_tokens, top_k_), group_tokens,
                                      options_.coef / static_cast<double>(groups));
}

void BalanceTracker::end_step() {
  if (options_.world != nullptr) {  // one transfer for all sums
    const std::array sums{counts_.flatten(), probability_sums_.flatten(), group_losses_};
    const at::Tensor all = at::cat(at::TensorList(sums));
    options_.world->all_reduce(all).wait();
    int64_t at = 0;
    for (const at::Tensor& sum : {counts_, probability_sums_, group_losses_}) {
      sum.copy_(all.narrow(0, at, sum.numel()).view(sum.sizes()));
      at += sum.numel();
    }
  }
  if (by_group()) {
    const int64_t groups = options_.mode == BalanceMode::kMicro ? sizes_.micro_batches : sizes_.sequences;
    losses_.copy_(group_losses_ / static_cast<double>(groups));
  } else {
    losses_.copy_(balance_loss(counts_, probability_sums_, sizes_.tokens, top_k_));
  }
  load_.copy_(std::get<0>(counts_.max(1)) / counts_.mean(1));
  previous_counts_.copy_(counts_);
  if (options_.mode != BalanceMode::kBias) return;
  // sign(mean − count), exactly.
  const at::Tensor below = counts_.sum(1, true) - counts_ * static_cast<double>(experts_);
  bias_.add_(below.sign().to(at::kFloat), options_.coef);
  bias_.sub_(bias_.mean(1, true));
}

at::Tensor BalanceTracker::selection_bias(int64_t layer) const {
  return has_bias_ ? bias_.select(0, layer) : at::Tensor();
}

}  // namespace marrow
