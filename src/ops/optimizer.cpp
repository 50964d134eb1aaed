#include "ops/optimizer.h"

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

// The first n (at most 8) of 8 elements of fp32 masters and moments.
void update8(const AdamwFactors& f, float scale, float* master, const float* grad, float* exp_avg, float* exp_avg_sq,
             int64_t n) {
  const auto all = [](float x) { return _mm256_set1_ps(x); };
  const __m256 g = _mm256_mul_ps(all(scale), load8(grad, n));
  __m256 m = load8(exp_avg, n), v = load8(exp_avg_sq, n);
  m = _mm256_fmadd_ps(all(f.one_minus_beta1), _mm256_sub_ps(g, m), m);
  v = _mm256_fmadd_ps(all(f.beta2), v, _mm256_mul_ps(_mm256_mul_ps(all(f.one_minus_beta2), g), g));
  const __m256 denominator = _mm256_fmadd_ps(_mm256_sqrt_ps(v), all(f.inverse_correction2), all(f.eps));
  const __m256 w = _mm256_mul_ps(load8(master, n), all(f.decay));
  const __m256 change = _mm256_div_ps(_mm256_mul_ps(all(f.step_size), m), denominator);
  store8(exp_avg, m, n);
  store8(exp_avg_sq, v, n);
  store8(master, _mm256_sub_ps(w, change), n);
}

// All fp32 but `working` (bf16, or undefined).
void update_cpu(const AdamwFactors& f, float scale, const Tensor& master, const Tensor& working, const Tensor& grad,
                const Tensor& exp_avg, const Tensor& exp_avg_sq) {
  const int64_t n = master.numel();
  float *w = floats(master), *g = floats(grad), *m = floats(exp_avg), *v = floats(exp_avg_sq);
  auto* rounded = working.defined() ? working.data_ptr<at::BFloat16>() : nullptr;
  at::parallel_for(0, (n + 1023) / 1024, 16, [&](int64_t first, int64_t last) {
    const int64_t begin = first * 1024, end = std::min(last * 1024, n);
    for (int64_t i = begin; i < end; i += 8) update8(f, scale, w + i, g + i, m + i, v + i, end - i);
    if (rounded != nullptr) std::copy(w + begin, w + end, rounded + begin);
    if (f.zero_grad) std::fill(g + begin, g + end, 0.0f);
  });
}

constexpr int64_t kElementsAtOnce = int64_t{1} << 26;  // bounds the temporaries

// Five Newton–Schulz iterations on each matrix of u [b, n, m]; singular values come near 1.
Tensor orthogonalize(const Tensor& u) {
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  const Tensor norm = at::linalg_vector_norm(u.flatten(1), 2, {1}, true, at::kFloat);
  Tensor x = u / norm.clamp_min(1e-7).to(u.scalar_type()).unsqueeze(2);
  const bool tall = u.size(1) > u.size(2);  // the smaller Gram matrix is the cheaper
  for (int i = 0; i < 5; ++i) {
    const Tensor xt = x.transpose(1, 2);
    const Tensor gram = tall ? at::bmm(xt, x) : at::bmm(x, xt);
    const Tensor polynomial = at::baddbmm(gram, gram, gram, kB, kC);
    x = tall ? at::baddbmm(x, x, polynomial, kA, 1) : at::baddbmm(x, polynomial, x, kA, 1);
  }
  return x;
}

void update_batch(const Tensor& master, const Tensor& working, const Tensor& grad, const Tensor& momentum_buffer,
                  const Tensor& grad_scale, const MuonStep& step) {
  const double larger = static_cast<double>(std::max(master.size(1), master.size(2)));
  const double decay = 1.0 - step.lr * step.weight_decay;
  const double step_size = step.lr * 0.2 * std::sqrt(larger);
  if (master.is_cuda()) {
    const Tensor direction = at::empty(grad.sizes(), grad.options().dtype(at::kBFloat16));
    MARROW_CUDA_CALL(muon_momentum_cuda(grad, momentum_buffer, direction, grad_scale, static_cast<float>(step.momentum),
                                        step.zero_grad));
    const Tensor orthogonal = orthogonalize(direction);
    MARROW_CUDA_CALL(muon_apply_cuda(master, working, orthogonal, grad_scale, static_cast<float>(decay),
                                     static_cast<float>(step_size)));
    return;
  }
  const float scale = *grad_scale.const_data_ptr<float>();
  if (scale != 0.0f && std::isfinite(scale)) {
    const Tensor g = grad * scale;
    momentum_buffer.lerp_(g, 1.0 - step.momentum);
    const Tensor orthogonal = orthogonalize(at::lerp(g, momentum_buffer, step.momentum));
    master.mul_(decay).sub_(orthogonal, step_size);
    if (working.defined()) working.copy_(master);
  }
  if (step.zero_grad) grad.zero_();
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

void muon_update(const Tensor& master, const Tensor& working, const Tensor& grad, const Tensor& momentum_buffer,
                 const Tensor& grad_scale, const MuonStep& step) {
  const at::NoGradGuard no_grad;
  MARROW_CHECK(master.dim() == 3, ExitCode::kUsage, Fix("pass [b, n, m] views (ops/optimizer.h)"), "the masters are {}",
               c10::str(master.sizes()));
  check_tensor("master", master, at::kFloat, master.sizes());
  const at::Device device = master.device();
  check_tensor("grad", grad, at::kFloat, master.sizes(), device);
  check_tensor("momentum_buffer", momentum_buffer, at::kFloat, master.sizes(), device);
  if (working.defined()) check_tensor("working", working, at::kBFloat16, master.sizes(), device);
  if (master.numel() == 0) return;
  const int64_t matrix = master.size(1) * master.size(2);
  const int64_t batch = std::max<int64_t>(1, kElementsAtOnce / matrix);
  for (int64_t first = 0; first < master.size(0); first += batch) {
    const auto part = [&](const Tensor& all) {
      return all.defined() ? all.slice(0, first, std::min(first + batch, all.size(0))) : all;
    };
    update_batch(part(master.detach()), part(working), part(grad), part(momentum_buffer), grad_scale, step);
  }
}

void add_sum_of_squares(const Tensor& flat, const Tensor& total) {
  check_tensor("add_sum_of_squares: flat", flat, at::kFloat, flat.sizes());
  check_tensor("add_sum_of_squares: total", total, at::kDouble, {1}, flat.device());
  if (flat.is_cuda()) {
    const Tensor partial = at::empty({kSumBlocks}, total.options());
    MARROW_CUDA_CALL(add_sum_of_squares_cuda(flat, partial, total));
    return;
  }
  const int64_t n = flat.numel();
  constexpr int64_t kPart = 1 << 16;  // parts do not depend on the number of threads
  std::vector<double> parts((n + kPart - 1) / kPart);
  at::parallel_for(0, static_cast<int64_t>(parts.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* x = floats(flat) + i * kPart;
      const int64_t count = std::min(kPart, n - i * kPart);
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < count; ++c) sum += double{x[c]} * x[c];
      parts[i] = sum;
    }
  });
  for (const double part : parts) *total.data_ptr<double>() += part;
}

}  // namespace marrow
