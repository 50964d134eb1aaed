#include "pipeline/layer_pass.h"

#include "ops/rows.h"

namespace marrow {

at::Tensor LayerPass::forward(const at::Tensor& hidden, const LayerContext& shared) {
  context_ = shared;
  context_.balance = std::make_shared<RouterBalance>();
  if (tracker_ != nullptr) {
    context_.balance_groups = tracker_->groups(shared.attention.sequences);
    context_.selection_bias = tracker_->selection_bias(index_);
  }
  if (!recompute_ || !at::GradMode::is_enabled()) return run_stages(hidden, true);
  input_ = hidden;
  const at::NoGradGuard no_grad;
  return run_stages(hidden, true);
}

at::Tensor LayerPass::run_stages(const at::Tensor& hidden, bool first_time) {
  RouterOutput routing;
  const auto s1 = attend_.forward({hidden}, [&](const auto& in) {
    RoutedTokens out = layer_->attend_and_route(in[0], context_);
    routing = out.routing;
    return std::vector<at::Tensor>{out.residual, out.normed, out.routing.weights};
  });
  const int64_t tokens = hidden.size(0);
  if (tracker_ != nullptr && first_time) tracker_->record(index_, routing, tokens, *context_.balance);
  if (tracker_ != nullptr && !first_time) {
    tracker_->repeat(index_, routing, tokens, *context_.balance);
  }

  const ExpertPermutation permutation = expert_permutation(routing.experts, routing.counts.size(1));
  const auto s2 = dispatch_.forward({s1[1], s1[2]}, [&](const auto& in) {
    return std::vector<at::Tensor>{gather_rows(in[0], permutation.map, routing.experts.numel()),
                                   gather_values(in[1], permutation)};
  });
  const auto s3 = experts_.forward({s2[0], s2[1]}, [&](const auto& in) {
    return std::vector<at::Tensor>{layer_->run_experts(in[0], in[1], permutation.offsets, context_)};
  });
  // S4 moves rows between ranks; with every expert here there is nothing to move.
  const auto s5 = combine_.forward({s1[0], s1[1], s3[0]}, [&](const auto& in) {
    return std::vector<at::Tensor>{layer_->combine_and_add(in[0], in[1], in[2], permutation.map, context_)};
  });
  return s5[0];
}

at::Tensor LayerPass::backward(const at::Tensor& d_output) {
  if (input_.defined()) {
    run_stages(input_, false);
    input_.reset();
  }
  auto d5 = combine_.backward({d_output});
  auto d3 = experts_.backward({d5[2]});
  d5[2].reset();
  auto d2 = dispatch_.backward(d3);
  d3.clear();
  // The experts read `normed`, and so may S5 (a shared expert).
  at::Tensor d_normed = d2[0];
  if (d5[1].defined()) d_normed = d_normed.add_(d5[1]);
  return attend_.backward({d5[0], d_normed, d2[1]})[0];
}

}  // namespace marrow
