// RMSNorm, alone and after a residual addition.
#pragma once
#include "ops/parameter.h"

namespace marrow {

// y = x / sqrt(mean(x²) + eps) · weight per row, statistics in fp32. x [T, H] fp32 or bf16, weight
// [H] of the same dtype. The backward adds into weight.grad, if defined, in a fixed order; it runs
// only where x requires a gradient. Saves x.
at::Tensor rms_norm(const at::Tensor& x,  // [T, H]
                    const Parameter& weight, double eps);

// (sum, normed): sum = x + residual, rounded to the working dtype, normed = rms_norm(sum). One
// autograd node; x and residual get the same gradient. Saves sum.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,         // [T, H]
                                               const at::Tensor& residual,  // [T, H]
                                               const Parameter& weight, double eps);

}  // namespace marrow
