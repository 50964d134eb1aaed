#include "pipeline/layer_pass.h"

namespace marrow {

void LayerPass::start_forward(const at::Tensor& hidden, const LayerContext& shared) {
  context_ = shared;
  context_.balance = std::make_shared<RouterBalance>();
  if (options_.tracker != nullptr) {
    context_.balance_groups = options_.tracker->groups(shared.attention.sequences);
    if (!dense()) context_.selection_bias = options_.tracker->selection_bias(index_);
  }
  options_.recompute = options_.recompute && at::GradMode::is_enabled();
  options_.recompute_cheap = options_.recompute_cheap && at::GradMode::is_enabled();
  if (options_.recompute) input_ = hidden;
  const at::AutoGradMode keep(at::GradMode::is_enabled() && !options_.recompute);
  attend(hidden, true);
}

const LayerContext& LayerPass::noting(RecomputeList& list) {
  context_.recompute = options_.recompute_cheap ? &list : nullptr;
  return context_;
}

void LayerPass::attend(const at::Tensor& hidden, bool first_time) {
  values_ = attend_.forward({hidden}, [&](const auto& in) {
    RoutedTokens out = layer_->attend_and_route(in[0], noting(attend_again_));
    routing_ = out.routing;
    return std::vector<at::Tensor>{out.residual, out.normed, out.routing.weights};
  });
  if (dense()) return;
  if (options_.tracker != nullptr) {
    options_.tracker->record(index_, routing_, hidden.size(0), *context_.balance, first_time);
  }
  if (options_.experts == nullptr || !first_time) return;  // tokens go the same ways again
  exchange_.emplace(*options_.experts, routing_.counts.size(1), options_.overlap);
  exchange_->plan(routing_.experts, routing_.counts);
}

int64_t LayerPass::start_dispatch() {
  if (!exchange_) return 0;
  exchange_->start_dispatch(values_[1], values_[2]);
  return exchange_->rows_sent();
}

void LayerPass::run_experts() {
  if (dense()) return;
  const at::AutoGradMode keep(at::GradMode::is_enabled() && !options_.recompute);
  const DispatchedTokens tokens =
      exchange_ ? exchange_->finish_dispatch()
                : DispatchedTokens{values_[1], values_[2], routing_.experts, routing_.experts.numel()};
  const int64_t ranks = exchange_ ? options_.experts->size() : 1;
  const ExpertPermutation order = expert_permutation(tokens.experts, routing_.counts.size(1) / ranks);
  const auto out = experts_.forward({tokens.rows, tokens.weights}, [&](const auto& in) {
    const ExpertRows rows = gather_expert_rows(in[0], order, tokens.expert_rows, layer_->first_expert_weight());
    if (options_.recompute_cheap && !rows.only_in_fp8()) {
      rows_again_.add({rows.value},
                      [tokens = in[0].detach(), map = order.map, offsets = order.offsets, count = tokens.expert_rows] {
                        return std::vector{gather_rows(tokens, map, count, offsets)};
                      });
    }
    const at::Tensor weights = gather_values(in[1], order, tokens.expert_rows);
    results_ = layer_->run_experts(rows, weights, noting(experts_again_));
    // Here or, where no rank is between, in S5, together with the residual.
    return std::vector<at::Tensor>{exchange_ ? sum_rows(results_, order.map, {}) : results_.value};
  });
  routing_ = {};
  results_.value = at::Tensor();
  if (exchange_) results_ = {};
  rows_of_tokens_ = exchange_ ? exchange_->map() : order.map;
  values_.back() = out[0];
  if (exchange_) exchange_->start_combine(out[0]);
}

at::Tensor LayerPass::finish_forward() {
  const at::AutoGradMode keep(at::GradMode::is_enabled() && !options_.recompute);
  if (exchange_) values_.back() = exchange_->finish_combine();
  const auto out = combine_.forward(values_, [&](const auto& in) {
    results_.value = in[2];
    return std::vector<at::Tensor>{
        layer_->combine_and_add(in[0], in[1], std::exchange(results_, {}), rows_of_tokens_, noting(combine_again_))};
  });
  if (options_.recompute_cheap) {
    for (const RecomputeList* list : {&attend_again_, &rows_again_, &experts_again_, &combine_again_}) list->release();
  }
  if (!dense()) release_memory(values_.back());  // the experts' rows: summed, and no backward reads them
  values_.clear();
  if (!at::GradMode::is_enabled() && !options_.recompute) exchange_.reset();
  return out[0];
}

void LayerPass::start_backward(const at::Tensor& d_output) {
  if (options_.recompute) {
    options_.recompute = false;
    attend(input_, false);
    start_dispatch();
    run_experts();
    finish_forward();
    input_.reset();
  }
  combine_again_.restore();
  values_ = combine_.backward({d_output});  // of residual, normed, rows
  if (exchange_) exchange_->start_combine_backward(std::exchange(values_.back(), {}));
}

void LayerPass::run_experts_backward() {
  if (dense()) return;
  const at::Tensor d_rows = exchange_ ? exchange_->finish_combine_backward() : std::move(values_.back());
  values_.pop_back();
  experts_again_.restore();
  // Only the first product's weight gradient reads the rows, when it comes to it.
  if (options_.recompute_cheap) {
    context_.weight_grads->push([rows = std::exchange(rows_again_, {})]() mutable { rows.restore(); });
  }
  const auto d_tokens = experts_.backward({d_rows});  // of rows or `normed`, and weights
  if (exchange_) {
    exchange_->start_dispatch_backward(d_tokens[0], d_tokens[1]);
    return;
  }
  // The experts read `normed`, and so may S5 (a shared expert).
  values_[1] = values_[1].defined() ? at::Tensor(d_tokens[0]).add_(values_[1]) : d_tokens[0];
  values_.push_back(d_tokens[1]);
}

at::Tensor LayerPass::finish_backward() {
  if (exchange_) {
    auto [d_normed, d_weights] = exchange_->finish_dispatch_backward(values_[1]);
    values_[1] = std::move(d_normed);
    values_.push_back(std::move(d_weights));
    exchange_.reset();
  }
  attend_again_.restore();
  return attend_.backward(std::exchange(values_, {}))[0];
}

}  // namespace marrow
