#include "ops/pch.h"
// After the precompiled header:
#include "ops/cpu_loops.h"
#include "ops/cuda_launch.h"
#include "ops/rms_norm.h"
#include "ops/rms_norm_cuda.h"
#include "ops/saved_state.h"

namespace marrow {
namespace {

constexpr int64_t kRowsPerPartial = 256;  // fixed: the gradient must not depend on the threads

struct NormState {
  Parameter weight;
  double eps;
};

RmsNormArgs cuda_args(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                      double eps) {
  return {x.const_data_ptr(),
          residual.defined() ? residual.const_data_ptr() : nullptr,
          weight.const_data_ptr(),
          x.size(0),
          x.size(1),
          static_cast<float>(eps),
          x.scalar_type() == at::kBFloat16};
}

// `residual` and `sum` are null for the plain norm.
template <typename T>
void forward_cpu(const T* x, const T* residual, const T* weight, T* sum, T* normed, int64_t rows,
                 int64_t hidden, float eps) {
  at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t offset = begin * hidden; offset < end * hidden; offset += hidden) {
      const T* row = x + offset;
      if (residual != nullptr) {
        const T* other = residual + offset;
        T* total = sum + offset;
#pragma omp simd
        for (int64_t c = 0; c < hidden; ++c) {
          total[c] = static_cast<T>(static_cast<float>(row[c]) + static_cast<float>(other[c]));
        }
        row = total;
      }
      const float scale = inverse_rms(row, hidden, eps);
      T* out = normed + offset;
#pragma omp simd
      for (int64_t c = 0; c < hidden; ++c) {
        out[c] = static_cast<T>(static_cast<float>(row[c]) * scale * static_cast<float>(weight[c]));
      }
    }
  });
}

template <typename T>
void backward_row(const T* x, const T* dy, const T* d_sum, const T* weight, T* dx, float* d_weight,
                  int64_t hidden, float eps) {
  const float scale = inverse_rms(x, hidden, eps);
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t c = 0; c < hidden; ++c) {
    const float d = static_cast<float>(dy[c]);
    const float value = static_cast<float>(x[c]);
    dot += d * static_cast<float>(weight[c]) * value;
    d_weight[c] += d * value * scale;
  }
  const float shift = dot * scale * scale / static_cast<float>(hidden);
  if (d_sum == nullptr) {
#pragma omp simd
    for (int64_t c = 0; c < hidden; ++c) {
      const float d = static_cast<float>(dy[c]) * static_cast<float>(weight[c]);
      dx[c] = static_cast<T>(scale * (d - static_cast<float>(x[c]) * shift));
    }
    return;
  }
#pragma omp simd
  for (int64_t c = 0; c < hidden; ++c) {
    const float d = static_cast<float>(dy[c]) * static_cast<float>(weight[c]);
    const float through = scale * (d - static_cast<float>(x[c]) * shift);
    dx[c] = static_cast<T>(through + static_cast<float>(d_sum[c]));
  }
}

template <typename T>
void backward_cpu(const T* x, const T* dy, const T* d_sum, const T* weight, T* dx,
                  float* weight_grad, int64_t rows, int64_t hidden, float eps) {
  const int64_t chunks = (rows + kRowsPerPartial - 1) / kRowsPerPartial;
  std::vector<float> partials(chunks * hidden, 0.0f);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t last = std::min(rows, (chunk + 1) * kRowsPerPartial);
      for (int64_t row = chunk * kRowsPerPartial; row < last; ++row) {
        const int64_t at = row * hidden;
        backward_row(x + at, dy + at, d_sum == nullptr ? nullptr : d_sum + at, weight, dx + at,
                     partials.data() + chunk * hidden, hidden, eps);
      }
    }
  });
  if (weight_grad == nullptr) return;
  for (int64_t i = hidden; i < chunks * hidden; ++i) partials[i % hidden] += partials[i];
  for (int64_t c = 0; c < hidden; ++c) weight_grad[c] += partials[c];
}

