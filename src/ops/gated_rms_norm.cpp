#include "ops/gated_rms_norm.h"

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

// to = silu(gate) · to.
void gate_row(const float* gate, float* to, int64_t size) {
  for (int64_t c = 0; c < size; c += 8) {
    const __m256 g = load8(gate + c, size - c);
    store8(to + c, _mm256_mul_ps(_mm256_mul_ps(g, sigmoid8(g)), load8(to + c, size - c)), size - c);
  }
}

// d_normed = dy · silu(gate) and d_gate = dy · normed · silu'(gate).
void gate_row_backward(const float* gate, const float* dy, const float* normed, float* d_normed, float* d_gate,
                       int64_t size) {
  for (int64_t c = 0; c < size; c += 8) {
    const int64_t n = size - c;
    const __m256 g = load8(gate + c, n), grad = load8(dy + c, n), s = sigmoid8(g), silu = _mm256_mul_ps(g, s);
    const __m256 slope = _mm256_fmadd_ps(silu, _mm256_sub_ps(_mm256_set1_ps(1.0f), s), s);
    store8(d_gate + c, _mm256_mul_ps(_mm256_mul_ps(grad, load8(normed + c, n)), slope), n);
    store8(d_normed + c, _mm256_mul_ps(grad, silu), n);
  }
}

// x and gate are [rows, D] from here on.
Tensor forward(const Tensor& x, const Tensor& gate, const Tensor& weight, float eps) {
  if (x.is_cuda()) {
    const Tensor out = at::empty_like(x);
    if (x.numel() > 0) MARROW_CUDA_CALL(gated_rms_norm_forward_cuda(x, gate, weight, out, eps));
    return out;
  }
  const Tensor xf = x.to(at::kFloat), gf = gate.to(at::kFloat), wf = weight.to(at::kFloat), out = at::empty_like(xf);
  const int64_t size = x.size(1);
  at::parallel_for(0, x.size(0), 64, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * size; at < end * size; at += size) {
      norm_row(floats(xf) + at, floats(wf), floats(out) + at, size, eps);
      gate_row(floats(gf) + at, floats(out) + at, size);
    }
  });
  return out.to(x.scalar_type());
}

// → dx and d_gate; adds the weight's.
variable_list backward(const Tensor& x, const Tensor& gate, const Tensor& dy, const Parameter& weight, float eps) {
  if (x.is_cuda()) {
    const Tensor dx = at::empty_like(x), d_gate = at::empty_like(x);
    if (x.numel() == 0) return {dx, d_gate};
    const Tensor partials =
        at::empty({std::min((x.size(0) + 15) / 16, kNormPartials), x.size(1)}, x.options().dtype(at::kFloat));
    MARROW_CUDA_CALL(gated_rms_norm_backward_cuda(x, gate, weight.value, dy, dx, d_gate, partials, weight.grad, eps));
    return {dx, d_gate};
  }
  const Tensor xf = x.to(at::kFloat), gf = gate.to(at::kFloat), df = dy.to(at::kFloat);
  const Tensor wf = weight.value.to(at::kFloat), dx = at::zeros_like(xf), d_gate = at::empty_like(xf);
  const int64_t size = x.size(1);
  const auto sums = sum_over_rows(x.size(0), size, [&](int64_t row, float* d_weight) {
    const int64_t at = row * size;
    float *to = floats(dx) + at, *to_gate = floats(d_gate) + at;
    thread_local std::vector<float> normed, d_normed;
    normed.resize(size);
    d_normed.resize(size);
    norm_row(floats(xf) + at, floats(wf), normed.data(), size, eps);
    gate_row_backward(floats(gf) + at, floats(df) + at, normed.data(), d_normed.data(), to_gate, size);
    norm_row_backward(floats(xf) + at, d_normed.data(), floats(wf), to, d_weight, size, eps);
  });
  add_sums(sums.data(), weight.grad);
  return {dx.to(x.scalar_type()), d_gate.to(x.scalar_type())};
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
