// AdamW with decoupled weight decay, one pass over flat buffers.
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

// torch.optim.AdamW's update with the gradient grad_scale · grad. All tensors are contiguous and
// have n elements. master fp32; working bf16 (becomes the rounded master) or undefined; grad fp32;
// exp_avg and exp_avg_sq fp32 or bf16, alike. bf16 moments are read to fp32 and rounded to nearest:
// exp_avg_sq then stops decaying where (1 - beta2) is below 2^-9, so use it with beta2 ≤ 0.99.
// grad_scale [1] fp32 on the device: where it is 0 or not finite, nothing but `zero_grad` happens.
void adamw_update(const at::Tensor& master, const at::Tensor& working, const at::Tensor& grad,
                  const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& grad_scale,
                  const AdamwStep& step);

}  // namespace marrow
