#include "ops/muon.h"

#include "ops/op_tools.h"

namespace marrow {
namespace {

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

void muon_update(const Tensor& master, const Tensor& working, const Tensor& grad, const Tensor& momentum_buffer,
                 const Tensor& grad_scale, const MuonStep& step) {
  const at::NoGradGuard no_grad;
  MARROW_CHECK(master.dim() == 3, ExitCode::kUsage, Fix("pass [b, n, m] views (ops/muon.h)"), "the masters are {}",
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

}  // namespace marrow
