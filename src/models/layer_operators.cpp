#include "models/layer_operators.h"

#include "models/key_value_cache.h"
#include "ops/grouped_linear.h"
#include "ops/linear.h"
#include "ops/swiglu.h"
#include "parallel/context_attention.h"

namespace marrow {

Parameter LayerParameters::operator()(std::string_view name) const {
  return table.at(fmt::format("layers.{}.{}", layer, name));
}

Parameter LayerParameters::if_any(std::string_view name) const {
  const auto found = table.find(fmt::format("layers.{}.{}", layer, name));
  return found == table.end() ? Parameter{} : found->second;
}

at::Tensor cheap(const LayerContext& context, const std::function<at::Tensor()>& make, const Parameter& reader) {
  const at::Tensor made = make();
  if (context.recompute == nullptr || weight_grad_in_fp8(reader, made)) return made;
  context.recompute->add({made}, [make] { return std::vector{make()}; });
  return made;
}

Heads cheap_heads(const LayerContext& context, const std::function<Heads()>& make) {
  const Heads made = make();
  const auto q_and_k = [](const Heads& heads) { return std::vector{std::get<0>(heads), std::get<1>(heads)}; };
  if (context.recompute != nullptr) context.recompute->add(q_and_k(made), [=] { return q_and_k(make()); });
  return made;
}

at::Tensor attend(const LayerContext& context, int64_t layer, const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& v, double scale, int64_t window, const Parameter& sinks) {
  if (context.cache != nullptr) return context.cache->attend(layer, q, k, v, scale, window, sinks.value);
  AttentionLayout layout = context.attention;
  layout.window = window;
  return context_attention(q, k, v, layout, scale, context.deterministic, context.context_ring, sinks);
}

RouterOutput route(const LayerContext& context, const at::Tensor& normed, const Parameter& weight,
                   RouterOptions options) {
  options.forced = context.forced_routing;
  return router(normed, weight, context.selection_bias, context.balance_groups, options, context.balance,
                *context.weight_grads);
}

at::Tensor swiglu_mlp(const LayerContext& context, const at::Tensor& x, const Parameter& gate_up,
                      const Parameter& down) {
  const auto activate = [both = linear(x, gate_up, *context.weight_grads)] { return swiglu(both); };
  return linear(cheap(context, activate, down), down, *context.weight_grads);
}

ExpertRows swiglu_experts(const LayerContext& context, const ExpertRows& rows, const at::Tensor& row_weights,
                          const Parameter& gate_up, const Parameter& down) {
  const ExpertRows both = grouped_linear(rows, gate_up, *context.weight_grads);
  const ExpertRows activated = swiglu(both, row_weights, down);
  if (context.recompute != nullptr && !activated.only_in_fp8()) {
    context.recompute->add({activated.value},
                           [=] { return std::vector{swiglu(both.value, row_weights, both.offsets)}; });
  }
  return grouped_linear(activated, down, *context.weight_grads);
}

void count_swiglu_experts(ActivationBytes& bytes, int64_t element, int64_t hidden, int64_t inner) {
  bytes.expert_row = element * (hidden + 2 * inner + inner) + 4;  // row, gate and up, activated, weight
  bytes.expert_row_cheap = element * (hidden + inner);
  // The gradient of the result, and then those of activated, gate and up, or that of the row.
  bytes.expert_row_backward = element * (hidden + std::max(hidden, 3 * inner));
}

}  // namespace marrow
