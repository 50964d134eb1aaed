#include "ops/linear.h"

#include "ops/op_tools.h"

namespace marrow {
namespace {

struct LinearState {
  Parameter weight;
  std::optional<Parameter> bias;
  WeightGradQueue* queue;
};

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const LinearState& state) {
    ctx->save_for_backward({x});
    save_state(ctx, state);
    if (state.bias) return at::addmm(state.bias->value, x, state.weight.value.t());
    return at::mm(x, state.weight.value.t());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_out) {
    const auto& state = saved_state<LinearState>(ctx);
    const Tensor x = ctx->get_saved_variables()[0].detach();
    const Tensor dy = d_out[0];
    const Tensor weight_grad = state.weight.grad;
    const Tensor bias_grad = state.bias ? state.bias->grad : Tensor();
    if (weight_grad.defined() || bias_grad.defined()) {
      state.queue->push([weight_grad, bias_grad, dy, x] {
        if (weight_grad.defined()) accumulate_weight_grad(weight_grad, dy, x);
        if (bias_grad.defined()) bias_grad.add_(at::sum(dy, {0}, false, at::kFloat));
      });
    }
    return {at::mm(dy, state.weight.value), Tensor()};
  }
};

}  // namespace

Tensor linear(const Tensor& x, const Parameter& weight, WeightGradQueue& queue, const Parameter* bias) {
  MARROW_CHECK(x.dim() == 2 && weight.value.dim() == 2 && x.size(1) == weight.value.size(1) &&
                   x.scalar_type() == weight.value.scalar_type(),
               ExitCode::kUsage, Fix("compare the model's config.json with the weights' shapes"),
               "linear: x {} {} does not fit {} {} {}", c10::str(x.sizes()), c10::toString(x.scalar_type()),
               weight.name, c10::str(weight.value.sizes()), c10::toString(weight.value.scalar_type()));
  LinearState state{weight, std::nullopt, &queue};
  if (bias != nullptr) state.bias = *bias;
  return LinearFunction::apply(x, state);
}

void accumulate_weight_grad(const Tensor& grad, const Tensor& dy, const Tensor& x) {
  if (x.size(0) == 0) return;
  Tensor target = grad;
  if (x.is_cuda() && x.scalar_type() == at::kBFloat16) {
    at::addmm_out(target, grad, dy.t(), x, at::kFloat, 1, 1);
    return;
  }
  target.addmm_(dy.to(at::kFloat).t(), x.to(at::kFloat));
}

}  // namespace marrow