// {sum, normed}; sum is undefined without a residual.
std::pair<at::Tensor, at::Tensor> norm_forward(const at::Tensor& x, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps) {
  at::Tensor normed = at::empty(x.sizes(), x.options());
  at::Tensor sum = residual.defined() ? at::empty(x.sizes(), x.options()) : at::Tensor();
  if (x.numel() == 0) return {sum, normed};
  if (x.is_cuda()) {
    void* sum_pointer = sum.defined() ? sum.data_ptr() : nullptr;
    MARROW_CUDA_CALL(rms_norm_forward_cuda(cuda_args(x, residual, weight, eps), sum_pointer,
                                           normed.data_ptr(), current_cuda_stream()));
    return {sum, normed};
  }
  dispatch_working_dtype(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const bool add = residual.defined();
    forward_cpu<T>(x.const_data_ptr<T>(), add ? residual.const_data_ptr<T>() : nullptr,
                   weight.const_data_ptr<T>(), add ? sum.data_ptr<T>() : nullptr,
                   normed.data_ptr<T>(), x.size(0), x.size(1), static_cast<float>(eps));
  });
  return {sum, normed};
}

// Gradient of `x`; adds the weight's. `d_sum` may be undefined.
at::Tensor norm_backward(const at::Tensor& x, const at::Tensor& d_normed, const at::Tensor& d_sum,
                         const NormState& state) {
  at::Tensor dx = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return dx;
  const at::Tensor& weight = state.weight.value;
  const at::Tensor dy = d_normed.contiguous();
  const at::Tensor ds = d_sum.defined() ? d_sum.contiguous() : d_sum;
  float* weight_grad = state.weight.grad.defined() ? state.weight.grad.data_ptr<float>() : nullptr;
  if (x.is_cuda()) {
    const int64_t rows_of_partials = std::min(x.size(0), kRmsNormPartials);
    const at::Tensor partials =
        at::empty({rows_of_partials, x.size(1)}, x.options().dtype(at::kFloat));
    MARROW_CUDA_CALL(rms_norm_backward_cuda(
        cuda_args(x, {}, weight, state.eps), dy.const_data_ptr(),
        ds.defined() ? ds.const_data_ptr() : nullptr, dx.data_ptr(), partials.data_ptr<float>(),
        rows_of_partials, weight_grad, current_cuda_stream()));
    return dx;
  }
  dispatch_working_dtype(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    backward_cpu<T>(x.const_data_ptr<T>(), dy.const_data_ptr<T>(),
                    ds.defined() ? ds.const_data_ptr<T>() : nullptr, weight.const_data_ptr<T>(),
                    dx.data_ptr<T>(), weight_grad, x.size(0), x.size(1),
                    static_cast<float>(state.eps));
  });
  return dx;
}

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const NormState& state) {
    ctx->save_for_backward({x});
    save_state(ctx, state);
    return norm_forward(x, {}, state.weight.value, state.eps).second;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& d_out) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    return {norm_backward(x, d_out[0], {}, saved_state<NormState>(ctx)), at::Tensor()};
  }
};

struct AddRmsNormFunction : torch::autograd::Function<AddRmsNormFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const at::Tensor& x, const at::Tensor& residual,
                                                const NormState& state) {
    auto [sum, normed] = norm_forward(x, residual, state.weight.value, state.eps);
    ctx->save_for_backward({sum});
    ctx->set_materialize_grads(false);
    save_state(ctx, state);
    return {sum, normed};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& d_out) {
    const at::Tensor sum = ctx->get_saved_variables()[0];
    const at::Tensor dx = d_out[1].defined()
                              ? norm_backward(sum, d_out[1], d_out[0], saved_state<NormState>(ctx))
                              : d_out[0];
    return {dx, dx, at::Tensor()};
  }
};

void check(const at::Tensor& x, const at::Tensor& residual, const Parameter& weight) {
  MARROW_CHECK(x.dim() == 2 && weight.value.numel() == x.size(1) &&
                   x.scalar_type() == weight.value.scalar_type() && weight.value.is_contiguous(),
               ExitCode::kUsage, Fix("compare hidden_size in config.json with the weights"),
               "rms_norm: x {} {} does not fit {} {} {}", c10::str(x.sizes()),
               c10::toString(x.scalar_type()), weight.name, c10::str(weight.value.sizes()),
               c10::toString(weight.value.scalar_type()));
  MARROW_CHECK(!residual.defined() ||
                   (residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type()),
               ExitCode::kUsage, Fix("pass the residual stream of the same tokens"),
               "add_rms_norm: x {} and residual {}", c10::str(x.sizes()),
               c10::str(residual.sizes()));
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const Parameter& weight, double eps) {
  check(x, {}, weight);
  return RmsNormFunction::apply(x.contiguous(), NormState{weight, eps});
}

std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                               const Parameter& weight, double eps) {
  check(x, residual, weight);
  const auto outputs =
      AddRmsNormFunction::apply(x.contiguous(), residual.contiguous(), NormState{weight, eps});
  return {outputs[0], outputs[1]};
}

}  // namespace marrow
