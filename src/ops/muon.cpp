#include "ops/muon.h"

#include "ops/cuda_launch.h"
#include "ops/muon_cuda.h"

namespace marrow {
namespace {

using at::Tensor;

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

void update_batch(const Tensor& master, const Tensor& working, const Tensor& grad,
                  const Tensor& momentum_buffer, const Tensor& grad_scale, const MuonStep& step) {
  const double larger = static_cast<double>(std::max(master.size(1), master.size(2)));
  const double decay = 1.0 - step.lr * step.weight_decay;
  const double step_size = step.lr * 0.2 * std::sqrt(larger);
  if (master.is_cuda()) {
    Tensor direction = at::empty(grad.sizes(), grad.options().dtype(at::kBFloat16));
    const float* scale = grad_scale.const_data_ptr<float>();
    MARROW_CUDA_CALL(muon_momentum_cuda(
        grad.mutable_data_ptr<float>(), momentum_buffer.mutable_data_ptr<float>(),
        direction.mutable_data_ptr(), scale, static_cast<float>(step.momentum), step.zero_grad,
        grad.numel(), current_cuda_stream()));
    const Tensor orthogonal = orthogonalize(direction);
    MARROW_CUDA_CALL(muon_apply_cuda(
        master.mutable_data_ptr<float>(), working.defined() ? working.mutable_data_ptr() : nullptr,
        orthogonal.const_data_ptr(), scale, static_cast<float>(decay),
        static_cast<float>(step_size), master.numel(), current_cuda_stream()));
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

void muon_update(const Tensor& master, const Tensor& working, const Tensor& grad,
                 const Tensor& momentum_buffer, const Tensor& grad_scale, const MuonStep& step) {
  const at::NoGradGuard no_grad;
  for (const Tensor& tensor : {master, grad, momentum_buffer, working}) {
    if (!tensor.defined()) continue;
    MARROW_CHECK(tensor.dim() == 3 && tensor.is_contiguous() && tensor.sizes() == master.sizes() &&
                     tensor.device() == master.device() &&
                     tensor.scalar_type() == (tensor.is_same(working) ? at::kBFloat16 : at::kFloat),
                 ExitCode::kUsage,
                 Fix("pass contiguous [b, n, m] views of one parameter (ops/muon.h)"),
                 "{} {} does not fit the masters {}", c10::toString(tensor.scalar_type()),
                 c10::str(tensor.sizes()), c10::str(master.sizes()));
  }
  if (master.numel() == 0) return;
  const int64_t matrix = master.size(1) * master.size(2);
  const int64_t batch = std::max<int64_t>(1, kElementsAtOnce / matrix);
  for (int64_t first = 0; first < master.size(0); first += batch) {
    const auto part = [&](const Tensor& all) {
      return all.defined() ? all.slice(0, first, std::min(first + batch, all.size(0))) : all;
    };
    update_batch(part(master.detach()), part(working), part(grad), part(momentum_buffer),
                 grad_scale, step);
  }
}

}  // namespace marrow
