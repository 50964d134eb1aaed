#include "ops/linear.h"

#include "ops/op_tools.h"

namespace marrow {

Tensor linear(const Tensor& x, const Parameter& weight, WeightGradQueue& queue, const Parameter* bias) {
  MARROW_CHECK(x.dim() == 2 && weight.value.dim() == 2 && x.size(1) == weight.value.size(1) &&
                   x.scalar_type() == weight.value.scalar_type(),
               ExitCode::kUsage, Fix("compare the model's config.json with the weights' shapes"),
               "linear: x {} {} does not fit {} {} {}", c10::str(x.sizes()), c10::toString(x.scalar_type()),
               weight.name, c10::str(weight.value.sizes()), c10::toString(weight.value.scalar_type()));
  const Tensor in = x.detach(), bias_grad = bias != nullptr ? bias->grad : Tensor();
  const Tensor y = bias != nullptr ? at::addmm(bias->value, in, weight.value.t()) : at::mm(in, weight.value.t());
  return differentiable({x}, {y}, [=, &queue](const variable_list& d_out) -> variable_list {
    const Tensor &dy = d_out[0], &weight_grad = weight.grad;
    if (weight_grad.defined() || bias_grad.defined()) {
      queue.push([=] {
        if (weight_grad.defined()) accumulate_weight_grad(weight_grad, dy, in);
        if (bias_grad.defined()) bias_grad.add_(at::sum(dy, {0}, false, at::kFloat));
      });
    }
    return {at::mm(dy, weight.value)};
  })[0];
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
