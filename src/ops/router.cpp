#include "ops/router.h"

#include "ops/cpu_math.h"
#include "ops/cuda_launch.h"
#include "ops/router_cuda.h"

namespace marrow {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the backward needs besides the saved tensors.
struct RouterContext : torch::CustomClassHolder {
  RouterShape shape;
  Tensor grad;            // of the weight; changes in place before the backward
  Tensor selection_bias;  // may be undefined, which an argument of a node may not
  std::shared_ptr<RouterBalance> balance;
  WeightGradQueue* queue;
};

template <typename T>
const T* pointer_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

// Chooses the experts of one token: ids by falling score, equal scores by lower id.
void choose_cpu(const RouterShape& shape, int64_t token, const float* scores, int32_t* chosen) {
  for (int64_t j = 0; j < shape.top_k; ++j) {
    if (shape.forced) {
      chosen[j] = static_cast<int32_t>((token * shape.top_k + j) % shape.experts);
      continue;
    }
    int64_t best = -1;
    for (int64_t e = 0; e < shape.experts; ++e) {
      if (std::find(chosen, chosen + j, e) != chosen + j) continue;
      if (best < 0 || scores[e] > scores[best]) best = e;
    }
    chosen[j] = static_cast<int32_t>(best);
  }
}

// Turns a token's logits into probabilities; → logsumexp.
float route_token_cpu(const RouterShape& shape, int64_t token, const float* bias, float* row,
                      float* scores, int32_t* chosen, float* weights) {
  const int64_t experts = shape.experts;
  const float top = *std::max_element(row, row + experts);
  float sum = 0.0f;
  for (int64_t e = 0; e < experts; ++e) sum += std::exp(row[e] - top);
  const float lse = top + std::log(sum);
  for (int64_t e = 0; e < experts; ++e) {
    scores[e] = bias == nullptr ? row[e] : std::exp(row[e] - top) / sum + bias[e];
  }
  choose_cpu(shape, token, scores, chosen);
  // Normalised weights are the softmax of the chosen logits; no probability need be above 0.
  float shift = lse, chosen_sum = 0.0f;
  if (shape.normalize) {
    shift = row[chosen[0]];
    for (int64_t j = 1; j < shape.top_k; ++j) shift = std::max(shift, row[chosen[j]]);
  }
  for (int64_t j = 0; j < shape.top_k; ++j) {
    chosen_sum += weights[j] = std::exp(row[chosen[j]] - shift);
  }
  const float factor = shape.normalize ? shape.scale / chosen_sum : shape.scale;
  for (int64_t j = 0; j < shape.top_k; ++j) weights[j] *= factor;
  for (int64_t e = 0; e < experts; ++e) row[e] = std::exp(row[e] - top) / sum;
  return lse;
}

void statistics_cpu(const RouterShape& shape, const float* probabilities, const float* lse,
                    const RouterOutput& out) {
  const int64_t experts = shape.experts, tokens = shape.tokens / shape.groups;
  const auto* chosen = out.experts.const_data_ptr<int32_t>();
  auto* counts = out.counts.mutable_data_ptr<int32_t>();
  auto* sums = out.probability_sums.mutable_data_ptr<float>();
  std::vector<double> totals(experts);
  for (int64_t g = 0; g < shape.groups; ++g) {
    std::fill(totals.begin(), totals.end(), 0.0);
    for (int64_t t = g * tokens; t < (g + 1) * tokens; ++t) {
      const float* row = probabilities + t * experts;
      for (int64_t e = 0; e < experts; ++e) totals[e] += row[e];
      for (int64_t j = 0; j < shape.top_k; ++j) ++counts[g * experts + chosen[t * shape.top_k + j]];
    }
    for (int64_t e = 0; e < experts; ++e) sums[g * experts + e] = static_cast<float>(totals[e]);
  }
  double z = 0.0;
  for (int64_t t = 0; t < shape.tokens; ++t) z += double{lse[t]} * lse[t];
  *out.z_sum.mutable_data_ptr<float>() = static_cast<float>(z);
}

// → [probabilities [T, E] fp32, lse [T] fp32]; fills `out`.
variable_list route(const Tensor& x, const Tensor& weight, const Tensor& selection_bias,
                    const RouterShape& shape, RouterOutput& out) {
  const auto floats = x.options().dtype(at::kFloat), ints = x.options().dtype(at::kInt);
  const auto [tokens, experts, top_k, groups] =
      std::array{shape.tokens, shape.experts, shape.top_k, shape.groups};
  const Tensor lse = at::empty({tokens}, floats);
  out.experts = at::empty({tokens, top_k}, ints);
  out.weights = at::empty({tokens, top_k}, floats);
  out.counts = at::zeros({groups, experts}, ints);
  out.probability_sums = at::empty({groups, experts}, floats);
  out.z_sum = at::empty({1}, floats);
  const float* bias = pointer_or_null<float>(selection_bias);
  auto* chosen = out.experts.mutable_data_ptr<int32_t>();
  auto* weights = out.weights.mutable_data_ptr<float>();
  if (x.is_cuda()) {
    // Products of bf16 values are exact in fp32, so the logits are those of an fp32 router.
    const Tensor logits = x.scalar_type() == at::kFloat || tokens == 0
                              ? at::mm(x, weight.t()).to(at::kFloat)
                              : at::mm(x, weight.t(), at::kFloat);
    MARROW_CUDA_CALL({
      const Tensor partial =
          at::empty({groups * router_blocks_per_group(shape), experts + 1}, floats);
      router_forward_cuda(shape, logits.mutable_data_ptr<float>(), bias,
                          lse.mutable_data_ptr<float>(), chosen, weights,
                          out.counts.mutable_data_ptr<int32_t>(), partial.mutable_data_ptr<float>(),
                          out.probability_sums.mutable_data_ptr<float>(),
                          out.z_sum.mutable_data_ptr<float>(), current_cuda_stream());
    });
    return {logits, lse};
  }
  const Tensor probabilities = at::empty({tokens, experts}, floats);
  const Tensor xf = x.to(at::kFloat), wf = weight.to(at::kFloat);
  const int64_t hidden = x.size(1);
  const auto* xs = xf.const_data_ptr<float>();
  const auto* ws = wf.const_data_ptr<float>();
  auto* p = probabilities.mutable_data_ptr<float>();
  auto* sums = lse.mutable_data_ptr<float>();
  at::parallel_for(0, tokens, 128, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(experts);
    sgemm(false, true, end - begin, experts, hidden, xs + begin * hidden, hidden, ws, hidden, 0.0f,
          p + begin * experts, experts);
    for (int64_t t = begin; t < end; ++t) {
      sums[t] = route_token_cpu(shape, t, bias, p + t * experts, scores.data(), chosen + t * top_k,
                                weights + t * top_k);
    }
  });
  statistics_cpu(shape, p, sums, out);
  return {probabilities, lse};
}

