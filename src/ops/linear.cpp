#include "ops/linear.h"

#include "ops/fp8_quantize.h"
#include "ops/op_tools.h"

namespace marrow {

Tensor linear(const Tensor& x, const Parameter& weight, WeightGradQueue& queue, const Parameter* bias) {
  MARROW_CHECK(x.dim() == 2 && weight.value.dim() == 2 && x.size(1) == weight.value.size(1) &&
                   x.scalar_type() == weight.value.scalar_type(),
               ExitCode::kUsage, Fix("compare the model's config.json with the weights' shapes"),
               "linear: x {} {} does not fit {} {} {}", c10::str(x.sizes()), c10::toString(x.scalar_type()),
               weight.name, c10::str(weight.value.sizes()), c10::toString(weight.value.scalar_type()));
  const Tensor bias_grad = bias != nullptr ? bias->grad : Tensor();
  const int64_t n = weight.value.size(0), k = weight.value.size(1);
  Tensor in = x.detach();
  const bool forward8 = fp8_wins(weight, Fp8Product::kForward, in, n);
  const bool weight8 = x.requires_grad() && weight_grad_in_fp8(weight, in);
  Fp8Pair in8;
  if (forward8 || weight8) in8 = quantize_rows(in.contiguous(), forward8, weight8);
  Tensor y;
  if (forward8) {
    y = fp8_product(in8.rows, weight.fp8->of(weight.value).rows, in.scalar_type());
    if (bias != nullptr) y.add_(bias->value);
  } else {
    y = bias != nullptr ? at::addmm(bias->value, in, weight.value.t()) : at::mm(in, weight.value.t());
  }
  if (weight8) in = Tensor();
  return differentiable({x}, {y}, [=, &queue, kept = in8.transposed](const variable_list& d_out) -> variable_list {
    const Tensor &dy = d_out[0], &weight_grad = weight.grad;
    const bool input8 = fp8_wins(weight, Fp8Product::kInputGrad, dy, k);
    Fp8Pair dy8;
    if (input8 || weight8) dy8 = quantize_rows(dy.contiguous(), input8, weight8);
    if (weight_grad.defined() || bias_grad.defined()) {
      // In fp8 dy itself is not kept until then, unless the bias has a gradient.
      const Tensor late_dy = weight8 && !bias_grad.defined() ? Tensor() : dy;
      queue.push([=, late = dy8.transposed] {
        if (weight8) {
          accumulate_fp8(weight_grad, late, kept);
        } else if (weight_grad.defined()) {
          accumulate_weight_grad(weight_grad, late_dy, in);
        }
        if (bias_grad.defined()) bias_grad.add_(at::sum(late_dy, {0}, false, at::kFloat));
      });
    }
    if (input8) return {fp8_product(dy8.rows, weight.fp8->of(weight.value).transposed, dy.scalar_type())};
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
