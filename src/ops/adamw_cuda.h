#pragma once
#include <cstdint>

namespace marrow {

// The scalars of an AdamW step, as the kernels use them.
struct AdamwFactors {
  float decay;  // 1 - lr · weight_decay
  float one_minus_beta1, beta2, one_minus_beta2;
  float step_size;            // lr / (1 - beta1^step)
  float inverse_correction2;  // 1 / √(1 - beta2^step)
  float eps;
  bool zero_grad;
};

// working: bf16 or null. Moments fp32, or bf16 where bf16_moments.
void adamw_update_cuda(float* master, void* working, float* grad, void* exp_avg, void* exp_avg_sq,
                       bool bf16_moments, const float* grad_scale, const AdamwFactors& factors,
                       int64_t n, void* stream);

}  // namespace marrow