// d objective / d logits of one token; d_weights may be null (no gradient), balance too.
void differentiate_token_cpu(const RouterShape& shape, const float* p, float lse,
                             const int32_t* chosen, const float* weights, const float* d_weights,
                             const float* balance, float z_gradient, float* d_logits) {
  const int64_t experts = shape.experts;
  std::array<float, kRouterMaxTopK> d_chosen{};  // of the weight's logit (normalize), else of p
  if (d_weights != nullptr) {
    float mean = 0.0f;
    for (int64_t j = 0; j < shape.top_k; ++j) mean += weights[j] * d_weights[j];
    mean /= shape.scale;
    for (int64_t j = 0; j < shape.top_k; ++j) {
      d_chosen[j] =
          shape.normalize ? weights[j] * (d_weights[j] - mean) : shape.scale * d_weights[j];
    }
  }
  float mean = 0.0f;
  for (int64_t e = 0; e < experts; ++e) {
    d_logits[e] = balance == nullptr ? 0.0f : balance[e];
  }
  if (!shape.normalize) {
    for (int64_t j = 0; j < shape.top_k; ++j) d_logits[chosen[j]] += d_chosen[j];
  }
  for (int64_t e = 0; e < experts; ++e) mean += p[e] * d_logits[e];
  const float shift = 2.0f * z_gradient * lse - mean;
  for (int64_t e = 0; e < experts; ++e) d_logits[e] = p[e] * (d_logits[e] + shift);
  if (shape.normalize) {
    for (int64_t j = 0; j < shape.top_k; ++j) d_logits[chosen[j]] += d_chosen[j];
  }
}

