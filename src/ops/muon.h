// Muon: momentum, orthogonalised by Newton–Schulz iterations, for batches of matrices.
#pragma once
#include "ops/pch.h"

namespace marrow {

struct MuonStep {
  double lr = 0;
  double momentum = 0.95;  // Nesterov
  double weight_decay = 0;
  bool zero_grad = false;  // sets grad to 0, also where the update is skipped
};

// Each of the b matrices is updated by itself: m = lerp(m, g, 1 - momentum), u = lerp(g, m,
// momentum), master = (1 - lr · weight_decay) · master - lr · 0.2 √max(n, m) · orthogonal(u), as
// torch.optim.Muon with adjust_lr_fn = "match_rms_adamw", 5 steps and eps 1e-7. master, grad,
// momentum_buffer [b, n, m] fp32, working bf16 or undefined; all contiguous. The iterations run in
// bf16 on the GPU, in fp32 on the CPU. g = grad_scale · grad; grad_scale [1] fp32 on the device:
// where it is 0 or not finite, nothing but `zero_grad` happens.
void muon_update(const at::Tensor& master, const at::Tensor& working, const at::Tensor& grad,
                 const at::Tensor& momentum_buffer, const at::Tensor& grad_scale, const MuonStep& step);

}  // namespace marrow
