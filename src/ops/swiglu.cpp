#include "ops/pch.h"
// After the precompiled header:
#include "ops/cpu_loops.h"
#include "ops/cuda_launch.h"
#include "ops/swiglu.h"
#include "ops/swiglu_cuda.h"

namespace marrow {
namespace {

constexpr int64_t kGrain = 32768;  // elements for one thread

SwigluArgs make_args(const at::Tensor& gate_up, const at::Tensor& row_weight) {
  return {gate_up.const_data_ptr(),
          row_weight.defined() ? row_weight.const_data_ptr<float>() : nullptr, gate_up.size(0),
          gate_up.size(1) / 2, gate_up.scalar_type() == at::kBFloat16};
}

template <typename T>
void forward_cpu(const SwigluArgs& args, T* out) {
  const int64_t width = args.width;
  const int64_t grain = std::max<int64_t>(1, kGrain / width);
  const auto* gate_up = static_cast<const T*>(args.gate_up);
  at::parallel_for(0, args.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = gate_up + row * 2 * width;
      const T* up = gate + width;
      T* target = out + row * width;
      const __m256 weight =
          _mm256_set1_ps(args.row_weight == nullptr ? 1.0f : args.row_weight[row]);
      for (int64_t c = 0; c < width; c += 8) {
        const __m256 g = load8(gate + c, width - c);
        const __m256 scaled = _mm256_mul_ps(load8(up + c, width - c), weight);
        store8(target + c, _mm256_mul_ps(_mm256_mul_ps(g, sigmoid8(g)), scaled), width - c);
      }
    }
  });
}

template <typename T>
void backward_cpu(const SwigluArgs& args, const T* d_out, T* d_gate_up, float* d_row_weight) {
  const int64_t width = args.width;
  const int64_t grain = std::max<int64_t>(1, kGrain / width);
  const auto* gate_up = static_cast<const T*>(args.gate_up);
  at::parallel_for(0, args.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = gate_up + row * 2 * width;
      const T* up = gate + width;
      const T* d = d_out + row * width;
      T* d_gate = d_gate_up + row * 2 * width;
      T* d_up = d_gate + width;
      const __m256 weight =
          _mm256_set1_ps(args.row_weight == nullptr ? 1.0f : args.row_weight[row]);
      __m256 dot = _mm256_setzero_ps();
      for (int64_t c = 0; c < width; c += 8) {
        const int64_t n = width - c;
        const __m256 g = load8(gate + c, n);
        const __m256 u = load8(up + c, n);
        const __m256 grad = load8(d + c, n);
        const __m256 sigmoid = sigmoid8(g);
        const __m256 silu = _mm256_mul_ps(g, sigmoid);
        const __m256 slope =
            _mm256_fmadd_ps(silu, _mm256_sub_ps(_mm256_set1_ps(1.0f), sigmoid), sigmoid);
        const __m256 scaled = _mm256_mul_ps(grad, weight);
        dot = _mm256_fmadd_ps(grad, _mm256_mul_ps(silu, u), dot);
        store8(d_gate + c, _mm256_mul_ps(_mm256_mul_ps(scaled, u), slope), n);
        store8(d_up + c, _mm256_mul_ps(scaled, silu), n);
      }
      if (d_row_weight != nullptr) d_row_weight[row] = sum8(dot);
    }
  });
}

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate_up,
                            const std::optional<at::Tensor>& weight) {
    const at::Tensor row_weight = weight.value_or(at::Tensor());
    ctx->save_for_backward({gate_up, row_weight});
    at::Tensor out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
    if (out.numel() == 0) return out;
    const SwigluArgs args = make_args(gate_up, row_weight);
    if (gate_up.is_cuda()) {
      MARROW_CUDA_CALL(swiglu_forward_cuda(args, out.data_ptr(), current_cuda_stream()));
      return out;
    }
    dispatch_working_dtype(gate_up.scalar_type(),
                           [&](auto zero) { forward_cpu(args, out.data_ptr<decltype(zero)>()); });
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& d_out) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& gate_up = saved[0];
    const at::Tensor& row_weight = saved[1];
    const at::Tensor d = d_out[0].contiguous();
    at::Tensor d_gate_up = at::empty(gate_up.sizes(), gate_up.options());
    at::Tensor d_row_weight;
    if (row_weight.defined() && ctx->needs_input_grad(1)) {
      d_row_weight = at::empty(row_weight.sizes(), row_weight.options());
    }
    if (d.numel() == 0) {
      if (d_row_weight.defined()) d_row_weight.zero_();
      return {d_gate_up, d_row_weight};
    }
    const SwigluArgs args = make_args(gate_up, row_weight);
    float* d_weight = d_row_weight.defined() ? d_row_weight.data_ptr<float>() : nullptr;
    if (gate_up.is_cuda()) {
      MARROW_CUDA_CALL(swiglu_backward_cuda(args, d.const_data_ptr(), d_gate_up.data_ptr(),
                                            d_weight, current_cuda_stream()));
      return {d_gate_up, d_row_weight};
    }
    dispatch_working_dtype(gate_up.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      backward_cpu(args, d.const_data_ptr<T>(), d_gate_up.data_ptr<T>(), d_weight);
    });
    return {d_gate_up, d_row_weight};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate_up, const at::Tensor& row_weight) {
  MARROW_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, ExitCode::kUsage,
               Fix("pass gate and up side by side, [R, 2I]"), "swiglu: gate_up {}",
               c10::str(gate_up.sizes()));
  MARROW_CHECK(!row_weight.defined() || (row_weight.scalar_type() == at::kFloat &&
                                         row_weight.numel() == gate_up.size(0)),
               ExitCode::kUsage, Fix("pass one fp32 routing weight a row"),
               "swiglu: {} rows, row_weight {} {}", gate_up.size(0), c10::str(row_weight.sizes()),
               c10::toString(row_weight.scalar_type()));
  // An undefined tensor is no input of a Function; an absent one is.
  std::optional<at::Tensor> weight;
  if (row_weight.defined()) weight = row_weight.contiguous();
  return SwigluFunction::apply(gate_up.contiguous(), weight);
}

}  // namespace marrow
