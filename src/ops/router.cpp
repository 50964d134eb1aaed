#include "ops/router.h"

#include "ops/linear.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

constexpr double kTinyScore = 1e-20;  // beside a sum of sigmoids, as published models compute

// What the backward reads of the forward's work: logits [T, E] and lse [T], fp32.
struct Routing {
  RouterOutput out;
  Tensor logits, lse;
};

// [T, k] int64, by falling score, equal scores by lower id.
Tensor choose_cpu(const Tensor& logits, const Tensor& scores, const Tensor& selection_bias, const RouterShape& shape) {
  if (shape.forced) {
    return at::arange(shape.tokens * shape.top_k).remainder(shape.experts).view({shape.tokens, shape.top_k});
  }
  const auto by_falling = [](const Tensor& x) { return std::get<1>(at::sort(x, /*stable=*/true, 1, true)); };
  Tensor choice = selection_bias.defined() ? scores + selection_bias : shape.sigmoid ? scores : logits;
  if (shape.top_groups < shape.expert_groups) {
    const Tensor grouped = choice.unflatten(1, {shape.expert_groups, -1});
    const Tensor of_groups = std::get<0>(grouped.topk(shape.sigmoid ? 2 : 1, 2)).sum(2);
    const Tensor left_out = by_falling(of_groups).narrow(1, shape.top_groups, shape.expert_groups - shape.top_groups);
    const Tensor hidden = at::zeros(of_groups.sizes(), at::kBool).scatter_(1, left_out, true);
    choice = grouped.masked_fill(hidden.unsqueeze(2), -INFINITY).flatten(1);
  }
  return by_falling(choice).narrow(1, 0, shape.top_k).contiguous();
}

Routing route_cpu(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& selection_bias,
                  const RouterShape& shape) {
  const auto [tokens, experts, top_k, groups] = std::array{shape.tokens, shape.experts, shape.top_k, shape.groups};
  const Tensor logits = at::mm(x.to(at::kFloat), weight.to(at::kFloat).t());
  if (bias.defined()) logits.add_(bias);
  const Tensor lse = at::logsumexp(logits, {1});
  const Tensor scores = shape.sigmoid ? logits.sigmoid() : at::softmax(logits, 1);
  const Tensor p = shape.sigmoid ? scores / scores.sum(1, true) : scores;
  const Tensor chosen = choose_cpu(logits, scores, selection_bias, shape);
  Tensor weights;
  if (shape.sigmoid) {
    weights = scores.gather(1, chosen);
    if (shape.normalize) weights = weights / (weights.sum(1, true) + kTinyScore);
  } else {
    // Normalised weights are the softmax of the chosen logits; no probability need be above 0.
    const Tensor chosen_logits = logits.gather(1, chosen);
    weights = shape.normalize ? chosen_logits.softmax(1) : chosen_logits.sub(lse.unsqueeze(1)).exp();
  }
  const Tensor pairs = chosen.view({groups, tokens / groups * top_k});
  const Tensor counts = at::zeros({groups, experts}, at::kInt);
  counts.scatter_add_(1, pairs, at::ones(pairs.sizes(), at::kInt));
  const Tensor sums = p.view({groups, tokens / groups, experts}).sum(1, false, at::kDouble);
  const Tensor z_sum = lse.to(at::kDouble).square().sum().view({1});
  return {{chosen.to(at::kInt), weights * shape.scale, counts, sums.to(at::kFloat), z_sum.to(at::kFloat)}, logits, lse};
}

