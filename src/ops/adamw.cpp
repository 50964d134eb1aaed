#include "ops/adamw.h"

#include "ops/cpu_math.h"
#include "ops/op_tools.h"

namespace marrow {
namespace {

AdamwFactors factors_of(const AdamwStep& step) {
  const double correction1 = 1.0 - std::pow(step.beta1, static_cast<double>(step.step));
  const double correction2 = 1.0 - std::pow(step.beta2, static_cast<double>(step.step));
  return {static_cast<float>(1.0 - step.lr * step.weight_decay),
          static_cast<float>(1.0 - step.beta1),
          static_cast<float>(step.beta2),
          static_cast<float>(1.0 - step.beta2),
          static_cast<float>(step.lr / correction1),
          static_cast<float>(1.0 / std::sqrt(correction2)),
          static_cast<float>(step.eps),
          step.zero_grad};
}

// Eight elements of fp32 masters and moments.
void update8(const AdamwFactors& f, float scale, float* master, const float* grad, float* exp_avg, float* exp_avg_sq) {
  const auto all = [](float x) { return _mm256_set1_ps(x); };
  const __m256 g = _mm256_mul_ps(all(scale), _mm256_loadu_ps(grad));
  __m256 m = _mm256_loadu_ps(exp_avg), v = _mm256_loadu_ps(exp_avg_sq);
  m = _mm256_fmadd_ps(all(f.one_minus_beta1), _mm256_sub_ps(g, m), m);
  v = _mm256_fmadd_ps(all(f.beta2), v, _mm256_mul_ps(_mm256_mul_ps(all(f.one_minus_beta2), g), g));
  const __m256 denominator = _mm256_fmadd_ps(_mm256_sqrt_ps(v), all(f.inverse_correction2), all(f.eps));
  const __m256 w = _mm256_mul_ps(_mm256_loadu_ps(master), all(f.decay));
  const __m256 change = _mm256_div_ps(_mm256_mul_ps(all(f.step_size), m), denominator);
  _mm256_storeu_ps(exp_avg, m);
  _mm256_storeu_ps(exp_avg_sq, v);
  _mm256_storeu_ps(master, _mm256_sub_ps(w, change));
}

// The last n < 8 elements, through a pack of eight.
void update_rest(const AdamwFactors& f, float scale, float* master, const float* grad, float* exp_avg,
                 float* exp_avg_sq, int64_t n) {
  std::array<float, 8> w{}, g{}, m{}, v{};
  std::copy_n(master, n, w.data());
  std::copy_n(grad, n, g.data());
  std::copy_n(exp_avg, n, m.data());
  std::copy_n(exp_avg_sq, n, v.data());
  update8(f, scale, w.data(), g.data(), m.data(), v.data());
  std::copy_n(w.data(), n, master);
  std::copy_n(m.data(), n, exp_avg);
  std::copy_n(v.data(), n, exp_avg_sq);
}

// All fp32 but `working` (bf16, or undefined).
void update_cpu(const AdamwFactors& f, float scale, const Tensor& master, const Tensor& working, const Tensor& grad,
                const Tensor& exp_avg, const Tensor& exp_avg_sq) {
  const int64_t n = master.numel();
  float *w = floats(master), *g = floats(grad), *m = floats(exp_avg), *v = floats(exp_avg_sq);
  auto* rounded = working.defined() ? working.data_ptr<at::BFloat16>() : nullptr;
  at::parallel_for(0, (n + 1023) / 1024, 16, [&](int64_t first, int64_t last) {
    const int64_t begin = first * 1024, end = std::min(last * 1024, n);
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) update8(f, scale, w + i, g + i, m + i, v + i);
    if (i < end) update_rest(f, scale, w + i, g + i, m + i, v + i, end - i);
    if (rounded != nullptr) std::copy(w + begin, w + end, rounded + begin);
    if (f.zero_grad) std::fill(g + begin, g + end, 0.0f);
  });
}

}  // namespace

void adamw_update(const Tensor& master, const Tensor& working, const Tensor& grad, const Tensor& exp_avg,
                  const Tensor& exp_avg_sq, const Tensor& grad_scale, const AdamwStep& step) {
  const at::IntArrayRef sizes = master.sizes();
  const at::Device device = master.device();
  check_tensor("master", master, at::kFloat, sizes);
  if (working.defined()) check_tensor("working", working, at::kBFloat16, sizes, device);
  check_tensor("grad", grad, at::kFloat, sizes, device);
  check_tensor("exp_avg", exp_avg, kWorkingDtype, sizes, device);
  check_tensor("exp_avg_sq", exp_avg_sq, exp_avg.scalar_type(), sizes, device);
  const AdamwFactors factors = factors_of(step);
  if (master.is_cuda()) {
    MARROW_CUDA_CALL(adamw_update_cuda(master, working, grad, exp_avg, exp_avg_sq, grad_scale, factors));
    return;
  }
  const float scale = *floats(grad_scale);
  if (scale == 0.0f || !std::isfinite(scale)) {
    if (step.zero_grad) grad.zero_();
    return;
  }
  const Tensor m = exp_avg.to(at::kFloat), v = exp_avg_sq.to(at::kFloat);
  update_cpu(factors, scale, master, working, grad, m, v);
  if (!m.is_same(exp_avg)) {  // bf16
    exp_avg.copy_(m);
    exp_avg_sq.copy_(v);
  }
}

}  // namespace marrow
