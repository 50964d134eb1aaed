#include "ops/rms_norm.h"

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

Tensor forward_cpu(const Tensor& x, const Tensor& weight, float eps, float offset) {
  const Tensor xf = x.to(at::kFloat), wf = weight.to(at::kFloat).add(offset), out = at::empty_like(xf);
  const int64_t hidden = x.size(1);
  at::parallel_for(0, x.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      norm_row(floats(xf) + row * hidden, floats(wf), floats(out) + row * hidden, hidden, eps);
    }
  });
  return out.to(x.scalar_type());
}

// Gradient of x: d_sum (or none) + that through the norm. Adds the weight's.
Tensor norm_backward(const Tensor& x, const Tensor& dy, const Tensor& d_sum, const Parameter& weight, float eps,
                     float offset) {
  if (x.numel() == 0) return at::empty_like(x);
  if (x.is_cuda()) {
    const Tensor dx = at::empty_like(x);
    const Tensor partials = at::empty({std::min(x.size(0), kNormPartials), x.size(1)}, x.options().dtype(at::kFloat));
    MARROW_CUDA_CALL(rms_norm_backward_cuda(x, dy, d_sum, weight.value, dx, partials, weight.grad, eps, offset));
    return dx;
  }
  const Tensor xf = x.to(at::kFloat), dyf = dy.to(at::kFloat), wf = weight.value.to(at::kFloat).add(offset);
  const Tensor dx = d_sum.defined() ? d_sum.to(at::kFloat, false, /*copy=*/true) : at::zeros_like(xf);
  const int64_t hidden = x.size(1);
  const auto sums = sum_over_rows(x.size(0), hidden, [&](int64_t row, float* d_weight) {
    const int64_t at = row * hidden;
    norm_row_backward(floats(xf) + at, floats(dyf) + at, floats(wf), floats(dx) + at, d_weight, hidden, eps);
  });
  add_sums(sums.data(), weight.grad);
  return dx.to(x.scalar_type());
}

// → normed, or normed and sum where there is a residual.
variable_list norm(const Tensor& x, const Tensor& residual, const Parameter& weight, double epsilon, double shift) {
  const Tensor in = x.detach().contiguous(), other = residual.defined() ? residual.detach().contiguous() : residual;
  check_tensor("rms_norm: x", in, kWorkingDtype, {-1, -1});
  MARROW_CHECK(in.size(1) == weight.value.numel(), ExitCode::kUsage,
               Fix("compare hidden_size in config.json with the weights"), "rms_norm: x {} does not fit {} {}",
               c10::str(in.sizes()), weight.name, c10::str(weight.value.sizes()));
  check_tensor(weight.name, weight.value, in.scalar_type(), weight.value.sizes());
  if (other.defined()) check_tensor("add_rms_norm: the residual", other, in.scalar_type(), in.sizes());
  const auto eps = static_cast<float>(epsilon), offset = static_cast<float>(shift);
  Tensor sum = other.defined() ? at::empty_like(in) : in, normed;
  if (in.is_cuda()) {
    normed = at::empty_like(in);
    if (in.numel() > 0) {
      MARROW_CUDA_CALL(
          rms_norm_forward_cuda(in, other, weight.value, other.defined() ? sum : other, normed, eps, offset));
    }
  } else {
    if (other.defined()) at::add_out(sum, in, other);
    normed = forward_cpu(sum, weight.value, eps, offset);
  }
  const auto backward = [=](const variable_list& d_out) -> variable_list {
    const Tensor d_sum = d_out.size() > 1 ? d_out[1].contiguous() : Tensor();
    const Tensor dx = norm_backward(sum, d_out[0].contiguous(), d_sum, weight, eps, offset);
    return d_out.size() > 1 ? variable_list{dx, dx} : variable_list{dx};
  };
  if (!other.defined()) return differentiable({x}, {normed}, backward);
  return differentiable({x, residual}, {normed, sum}, backward);
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Parameter& weight, double eps, double offset) {
  return norm(x, {}, weight, eps, offset)[0];
}

std::pair<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Parameter& weight, double eps,
                                       double offset) {
  const variable_list outputs = norm(x, residual, weight, eps, offset);
  return {outputs[1], outputs[0]};
}

}  // namespace marrow