Routing route_gpu(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& selection_bias,
                  const RouterShape& shape) {
  const auto fp32 = x.options().dtype(at::kFloat), int32 = x.options().dtype(at::kInt);
  const RouterOutput out{at::empty({shape.tokens, shape.top_k}, int32), at::empty({shape.tokens, shape.top_k}, fp32),
                         at::zeros({shape.groups, shape.experts}, int32),
                         at::empty({shape.groups, shape.experts}, fp32), at::empty({1}, fp32)};
  // Products of bf16 values are exact in fp32, so the logits are those of an fp32 router.
  const Tensor logits = x.scalar_type() == at::kFloat || shape.tokens == 0 ? at::mm(x, weight.t()).to(at::kFloat)
                                                                           : at::mm(x, weight.t(), at::kFloat);
  if (bias.defined()) logits.add_(bias);
  const Tensor lse = at::empty({shape.tokens}, fp32);
  MARROW_CUDA_CALL({
    const Tensor partial = at::empty({shape.groups * router_blocks_per_group(shape), shape.experts + 1}, fp32);
    router_forward_cuda(shape, logits, selection_bias, lse, out.experts, out.weights, out.counts, partial,
                        out.probability_sums, out.z_sum);
  });
  return {out, logits, lse};
}

// What the gradients are made of: the forward's tensors and those of the objective.
struct BackwardInputs {
  Tensor x, weight, logits, lse, experts, weights;
  Tensor d_weights, balance_gradient;  // or undefined
  float z_loss_gradient = 0;
};

// d objective / d logits [T, E] fp32. A score's derivative is s·(1 − s) with sigmoid, s·(δ − p) with softmax.
Tensor differentiate_cpu(const RouterShape& shape, const BackwardInputs& in) {
  const Tensor softmax = in.logits.sub(in.lse.unsqueeze(1)).exp_();
  const Tensor scores = shape.sigmoid ? in.logits.sigmoid() : softmax;
  const Tensor p = shape.sigmoid ? scores / scores.sum(1, true) : softmax;
  Tensor d = at::zeros_like(p);
  if (in.balance_gradient.defined()) {
    const Tensor d_p = in.balance_gradient.repeat_interleave(shape.tokens / shape.groups, 0);
    d = p * (d_p - (p * d_p).sum(1, true));
  }
  if (in.d_weights.defined()) {
    Tensor d_chosen = in.weights * in.d_weights;
    const Tensor sum = d_chosen.sum(1, true);
    if (shape.normalize) d_chosen = d_chosen - in.weights * (sum / shape.scale);
    if (!shape.normalize && !shape.sigmoid) d.sub_(p * sum);
    d.scatter_add_(1, in.experts.to(at::kLong), d_chosen);
  }
  if (shape.sigmoid) d.mul_(1 - scores);
  return d.add_(softmax.mul(in.lse.unsqueeze(1)), 2.0 * in.z_loss_gradient);
}

// bf16 on the GPU: in two bf16 parts [T, 2E], so that tensor cores lose no precision of it.
Tensor differentiate_gpu(const RouterShape& shape, const BackwardInputs& in) {
  const int64_t parts = in.x.scalar_type() == at::kBFloat16 ? 2 : 1;
  const Tensor d_logits = at::empty({shape.tokens, shape.experts * parts}, in.x.options());
  MARROW_CUDA_CALL(router_backward_cuda(shape, in.logits, in.lse, in.experts, in.weights, in.d_weights,
                                        in.balance_gradient, in.z_loss_gradient, d_logits));
  return d_logits;
}

// d x; the gradients of weight and bias are put off.
Tensor backward(const RouterShape& shape, const BackwardInputs& in, const Tensor& weight_grad, const Tensor& bias_grad,
                WeightGradQueue& queue) {
  const Tensor d_logits = (in.x.is_cuda() ? differentiate_gpu : differentiate_cpu)(shape, in);
  const int64_t parts = d_logits.size(1) / shape.experts;
  if (weight_grad.defined()) {
    queue.push([=, x = in.x] {
      for (const Tensor& part : d_logits.chunk(parts, 1)) {
        accumulate_weight_grad(weight_grad, part, x);
        if (bias_grad.defined()) bias_grad.add_(part.sum(0, false, at::kFloat));
      }
    });
  }
  const Tensor weight = in.x.is_cpu() ? in.weight.to(at::kFloat) : in.weight;
  return at::mm(d_logits, parts == 2 ? at::cat({weight, weight}) : weight).to(in.x.scalar_type());
}

}  // namespace

