#include "ops/gated_rms_norm.h"

#include "ops/op_tools.h"

namespace marrow {
namespace {

// In fp32: x, 1 / sqrt(mean(x²) + eps), the gate and its sigmoid; x and gate are [rows, D] from here on.
struct Parts {
  Tensor x, inverse, gate, sigmoid;
  Parts(const Tensor& rows, const Tensor& gates, float eps)
      : x(rows.to(at::kFloat)),
        inverse(x.square().mean(-1, true).add_(eps).rsqrt_()),
        gate(gates.to(at::kFloat)),
        sigmoid(gate.sigmoid()) {}
};

Tensor forward(const Tensor& x, const Tensor& gate, const Tensor& weight, float eps) {
  if (x.is_cuda()) {
    const Tensor out = at::empty_like(x);
    if (x.numel() > 0) MARROW_CUDA_CALL(gated_rms_norm_forward_cuda(x, gate, weight, out, eps));
    return out;
  }
  const Parts of(x, gate, eps);
  return (of.x * of.inverse).mul_(weight.to(at::kFloat)).mul_(of.gate).mul_(of.sigmoid).to(x.scalar_type());
}

// → dx and d_gate; adds the weight's.
variable_list backward(const Tensor& x, const Tensor& gate, const Tensor& dy, const Parameter& weight, float eps) {
  if (x.is_cuda()) {
    const Tensor dx = at::empty_like(x), d_gate = at::empty_like(x);
    if (x.numel() == 0) return {dx, d_gate};
    const int64_t blocks = std::min((x.size(0) + 15) / 16, kNormPartials);
    const Tensor partials = at::empty({blocks, x.size(1)}, x.options().dtype(at::kFloat));
    MARROW_CUDA_CALL(gated_rms_norm_backward_cuda(x, gate, weight.value, dy, dx, d_gate, partials, weight.grad, eps));
    return {dx, d_gate};
  }
  const Parts of(x, gate, eps);
  const Tensor factor = weight.value.to(at::kFloat), d = dy.to(at::kFloat);
  const Tensor unit = of.x * of.inverse, silu = of.gate * of.sigmoid, slope = of.sigmoid + silu * (1 - of.sigmoid);
  if (weight.grad.defined()) Tensor(weight.grad).add_((d * silu).mul_(unit).sum(0));
  const Tensor d_unit = d * silu * factor;
  return {(d_unit - unit * (d_unit * unit).mean(-1, true)).mul_(of.inverse).to(x.scalar_type()),
          (d * unit).mul_(factor).mul_(slope).to(x.scalar_type())};
}

}  // namespace

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Parameter& weight, double epsilon) {
  const Tensor in = x.detach().contiguous(), gates = gate.detach().contiguous();
  check_tensor("gated_rms_norm: x", in, kWorkingDtype, {-1, -1, -1});
  check_tensor("gated_rms_norm: gate", gates, x.scalar_type(), x.sizes(), x.device());
  check_tensor(weight.name, weight.value, x.scalar_type(), {x.size(2)}, x.device());
  MARROW_CHECK(x.is_cpu() || x.size(2) <= kGatedNormMaxSize, ExitCode::kUsage,
               Fix("lower linear_value_head_dim in config.json"), "gated_rms_norm: rows of {}, at most {} on a GPU",
               x.size(2), kGatedNormMaxSize);
  const Tensor rows = in.flatten(0, 1), gate_rows = gates.flatten(0, 1);
  const auto eps = static_cast<float>(epsilon);
  const Tensor out = forward(rows, gate_rows, weight.value, eps).view(x.sizes());
  return differentiable({x, gate}, {out}, [=, sizes = x.sizes().vec()](const variable_list& d_out) -> variable_list {
    const auto grads = backward(rows, gate_rows, d_out[0].contiguous().flatten(0, 1), weight, eps);
    return {grads[0].view(sizes), grads[1].view(sizes)};
  })[0];
}

}  // namespace marrow
