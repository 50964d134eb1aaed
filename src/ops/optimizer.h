// What an optimizer step does to flat buffers. No host synchronisation; grad_scale [1] fp32 is on the device, and where
// it is 0 or not finite nothing but `zero_grad` happens.
#pragma once
#include "ops/pch.h"

namespace marrow {

struct AdamwStep {
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0;
  int64_t step = 1;        // the first update is 1
  bool zero_grad = false;  // sets grad to 0 in the same pass, also where the update is skipped
};

// torch.optim.AdamW's update with the gradient grad_scale · grad. All tensors are contiguous and have n elements.
// master fp32; working bf16 (becomes the rounded master) or undefined; grad fp32; exp_avg and exp_avg_sq fp32 or bf16,
// alike. bf16 moments are read to fp32 and rounded to nearest: exp_avg_sq then stops decaying where (1 - beta2) is
// below 2^-9, so use it with beta2 ≤ 0.99.
void adamw_update(const at::Tensor& master, const at::Tensor& working, const at::Tensor& grad,
                  const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& grad_scale,
                  const AdamwStep& step);

struct MuonStep {
  double lr = 0;
  double momentum = 0.95;  // Nesterov
  double weight_decay = 0;
  bool zero_grad = false;  // sets grad to 0, also where the update is skipped
};

// Muon. Each of the b matrices is updated by itself, with g = grad_scale · grad: m = lerp(m, g, 1 - momentum), u =
// lerp(g, m, momentum), master = (1 - lr · weight_decay) · master - lr · 0.2 √max(n, m) · orthogonal(u), as
// torch.optim.Muon with adjust_lr_fn = "match_rms_adamw", 5 Newton–Schulz steps and eps 1e-7. master, grad,
// momentum_buffer [b, n, m] fp32, working bf16 or undefined; all contiguous. The iterations run in bf16 on the GPU, in
// fp32 on the CPU.
void muon_update(const at::Tensor& master, const at::Tensor& working, const at::Tensor& grad,
                 const at::Tensor& momentum_buffer, const at::Tensor& grad_scale, const MuonStep& step);

// total += Σ flat², in fp64 in a fixed order. flat fp32 (any shape, contiguous), total [1] fp64 on the same device.
void add_sum_of_squares(const at::Tensor& flat, const at::Tensor& total);

}  // namespace marrow