RouterOutput router(const Tensor& x, const Parameter& weight, const Tensor& selection_bias, int64_t groups,
                    const RouterOptions& options, std::shared_ptr<RouterBalance> balance, WeightGradQueue& queue) {
  const Tensor& w = weight.value;
  check_tensor(weight.name + ": x", x, kWorkingDtype, {-1, -1});
  check_tensor(weight.name, w, x.scalar_type(), {-1, x.size(1)});
  const Parameter& bias = options.bias;
  if (bias.value.defined()) check_tensor(bias.name, bias.value, x.scalar_type(), {w.size(0)});
  MARROW_CHECK(
      w.size(0) <= kRouterMaxExperts && options.top_k >= 1 && options.top_k <= std::min(w.size(0), kRouterMaxTopK),
      ExitCode::kUsage,
      Fix("set num_experts_per_tok between 1 and the number of experts, at most "
          "{} of at most {} experts",
          kRouterMaxTopK, kRouterMaxExperts),
      "{}: top {} of {} experts", weight.name, options.top_k, w.size(0));
  const int64_t group_size = w.size(0) / std::max<int64_t>(options.expert_groups, 1);
  MARROW_CHECK(options.expert_groups >= 1 && options.expert_groups <= kRouterMaxExpertGroups &&
                   group_size * options.expert_groups == w.size(0) && options.top_groups >= 1 &&
                   options.top_groups <= options.expert_groups && options.top_groups * group_size >= options.top_k &&
                   (options.expert_groups == 1 || !options.sigmoid || group_size >= 2),
               ExitCode::kUsage,
               Fix("set n_group to a divisor of the number of experts, at most {}, and topk_group so that its groups "
                   "hold num_experts_per_tok experts",
                   kRouterMaxExpertGroups),
               "{}: the best {} of {} groups of {} experts, top {}", weight.name, options.top_groups,
               options.expert_groups, w.size(0), options.top_k);
  MARROW_CHECK(groups > 0 && x.size(0) % groups == 0, ExitCode::kUsage,
               Fix("make the tokens of a micro-batch a multiple of its sequences"),
               "{}: {} tokens do not divide into {} groups", weight.name, x.size(0), groups);
  const auto& o = options;
  const RouterShape shape{
      x.size(0), w.size(0),       o.top_k,     groups, o.normalize, o.forced, static_cast<float>(o.scale),
      o.sigmoid, o.expert_groups, o.top_groups};
  const Tensor in = x.detach();
  auto [out, logits, lse] = (x.is_cuda() ? route_gpu : route_cpu)(in, w, bias.value, selection_bias, shape);
  BackwardInputs saved{in, w, logits, lse, out.experts, out.weights, {}, {}};
  out.weights = differentiable(
      {x}, {out.weights},
      [=, &queue, grad = weight.grad, bias_grad = bias.grad](const variable_list& d_out) -> variable_list {
        BackwardInputs inputs = saved;
        inputs.d_weights = d_out[0].contiguous();
        if (balance != nullptr) {
          inputs.z_loss_gradient = static_cast<float>(balance->z_loss_gradient);
          if (balance->gradient.defined()) {
            inputs.balance_gradient = balance->gradient.contiguous();
            check_tensor("RouterBalance::gradient", inputs.balance_gradient, at::kFloat, {shape.groups, shape.experts});
          }
        }
        return {backward(shape, inputs, grad, bias_grad, queue)};
      })[0];
  return out;
}

Tensor expert_fractions(const Tensor& counts, int64_t tokens_per_group, int64_t top_k) {
  return counts.to(at::kFloat) / static_cast<double>(tokens_per_group * top_k);
}

Tensor balance_loss(const Tensor& counts, const Tensor& probability_sums, int64_t tokens_per_group, int64_t top_k) {
  const double scale = static_cast<double>(counts.size(1)) / static_cast<double>(tokens_per_group);
  return (expert_fractions(counts, tokens_per_group, top_k) * probability_sums).sum(1) * scale;
}

Tensor balance_gradient(const Tensor& fractions, int64_t tokens, double coefficient) {
  return fractions * (coefficient * static_cast<double>(fractions.size(1)) / static_cast<double>(tokens));
}

}  // namespace marrow
