#pragma once
#include <cstdint>

namespace marrow {

// momentum_buffer = lerp(momentum_buffer, g, 1 - momentum); direction (bf16) = lerp(g,
// momentum_buffer, momentum), g = *grad_scale · grad. A gated step (scale 0 or not finite) leaves
// the buffer alone and gives zeros. All [n].
void muon_momentum_cuda(float* grad, float* momentum_buffer, void* direction,
                        const float* grad_scale, float momentum, bool zero_grad, int64_t n,
                        void* stream);

// master = decay · master - step_size · orthogonal (bf16) unless gated; working bf16 or null.
void muon_apply_cuda(float* master, void* working, const void* orthogonal, const float* grad_scale,
                     float decay, float step_size, int64_t n, void* stream);

}  // namespace marrow
