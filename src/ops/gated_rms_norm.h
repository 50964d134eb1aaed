// RMSNorm times a gate, behind a gated delta rule.
#pragma once
#include "ops/parameter.h"

namespace marrow {

// y = x / sqrt(mean(x²) + eps) · weight · silu(gate) for each row of D, in fp32. The backward adds into weight.grad, if
// defined, in a fixed order; it runs only where x or gate requires a gradient. Saves x and gate.
at::Tensor gated_rms_norm(const at::Tensor& x,                   // [T, H, D] fp32 or bf16
                          const at::Tensor& gate,                // [T, H, D]
                          const Parameter& weight, double eps);  // [D]

}  // namespace marrow
