#include "ops/rms_norm.h"

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

constexpr int64_t kRowsPerPartial = 256;  // fixed: the gradient must not depend on the threads

struct NormState {
  Parameter weight;
  double eps;
};

Tensor forward_cpu(const Tensor& x, const Tensor& weight, float eps) {
  const Tensor xf = x.to(at::kFloat), wf = weight.to(at::kFloat), out = at::empty_like(xf);
  const int64_t hidden = x.size(1);
  const float* w = floats(wf);
  at::parallel_for(0, x.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = floats(xf) + row * hidden;
      float* to = floats(out) + row * hidden;
      const float scale = inverse_rms(from, hidden, eps);
#pragma omp simd
      for (int64_t c = 0; c < hidden; ++c) to[c] = from[c] * scale * w[c];
    }
  });
  return out.to(x.scalar_type());
}

void backward_row(const float* x, const float* dy, const float* weight, float* dx, float* d_weight, int64_t hidden,
                  float eps) {
  const float scale = inverse_rms(x, hidden, eps);
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t c = 0; c < hidden; ++c) {
    dot += dy[c] * weight[c] * x[c];
    d_weight[c] += dy[c] * x[c] * scale;
  }
  const float shift = dot * scale * scale / static_cast<float>(hidden);
#pragma omp simd
  for (int64_t c = 0; c < hidden; ++c) dx[c] += scale * (dy[c] * weight[c] - x[c] * shift);
}

// dx [T, H] fp32 += the gradient through the norm.
void backward_cpu(const Tensor& x, const Tensor& dy, const Tensor& weight, const Tensor& dx, const Tensor& weight_grad,
                  float eps) {
  const int64_t rows = x.size(0), hidden = x.size(1);
  const int64_t chunks = (rows + kRowsPerPartial - 1) / kRowsPerPartial;
  std::vector<float> partials(chunks * hidden, 0.0f);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kRowsPerPartial; row < std::min(rows, end * kRowsPerPartial); ++row) {
      const int64_t at = row * hidden;
      backward_row(floats(x) + at, floats(dy) + at, floats(weight), floats(dx) + at,
                   partials.data() + row / kRowsPerPartial * hidden, hidden, eps);
    }
  });
  if (!weight_grad.defined()) return;
  add_column_sums(partials.data(), chunks, hidden, hidden, floats(weight_grad));
}

// Gradient of `x`; adds the weight's. `d_sum` may be undefined.
Tensor norm_backward(const Tensor& x, const Tensor& dy, const Tensor& d_sum, const NormState& state) {
  const Tensor &weight = state.weight.value, &weight_grad = state.weight.grad;
  const auto eps = static_cast<float>(state.eps);
  if (x.numel() == 0) return at::empty_like(x);
  if (x.is_cuda()) {
    const Tensor dx = at::empty_like(x);
    const Tensor partials = at::empty({std::min(x.size(0), kNormPartials), x.size(1)}, x.options().dtype(at::kFloat));
    MARROW_CUDA_CALL(rms_norm_backward_cuda(x, dy, d_sum, weight, dx, partials, weight_grad, eps));
    return dx;
  }
  const Tensor dx = d_sum.defined() ? d_sum.to(at::kFloat, false, /*copy=*/true)
                                    : at::zeros(x.sizes(), x.options().dtype(at::kFloat));
  backward_cpu(x.to(at::kFloat), dy.to(at::kFloat), weight.to(at::kFloat), dx, weight_grad, eps);
  return dx.to(x.scalar_type());
}

// → normed, or normed and sum where there is a residual.
struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const std::optional<Tensor>& residual,
                               const NormState& state) {
    const auto eps = static_cast<float>(state.eps);
    const Tensor& weight = state.weight.value;
    Tensor sum = residual ? at::empty_like(x) : Tensor(), normed;
    if (x.is_cuda()) {
      normed = at::empty_like(x);
      if (x.numel() > 0) {
        MARROW_CUDA_CALL(rms_norm_forward_cuda(x, residual.value_or(Tensor()), weight, sum, normed, eps));
      }
    } else {
      if (residual) at::add_out(sum, x, *residual);
      normed = forward_cpu(residual ? sum : x, weight, eps);
    }
    ctx->save_for_backward({residual ? sum : x});
    ctx->set_materialize_grads(false);
    save_state(ctx, state);
    if (residual) return {normed, sum};
    return {normed};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_out) {
    const Tensor x = ctx->get_saved_variables()[0];
    const Tensor d_sum = d_out.size() > 1 ? d_out[1] : Tensor();
    Tensor dx = d_sum;
    if (d_out[0].defined()) {
      dx = norm_backward(x, d_out[0].contiguous(), d_sum.defined() ? d_sum.contiguous() : d_sum,
                         saved_state<NormState>(ctx));
    }
    return {dx, d_out.size() > 1 ? dx : Tensor(), Tensor()};
  }
};

variable_list norm(const Tensor& x, const Tensor& residual, const Parameter& weight, double eps) {
  check_tensor("rms_norm: x", x, kWorkingDtype, {-1, -1});
  MARROW_CHECK(x.size(1) == weight.value.numel(), ExitCode::kUsage,
               Fix("compare hidden_size in config.json with the weights"), "rms_norm: x {} does not fit {} {}",
               c10::str(x.sizes()), weight.name, c10::str(weight.value.sizes()));
  check_tensor(weight.name, weight.value, x.scalar_type(), weight.value.sizes());
  if (residual.defined()) {
    check_tensor("add_rms_norm: the residual", residual, x.scalar_type(), x.sizes());
  }
  return RmsNormFunction::apply(x, if_defined(residual), NormState{weight, eps});
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Parameter& weight, double eps) {
  return norm(x.contiguous(), {}, weight, eps)[0];
}

std::pair<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Parameter& weight, double eps) {
  const variable_list outputs = norm(x.contiguous(), residual.contiguous(), weight, eps);
  return {outputs[1], outputs[0]};
}

}  // namespace marrow
