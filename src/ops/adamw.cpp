#include "ops/adamw.h"

#include "ops/adamw_cuda.h"
#include "ops/cpu_math.h"
#include "ops/cuda_launch.h"

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
void update8(const AdamwFactors& f, float scale, float* master, const float* grad, float* exp_avg,
             float* exp_avg_sq) {
  const auto all = [](float x) { return _mm256_set1_ps(x); };
  const __m256 g = _mm256_mul_ps(all(scale), _mm256_loadu_ps(grad));
  __m256 m = _mm256_loadu_ps(exp_avg), v = _mm256_loadu_ps(exp_avg_sq);
  m = _mm256_fmadd_ps(all(f.one_minus_beta1), _mm256_sub_ps(g, m), m);
  v = _mm256_fmadd_ps(all(f.beta2), v, _mm256_mul_ps(_mm256_mul_ps(all(f.one_minus_beta2), g), g));
  const __m256 denominator =
      _mm256_fmadd_ps(_mm256_sqrt_ps(v), all(f.inverse_correction2), all(f.eps));
  const __m256 w = _mm256_mul_ps(_mm256_loadu_ps(master), all(f.decay));
  const __m256 change = _mm256_div_ps(_mm256_mul_ps(all(f.step_size), m), denominator);
  _mm256_storeu_ps(exp_avg, m);
  _mm256_storeu_ps(exp_avg_sq, v);
  _mm256_storeu_ps(master, _mm256_sub_ps(w, change));
}

template <typename Moment>
void update_cpu(const AdamwFactors& f, float scale, float* master, at::BFloat16* working,
                float* grad, Moment* exp_avg, Moment* exp_avg_sq, int64_t n) {
  at::parallel_for(0, (n + 1023) / 1024, 16, [&](int64_t first, int64_t last) {
    int64_t i = first * 1024;
    const int64_t end = std::min(last * 1024, n);
    if constexpr (std::is_same_v<Moment, float>) {
      for (; i + 8 <= end; i += 8) {
        update8(f, scale, master + i, grad + i, exp_avg + i, exp_avg_sq + i);
      }
    }
    for (; i < end; ++i) {
      const float g = scale * grad[i], m0 = exp_avg[i];
      const float m = m0 + f.one_minus_beta1 * (g - m0);
      const float v = f.beta2 * float(exp_avg_sq[i]) + f.one_minus_beta2 * g * g;
      const float denominator = std::sqrt(v) * f.inverse_correction2 + f.eps;
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      master[i] = master[i] * f.decay - f.step_size * m / denominator;
    }
    for (i = first * 1024; working != nullptr && i < end; ++i) working[i] = master[i];
    if (f.zero_grad) std::fill(grad + first * 1024, grad + end, 0.0f);
  });
}

void check(const at::Tensor& master, const at::Tensor& other, const char* name, bool bf16_allowed,
           bool fp32_allowed) {
  const auto type = other.scalar_type();
  MARROW_CHECK(
      other.is_contiguous() && other.numel() == master.numel() &&
          other.device() == master.device() &&
          ((bf16_allowed && type == at::kBFloat16) || (fp32_allowed && type == at::kFloat)),
      ExitCode::kUsage, Fix("pass slices of one parameter's flat buffers (ops/adamw.h)"),
      "{} is {} {}, the master has {} elements", name, c10::toString(type), c10::str(other.sizes()),
      master.numel());
}

}  // namespace

void adamw_update(const at::Tensor& master, const at::Tensor& working, const at::Tensor& grad,
                  const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                  const at::Tensor& grad_scale, const AdamwStep& step) {
  check(master, master, "master", false, true);
  if (working.defined()) check(master, working, "working", true, false);
  check(master, grad, "grad", false, true);
  const bool bf16_moments = exp_avg.scalar_type() == at::kBFloat16;
  check(master, exp_avg, "exp_avg", true, true);
  check(master, exp_avg_sq, "exp_avg_sq", bf16_moments, !bf16_moments);
  const AdamwFactors factors = factors_of(step);
  auto* w = master.mutable_data_ptr<float>();
  auto* g = grad.mutable_data_ptr<float>();
  if (master.is_cuda()) {
    MARROW_CUDA_CALL(adamw_update_cuda(w, working.defined() ? working.mutable_data_ptr() : nullptr,
                                       g, exp_avg.mutable_data_ptr(), exp_avg_sq.mutable_data_ptr(),
                                       bf16_moments, grad_scale.const_data_ptr<float>(), factors,
                                       master.numel(), current_cuda_stream()));
    return;
  }
  const float scale = *grad_scale.const_data_ptr<float>();
  if (scale == 0.0f || !std::isfinite(scale)) {
    if (step.zero_grad) grad.zero_();
    return;
  }
  auto* rounded = working.defined() ? working.mutable_data_ptr<at::BFloat16>() : nullptr;
  if (bf16_moments) {
    update_cpu(factors, scale, w, rounded, g, exp_avg.mutable_data_ptr<at::BFloat16>(),
               exp_avg_sq.mutable_data_ptr<at::BFloat16>(), master.numel());
  } else {
    update_cpu(factors, scale, w, rounded, g, exp_avg.mutable_data_ptr<float>(),
               exp_avg_sq.mutable_data_ptr<float>(), master.numel());
  }
}

}  // namespace marrow