struct BackwardInputs {
  Tensor x, weight, probabilities, lse, experts, weights, d_weights, balance_gradient;
  float z_loss_gradient = 0;
};

// bf16 on the GPU: d_logits in two bf16 parts [T, 2E], so that tensor cores lose no precision of
// it.
Tensor backward_gpu(const RouterContext& context, const BackwardInputs& in) {
  const RouterShape& shape = context.shape;
  const bool split = in.x.scalar_type() == at::kBFloat16;
  const Tensor d_logits =
      at::empty({shape.tokens, shape.experts * (split ? 2 : 1)}, in.x.options());
  void* data = d_logits.mutable_data_ptr();
  MARROW_CUDA_CALL(router_backward_cuda(
      shape, in.probabilities.const_data_ptr<float>(), in.lse.const_data_ptr<float>(),
      in.experts.const_data_ptr<int32_t>(), in.weights.const_data_ptr<float>(),
      pointer_or_null<float>(in.d_weights), pointer_or_null<float>(in.balance_gradient),
      in.z_loss_gradient, split ? nullptr : static_cast<float*>(data), split ? data : nullptr,
      current_cuda_stream()));
  if (context.grad.defined() && shape.tokens > 0) {
    context.queue->push([grad = context.grad, d_logits, x = in.x, split, e = shape.experts] {
      const at::NoGradGuard no_grad;
      Tensor out = grad;
      if (split) {
        for (const int64_t first : {int64_t{0}, e}) {
          at::addmm_out(out, grad, d_logits.narrow(1, first, e).t(), x, at::kFloat, 1, 1);
        }
      } else {
        at::addmm_out(out, grad, d_logits.t(), x);
      }
    });
  }
  return at::mm(d_logits, split ? at::cat({in.weight, in.weight}) : in.weight);
}

Tensor backward_cpu(const RouterContext& context, const BackwardInputs& in) {
  const RouterShape& shape = context.shape;
  const int64_t experts = shape.experts, hidden = in.x.size(1), top_k = shape.top_k;
  const auto floats = in.probabilities.options();
  const Tensor d_logits = at::empty({shape.tokens, experts}, floats);
  const Tensor d_x = at::empty({shape.tokens, hidden}, floats);
  const Tensor wf = in.weight.to(at::kFloat);
  const auto* w = wf.const_data_ptr<float>();
  const auto* p = in.probabilities.const_data_ptr<float>();
  const auto* lse = in.lse.const_data_ptr<float>();
  const auto* chosen = in.experts.const_data_ptr<int32_t>();
  const auto* weights = in.weights.const_data_ptr<float>();
  const auto* d_weights = pointer_or_null<float>(in.d_weights);
  const auto* balance = pointer_or_null<float>(in.balance_gradient);
  auto* d = d_logits.mutable_data_ptr<float>();
  auto* dx = d_x.mutable_data_ptr<float>();
  at::parallel_for(0, shape.tokens, 128, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t group = t / (shape.tokens / shape.groups);
      differentiate_token_cpu(shape, p + t * experts, lse[t], chosen + t * top_k,
                              weights + t * top_k,
                              d_weights == nullptr ? nullptr : d_weights + t * top_k,
                              balance == nullptr ? nullptr : balance + group * experts,
                              in.z_loss_gradient, d + t * experts);
    }
    sgemm(false, false, end - begin, hidden, experts, d + begin * experts, experts, w, hidden, 0.0f,
          dx + begin * hidden, hidden);
  });
  if (context.grad.defined()) {
    context.queue->push([grad = context.grad, d_logits, x = in.x] {
      const Tensor xf = x.detach().to(at::kFloat);
      const int64_t tokens = x.size(0), e = d_logits.size(1), h = x.size(1);
      sgemm(true, false, e, h, tokens, d_logits.const_data_ptr<float>(), e,
            xf.const_data_ptr<float>(), h, 1.0f, grad.mutable_data_ptr<float>(), h);
    });
  }
  return d_x.to(in.x.scalar_type());
}

class Router : public torch::autograd::Function<Router> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               c10::intrusive_ptr<RouterContext> context) {
    RouterOutput out;
    const variable_list kept = route(x, weight, context->selection_bias, context->shape, out);
    ctx->save_for_backward({x, weight, kept[0], kept[1], out.experts, out.weights});
    ctx->saved_data["context"] = c10::IValue::make_capsule(std::move(context));
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({out.experts, out.counts, out.probability_sums, out.z_sum});
    return {out.experts, out.weights, out.counts, out.probability_sums, out.z_sum};
  }

  static variable_list backward(AutogradContext* ctx, variable_list d_out) {
    const auto capsule = ctx->saved_data["context"].toCapsule();
    const auto& context = static_cast<const RouterContext&>(*capsule);
    const auto saved = ctx->get_saved_variables();
    BackwardInputs in{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], {}, {}, 0.0f};
    if (d_out[1].defined()) in.d_weights = d_out[1].contiguous();
    if (context.balance != nullptr) {
      in.z_loss_gradient = static_cast<float>(context.balance->z_loss_gradient);
      if (context.balance->gradient.defined()) {
        in.balance_gradient = context.balance->gradient.contiguous();
        MARROW_CHECK(
            in.balance_gradient.sizes() ==
                at::IntArrayRef({context.shape.groups, context.shape.experts}),
            ExitCode::kUsage, Fix("give RouterBalance::gradient the shape of RouterOutput::counts"),
            "the balance gradient is {}, not [{}, {}]", c10::str(in.balance_gradient.sizes()),
            context.shape.groups, context.shape.experts);
      }
    }
    return {in.x.is_cuda() ? backward_gpu(context, in) : backward_cpu(context, in), {}, {}};
  }
};

}  // namespace

RouterOutput router(const Tensor& x, const Parameter& weight, const Tensor& selection_bias,
                    int64_t groups, const RouterOptions& options,
                    std::shared_ptr<RouterBalance> balance, WeightGradQueue& queue) {
  const Tensor& w = weight.value;
  MARROW_CHECK(x.dim() == 2 && w.dim() == 2 && x.size(1) == w.size(1) && x.is_contiguous() &&
                   x.scalar_type() == w.scalar_type(),
               ExitCode::kUsage, Fix("pass contiguous x [T, H] and weight [E, H] of one dtype"),
               "{}: x {} {} does not fit the weight {} {}", weight.name, c10::str(x.sizes()),
               c10::toString(x.scalar_type()), c10::str(w.sizes()), c10::toString(w.scalar_type()));
  MARROW_CHECK(
      w.size(0) <= kRouterMaxExperts && options.top_k >= 1 &&
          options.top_k <= std::min(w.size(0), kRouterMaxTopK),
      ExitCode::kUsage,
      Fix(fmt::format("set num_experts_per_tok between 1 and the number of experts, at most "
                      "{} of at most {} experts",
                      kRouterMaxTopK, kRouterMaxExperts)),
      "{}: top {} of {} experts", weight.name, options.top_k, w.size(0));
  MARROW_CHECK(groups > 0 && x.size(0) % groups == 0, ExitCode::kUsage,
               Fix("make the tokens of a micro-batch a multiple of its sequences"),
               "{}: {} tokens do not divide into {} groups", weight.name, x.size(0), groups);
  auto context = c10::make_intrusive<RouterContext>();
  context->shape = {x.size(0),
                    w.size(0),
                    options.top_k,
                    groups,
                    options.normalize,
                    options.forced,
                    static_cast<float>(options.scale)};
  context->grad = weight.grad;
  context->selection_bias = selection_bias;
  context->balance = std::move(balance);
  context->queue = &queue;
  const auto out = Router::apply(x, w.detach(), std::move(context));
  return {out[0], out[1], out[2], out[3], out[4]};
}

Tensor expert_fractions(const Tensor& counts, int64_t tokens_per_group, int64_t top_k) {
  return counts.to(at::kFloat) / static_cast<double>(tokens_per_group * top_k);
}

Tensor balance_loss(const Tensor& counts, const Tensor& probability_sums, int64_t tokens_per_group,
                    int64_t top_k) {
  const double scale = static_cast<double>(counts.size(1)) / static_cast<double>(tokens_per_group);
  return (expert_fractions(counts, tokens_per_group, top_k) * probability_sums).sum(1) * scale;
}

Tensor balance_gradient(const Tensor& fractions, int64_t tokens, double coefficient) {
  return fractions *
         (coefficient * static_cast<double>(fractions.size(1)) / static_cast<double>(tokens));
}

}  // namespace marrow
